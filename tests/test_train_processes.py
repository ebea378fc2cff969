"""Training in two processes (gloo), with copies (DDP) or shards (FSDP): the same weights as in one, and checkpoints
that any continues."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import FSDPStrategy
from torch.multiprocessing import start_processes
from transformers import LlamaForCausalLM

from data.batch import Sequences
from data.features import Features
from data.module import DraftDataModule
from spec_decode.drafters.eagle3 import Eagle3Draft
from spec_decode.drafters.medusa import MedusaDraftModel
from spec_decode.errors import DraftwrightError
from spec_decode.target_hf import HFTarget
from train.callbacks import KeepRandomState
from train.checks import check_strategy
from train.draft import build_draft
from train.eagle3 import Eagle3Module
from train.losses import soft_cross_entropy
from train.medusa import MedusaModule
from train.medusa2 import Medusa2Module
from train.module import DraftModule
from train.optim import build_optimizer, warmup_cosine
from train.processes import in_turn
from train.sharding import ShardedStrategy

LENGTHS = (14, 11, 9, 12, 20, 7, 13)
KINDS: dict[str, tuple[Any, type[DraftModule], dict[str, Any]]] = {
    "eagle3": (Eagle3Draft, Eagle3Module, {}),
    "medusa": (MedusaDraftModel, MedusaModule, {"num_heads": 2}),
}
TOLERANCE = {"atol": 2e-5, "rtol": 1e-4}  # fp32: sums over tokens are taken in another order


def _module(
    variant: str, model: LlamaForCausalLM, labels: Any = "target", optimizer: str = "adamw", lr: float = 1e-3
) -> DraftModule:
    kind, module, options = KINDS[variant]
    target = HFTarget(model, "tiny")
    torch.manual_seed(1)
    draft = build_draft(kind, target, torch.arange(5, 45), "", **options).to(target.dtype)
    return module(
        draft, target, steps=2, decay=0.8, loss=soft_cross_entropy, labels=labels, lr=lr,
        optimizer=partial(build_optimizer, name=optimizer),
        schedule=partial(warmup_cosine, warmup_steps=0, final_ratio=0.1),
    )  # fmt: skip


class _StopAfter(Callback):
    """Writes a checkpoint after `step` steps and stops."""

    def __init__(self, step: int, file: Path) -> None:
        self.step, self.file = step, file

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.file)
            trainer.should_stop = True


def _fit(
    module: DraftModule,
    folder: Path,
    *,
    processes: int = 1,
    strategy: Any = None,
    micro_batches: int = 1,
    stop: Callback | None = None,
    resume: Path | None = None,
) -> dict[str, float]:
    """Train for 5 steps of about 40 tokens; returns what was logged last."""
    strategy = strategy or ("ddp_fork" if processes > 1 else "auto")
    seed_everything(0, verbose=False)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(50, (sum(LENGTHS),), generator=generator, dtype=torch.int32)
    mask = torch.cat([torch.arange(length) >= length // 3 for length in LENGTHS])
    source = Features(module.target, Sequences(ids, mask, torch.tensor([0, *LENGTHS]).cumsum(0)), module.draft.taps)
    trainer = Trainer(
        accelerator="cpu", devices=processes, strategy=strategy, max_epochs=1,
        accumulate_grad_batches=micro_batches, gradient_clip_val=0.5, val_check_interval=5 * micro_batches,
        log_every_n_steps=1, num_sanity_val_steps=0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        callbacks=[KeepRandomState(), *([stop] if stop else [])],
    )  # fmt: skip
    datamodule = DraftDataModule(source, source, tokens_per_batch=40, seed=0, epochs=1, max_steps=5)
    trainer.fit(module, datamodule=datamodule, ckpt_path=resume, weights_only=True)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def _one_of_two(rank: int, port: int, module: DraftModule, folder: Path, options: dict[str, Any]) -> None:
    """Process `rank` of `_fit_shards`; the first writes down what came out."""
    os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    logged = _fit(module, folder, processes=2, strategy=ShardedStrategy(), **options)
    weights = module.whole_draft().state_dict()
    if rank == 0:
        torch.save({"weights": weights, "logged": logged}, folder / "shards.pt")


def _fit_shards(module: DraftModule, folder: Path, **options: Any) -> dict[str, float]:
    """`_fit` in two processes, each with a half of every weight. Lightning starts such ones by command alone."""
    start_processes(_one_of_two, (find_free_network_port(), module, folder, options), nprocs=2, start_method="fork")
    done = torch.load(folder / "shards.pt", weights_only=True)
    module.draft.load_state_dict(done["weights"])
    return done["logged"]


FITS: dict[str, Callable[..., dict[str, float]]] = {
    "one": _fit,
    "copies": partial(_fit, processes=2),
    "shards": _fit_shards,
}


@pytest.fixture(scope="module", params=["eagle3", "medusa"])
def alone(request, tiny_llama, tmp_path_factory) -> SimpleNamespace:
    """What one process trains and measures without a break."""
    module = _module(request.param, tiny_llama())
    logged = _fit(module, tmp_path_factory.mktemp("alone"))
    return SimpleNamespace(variant=request.param, weights=module.draft.state_dict(), logged=logged)


def _assert_same(module: DraftModule, logged: dict[str, float], alone: SimpleNamespace) -> None:
    torch.testing.assert_close(dict(module.draft.state_dict()), dict(alone.weights), **TOLERANCE)
    assert logged.keys() >= {"train/loss", "val/loss", "val/tau", "train/accuracy/1"}
    for name, value in alone.logged.items():
        assert logged[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


@pytest.mark.parametrize(
    ("fit", "micro_batches"), [("copies", 1), ("shards", 1), ("one", 2), ("copies", 2), ("shards", 2), ("one", 5)]
)
def test_shared_work_gives_the_same_weights(alone, tiny_llama, tmp_path, fit: str, micro_batches: int) -> None:
    """With 5 micro-batches a step has fewer documents than parts."""
    module = _module(alone.variant, tiny_llama())
    logged = FITS[fit](module, tmp_path, micro_batches=micro_batches)
    _assert_same(module, logged, alone)


@pytest.mark.parametrize(("fit", "micro_batches"), [("copies", 1), ("shards", 1), ("one", 2)])
def test_muon_shares_the_work_as_well(
    tiny_llama, tmp_path, monkeypatch: pytest.MonkeyPatch, fit: str, micro_batches: int
) -> None:
    """In fp64, since its orthogonalisation enlarges rounding: in fp32 the weights differ by 9e-5 here."""
    monkeypatch.setattr("train.optim.multiplies_bfloat16", lambda device: False)
    one, two = (_module("eagle3", tiny_llama().double(), optimizer="muon", lr=1.5e-2) for _ in range(2))
    _fit(one, tmp_path)
    FITS[fit](two, tmp_path, micro_batches=micro_batches)
    torch.testing.assert_close(dict(two.draft.state_dict()), dict(one.draft.state_dict()), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("before", "after"),
    [("copies", "one"), ("one", "copies"), ("shards", "one"), ("one", "shards"), ("shards", "shards")],
)
def test_each_continues_the_checkpoint_of_another(alone, tiny_llama, tmp_path, before: str, after: str) -> None:
    checkpoint = tmp_path / "last.ckpt"
    FITS[before](_module(alone.variant, tiny_llama()), tmp_path, stop=_StopAfter(2, checkpoint))
    module = _module(alone.variant, tiny_llama())
    logged = FITS[after](module, tmp_path, resume=checkpoint)
    _assert_same(module, logged, alone)


def test_labels_outside_the_draft_vocabulary_are_not_counted(tiny_llama, tmp_path) -> None:
    one, two = (_module("eagle3", tiny_llama(), labels="data") for _ in range(2))
    _fit(one, tmp_path)
    _fit(two, tmp_path, micro_batches=2)
    torch.testing.assert_close(dict(two.draft.state_dict()), dict(one.draft.state_dict()), **TOLERANCE)


def test_processes_prepare_one_after_another(tmp_path: Path) -> None:
    inside: list[int] = []
    most: list[int] = []

    def prepare() -> None:
        with in_turn(tmp_path, processes=3):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.02)
            inside.pop()

    threads = [threading.Thread(target=prepare) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1]


def test_other_strategies_are_refused() -> None:
    """Lightning's older FSDP, which cuts weights into flat pieces, refuses CPUs and can't clip the norm."""
    trainer: Any = SimpleNamespace(strategy=FSDPStrategy(accelerator="cpu"))
    with pytest.raises(DraftwrightError, match=r"strategy=FSDPStrategy is not supported: use trainer=ddp, or"):
        check_strategy(trainer, Eagle3Module)


def test_a_tuned_target_is_not_sharded() -> None:
    trainer: Any = SimpleNamespace(strategy=ShardedStrategy())
    check_strategy(trainer, MedusaModule)
    with pytest.raises(DraftwrightError, match=r"Medusa2Module trains weights of the target.*: use trainer=ddp"):
        check_strategy(trainer, Medusa2Module)
