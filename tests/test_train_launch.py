"""`python -m train` in two processes, as Lightning and torchrun start them, and dry runs of the published recipes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from conf import started

WORDS = [
    "+variant=eagle3", "target=hf", "target.path=target", "dataset=jsonl", "dataset.path=chats.jsonl",
    "dataset.decontaminate=null", "tokens_per_batch=64", "train_tokens=600", "heldout_tokens=60", "max_length=64",
    "draft_vocab_size=40", "max_steps=4", "module.steps=2", "module.optimizer.name=adamw", "logger=none",
    "eval.enabled=false", "trainer.accelerator=cpu", "trainer.precision=32-true", "target.dtype=float32",
]  # fmt: skip
LAUNCHERS = {
    "lightning": ["-m", "train"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "train"],
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, make_world: Callable[[Path], Path]) -> Path:
    """A folder in which runs are started."""
    return make_world(tmp_path_factory.mktemp("world"))


def _train(world: Path, launcher: str, *words: str) -> Path:
    """Train; returns the one folder that the run has made."""
    before = set(world.glob("outputs/eagle3/*"))
    root = Path(__file__).resolve().parent.parent
    environment = {"PYTHONPATH": str(root), "DRAFTWRIGHT_CACHE": str(world / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *LAUNCHERS[launcher], *WORDS, *words]
    result = subprocess.run(
        command, cwd=world, env=os.environ | environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("draft written to") == 1
    (folder,) = set(world.glob("outputs/eagle3/*")) - before
    return folder


@pytest.fixture(scope="module")
def alone(world: Path) -> dict[str, torch.Tensor]:
    """The draft of one process."""
    return load_file(_train(world, "lightning", "trainer=gpu") / "draft" / "model.safetensors")


@pytest.mark.parametrize(("launcher", "trainer"), [("lightning", "ddp"), ("torchrun", "fsdp")])
def test_two_processes_share_a_folder_and_write_a_whole_draft(
    launcher: str, trainer: str, world: Path, alone: dict[str, torch.Tensor]
) -> None:
    folder = _train(world, launcher, f"trainer={trainer}", "trainer.devices=2")
    assert sorted(path.name for path in folder.iterdir()) == ["draft", "last.ckpt", "run.json"]
    draft = load_file(folder / "draft" / "model.safetensors")
    torch.testing.assert_close(draft, alone, atol=2e-5, rtol=1e-4)  # as tests/test_train_processes.py


@pytest.mark.parametrize(
    ("name", "alone", "together"), [("TORCHELASTIC_RUN_ID", None, "none"), ("SLURM_STEP_NUM_TASKS", "1", "2")]
)
def test_the_processes_of_one_launch_agree_on_the_time(
    name: str, alone: str | None, together: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in ("TORCHELASTIC_RUN_ID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(other, raising=False)
    if alone is not None:
        monkeypatch.setenv(name, alone)
    before = datetime.now()
    assert before <= datetime.fromisoformat(started("%Y-%m-%d %H:%M:%S.%f")) <= datetime.now()
    monkeypatch.setenv(name, together)
    parent = psutil.Process().parent()
    assert parent is not None
    assert started("%Y-%m-%d_%H-%M-%S.%f") == f"{datetime.fromtimestamp(parent.create_time()):%Y-%m-%d_%H-%M-%S.%f}"


def _tiny_qwen3(folder: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, eos_token_id=1, pad_token_id=0,
        tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)


@pytest.mark.parametrize(
    ("experiment", "overwrite"), [("llama31_8b_eagle3", lambda folder: None), ("qwen3_8b_eagle3", _tiny_qwen3)]
)
def test_published_recipes_run_dry_on_a_target_of_their_family(
    experiment: str, overwrite: Callable[[Path], None], tmp_path: Path, make_world: Any, train_in: Callable[..., None]
) -> None:
    """Its own keys but the sizes, on one step."""
    world = make_world(tmp_path)
    overwrite(world / "target")
    words = ("trainer.accelerator=cpu", "trainer.precision=32-true", "eval.dtype=float32", "logger=none")
    experiment = f"+experiment={experiment}"
    train_in(
        world, "+variant=eagle3", "trainer=gpu", experiment, "+trainer.fast_dev_run=true", "output_dir=out", *words
    )
    checkpoint = torch.load(world / "out" / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 1
    assert checkpoint["draftwright"]["module.steps"] == 7
    assert (world / "out" / "draft" / "model.safetensors").exists()
