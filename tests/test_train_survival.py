"""Training that is killed, that meets NaN, and that runs out of disk: what is left, and that it goes on from there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from safetensors.torch import load_file
from torch import nn

from data.batch import Batch
from data.module import PlanLoader
from spec_decode.errors import DraftwrightError
from train.eagle3 import Eagle3Module
from train.nonfinite import GuardSteps

# Runs `python -m train` with a checkpoint every 5 steps, and lets something happen after step 17.
DRIVER = """
import os, resource, signal, sys
from pathlib import Path
from train import callbacks, cli, run

happens = sys.argv.pop(1)
run.StepCheckpoint = lambda train_time_interval, **rest: callbacks.StepCheckpoint(every_n_train_steps=5, **rest)

def after(self, trainer, *_):
    if trainer.global_step == 17 and happens == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if trainer.global_step == 17 and happens == "full":
        size = os.path.getsize(Path(trainer.default_root_dir) / "last.ckpt") // 2
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

callbacks.LogProgress.on_train_batch_end = after
cli.main()
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, make_world: Callable[[Path], Path]) -> Path:
    return make_world(tmp_path_factory.mktemp("world"))


def train(world: Path, name: str, *words: str, happens: str = "") -> subprocess.CompletedProcess[str]:
    """A run into the folder `name`, with a feature cache of its own."""
    fixed = ["target=hf", "target.path=target", "target.dtype=float32", "dataset=jsonl", "dataset.path=chats.jsonl"]
    fixed += ["dataset.decontaminate=null", "trainer.precision=32-true", "logger=none", "eval.enabled=false"]
    small = ["tokens_per_batch=64", "train_tokens=600", "heldout_tokens=60", "max_length=64", "draft_vocab_size=40"]
    brief = ["epochs=3", "trainer.val_check_interval=4", "module.steps=2", f"output_dir={world / name}"]
    start = ["-c", DRIVER, happens] if happens else ["-m", "train"]
    root = Path(__file__).resolve().parent.parent
    cache = {"PYTHONPATH": str(root), "DRAFTWRIGHT_CACHE": str(world / f"cache of {name}"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *start, "+variant=eagle3", *fixed, *small, *brief, *words],
        cwd=world,
        env={**os.environ, **cache},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def draft(world: Path, name: str) -> dict[str, Any]:
    return load_file(world / name / "draft" / "model.safetensors")


@pytest.mark.parametrize("features", ["online", "cache", "hybrid"])
def test_killed_between_two_checkpoints_and_continued_it_gives_the_same_draft(world: Path, features: str) -> None:
    """Step 17 lies in the second epoch, two steps after a checkpoint."""
    whole, killed = f"whole {features}", f"killed {features}"
    words = [f"features={features}"]
    assert train(world, whole, *words).returncode == 0
    assert train(world, killed, *words, happens="killed").returncode == -signal.SIGKILL
    checkpoint = torch.load(world / killed / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 15
    assert not (world / killed / "draft").exists()
    result = train(world, killed, *words, f"ckpt_path={world / killed / 'last.ckpt'}")
    assert result.returncode == 0, result.stderr[-3000:]
    for key, value in draft(world, whole).items():
        assert torch.equal(value, draft(world, killed)[key]), key


def test_killed_in_the_first_epoch_of_hybrid_it_gives_the_same_draft(world: Path) -> None:
    """tokens_per_batch=32: an epoch has 22 steps, so documents after step 15 are on disk in neither run."""
    words = ["features=hybrid", "tokens_per_batch=32"]
    assert train(world, "whole", *words).returncode == 0
    assert train(world, "killed", *words, happens="killed").returncode == -signal.SIGKILL
    assert list((world / "cache of killed").rglob("shard-*"))
    assert train(world, "killed", *words, f"ckpt_path={world / 'killed' / 'last.ckpt'}").returncode == 0
    for key, value in draft(world, "whole").items():
        assert torch.equal(value, draft(world, "killed")[key]), key


def test_a_disk_that_is_full_leaves_the_older_checkpoint(world: Path) -> None:
    result = train(world, "full", happens="full")
    last = world / "full" / "last.ckpt"
    assert result.returncode == 2
    sentence = result.stderr.strip().splitlines()[-1]
    assert sentence.startswith(f"train: could not write the checkpoint {last} (")
    assert f"{last} from before is kept; free space, then continue with ckpt_path={last}" in sentence
    assert "Traceback" not in result.stderr
    assert torch.load(last, weights_only=True)["global_step"] == 15
    assert not [path for path in last.parent.iterdir() if path.name.startswith(".last")]
    assert train(world, "full", f"ckpt_path={last}").returncode == 0


@pytest.fixture
def nan_in_step_3(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = Eagle3Module._loss

    def sometimes(self: Eagle3Module, unrolled: Any) -> Any:
        value, steps = loss(self, unrolled)
        return value * (float("nan") if self.trainer.global_step == 2 else 1.0), steps

    monkeypatch.setattr(Eagle3Module, "_loss", sometimes)


@pytest.mark.usefixtures("nan_in_step_3")
def test_nan_stops_the_run_with_the_batch_and_the_last_good_checkpoint(
    world: Path, train_in: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        train_in(world, "+variant=eagle3", "logger=none", "checkpoint_minutes=0", f"output_dir={tmp_path}")
    assert ended.value.code == 2
    sentence = capsys.readouterr().err.strip().splitlines()[-1]
    assert sentence.startswith("train: the loss of step 3 is nan (gradient nan), so training stopped before it changed")
    assert f"{tmp_path / 'last.ckpt'} is good and kept; {tmp_path / 'bad_batch.txt'} says how to look" in sentence
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 2
    assert all(value.isfinite().all() for value in checkpoint["state_dict"].values())
    batch = load_file(tmp_path / "bad_batch.safetensors")
    assert len(batch["ids"]) == len(batch["features"]) == len(batch["last_hidden"]) == batch["offsets"][-1]
    text = (tmp_path / "bad_batch.txt").read_text()
    assert 'load_file("bad_batch.safetensors")' in text
    assert text.startswith("The loss of step 3 was nan")


@pytest.mark.usefixtures("nan_in_step_3")
def test_nan_is_skipped_and_counted_if_asked(
    world: Path, train_in: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_in(world, "+variant=eagle3", "logger=csv", "on_nan=skip", "eval.enabled=false", f"output_dir={tmp_path}")
    printed = capsys.readouterr().out
    assert "the loss of step 3 is nan (gradient nan): the batch is skipped" in printed
    assert "1 batches with a loss or gradient that is NaN or infinite were skipped" in printed
    assert "train/skipped_batches" in (tmp_path / "csv" / "metrics.csv").read_text()
    assert all(value.float().isfinite().all() for value in load_file(tmp_path / "draft" / "model.safetensors").values())


class Source:
    """Batches whose ids say what the loss is multiplied with."""

    lengths = [1, 1, 1, 1]  # noqa: RUF012
    factors = (1.0, float("inf"), float("nan"), 1.0)

    def batch(self, documents: list[int]) -> Batch:
        ids, zero = torch.tensor(documents), torch.zeros(0)
        return Batch(ids, ids.bool(), torch.tensor([0, 1]), zero, zero)

    def flush(self) -> None:
        pass


class Module(LightningModule):
    """The factor of a batch is in the loss, or in the gradient alone."""

    def __init__(self, bad_gradient: bool) -> None:
        super().__init__()
        self.w, self.bad_gradient = nn.Parameter(torch.ones(2)), bad_gradient

    def training_step(self, batch: Batch, batch_index: int) -> torch.Tensor:
        factor = Source.factors[int(batch.ids)]
        if not self.bad_gradient:
            return self.w.sum() + (factor - 1)
        w = self.w * 1
        w.register_hook(lambda grad: grad * factor)
        return w.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


@pytest.mark.parametrize("bad_gradient", [False, True])
def test_a_skipped_step_changes_no_weight(tmp_path: Path, bad_gradient: bool) -> None:
    def weights(plan: list[list[int]], action: Any = "skip") -> tuple[torch.Tensor, GuardSteps]:
        module, guard = Module(bad_gradient), GuardSteps(tmp_path, action, tmp_path / "last.ckpt")
        quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=1,
            enable_checkpointing=False,
            callbacks=[guard],
            gradient_clip_val=0.5,
            **quiet,
        )
        trainer.fit(module, train_dataloaders=PlanLoader(Source(), plan))
        return module.w.detach(), guard

    skipped, guard = weights([[0], [1], [2], [3]])
    assert guard.skipped == 2
    assert guard.state_dict() == {"skipped": 2}
    assert torch.equal(skipped, weights([[0], [3]])[0])
    with pytest.raises(DraftwrightError, match="no checkpoint was written yet"):
        weights([[0], [1]], "stop")
