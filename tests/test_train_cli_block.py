"""Block drafts and P-EAGLE through the command line, small: train, the folder, its report, stopping and going on."""

from __future__ import annotations

import csv
import json
import logging
import math
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eval.cli import main as evaluate
from spec_decode.drafters import load_draft
from train.module import DraftModule

VARIANTS = ["dflash", "dspark", "p_eagle"]
BRIEF = ["module.schedule.warmup_steps=1", "draft.num_drafts=4", "draft.num_layers=2"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, make_world: Callable[[Path], Path]) -> Path:
    """A folder in which runs are started."""
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_from_training_to_its_report(
    variant: str, world: Path, train_in: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["max_steps=8", "logger=csv", "eval.limit=2", "trainer.log_every_n_steps=1", *BRIEF]
    train_in(world, f"+variant={variant}", *words, f"output_dir={tmp_path}")
    metrics = json.loads((tmp_path / "run.json").read_text())["metrics"]
    names = [f"{name}/{step}" for name in ("loss", "accuracy", "acceptance") for step in range(4)]
    assert {*metrics} == {f"val/{name}" for name in (*names, "loss", "tau")}
    assert all(math.isfinite(value) for value in metrics.values())
    assert 1 <= metrics["val/tau"] <= 5
    with (tmp_path / "csv" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    losses = [float(row["train/loss"]) for row in rows if row["train/loss"]]
    assert len(losses) == 8
    assert sum(losses[-3:]) < sum(losses[:3])
    assert {f"train/{name}" for name in (*names, "tau")} <= rows[0].keys()
    assert len(list((world / "cache" / "features").iterdir())) == 2  # one capture of each side serves both

    own = json.loads((tmp_path / "eval" / "report.json").read_text())["benchmarks"]["held_out"]
    assert (own["prompts"], own["identical"], own["differences"]) == (2, True, [])
    draft: Any = load_draft(tmp_path / "draft")
    assert (draft.config.draft_vocab_size, draft.config.num_drafts, draft.config.target) == (40, 4, "target")

    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w3 w5"}\n{"prompt": "w7"}\n')
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    options = ["benchmark=file", f"path={tmp_path / 'prompts.jsonl'}", "max_new_tokens=6", "tree=static"]
    fixed = ["target=hf", "target.path=target", "target.dtype=float32", f"output_dir={tmp_path / 'report'}"]
    monkeypatch.setattr(sys, "argv", ["eval", f"checkpoint={tmp_path / 'draft'}", *fixed, *options])
    evaluate()
    report = json.loads((tmp_path / "report" / "report.json").read_text())["benchmarks"]["file"]
    assert (report["prompts"], report["new_tokens"], report["identical"]) == (2, 12, True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_stopped_and_continued_ends_with_the_same_bits(
    variant: str, world: Path, train_in: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is drawn comes from the random state, which neither a validation nor the continued run may change."""
    words = [f"+variant={variant}", "max_steps=6", "logger=none", "eval.enabled=false", *BRIEF]
    words += ["trainer.val_check_interval=2"]
    train_in(world, *words, f"output_dir={tmp_path / 'whole'}")

    def stopping(module: DraftModule, *arguments: Any) -> Any:
        if module.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(module, *arguments)

    step = DraftModule.training_step
    with monkeypatch.context() as patched:
        patched.setattr(DraftModule, "training_step", stopping)
        with pytest.raises(SystemExit) as stopped:
            train_in(world, *words, f"output_dir={tmp_path / 'stopped'}")
    assert stopped.value.code == 143
    train_in(world, *words, f"output_dir={tmp_path / 'resumed'}", f"ckpt_path={tmp_path / 'stopped' / 'last.ckpt'}")
    whole, resumed = (load_file(tmp_path / name / "draft" / "model.safetensors") for name in ("whole", "resumed"))
    assert whole.keys() == resumed.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["+variant=dflash", "module.steps=2"], "module.steps=2 but one pass of the draft proposes 7 tokens: leave"),
        (["+variant=dflash", "module.anchors=0"], "module.anchors=0 is not possible: it must be a whole number of"),
        (["+variant=dflash", "draft.num_layers=0"], "num_layers must be at least 1, got 0"),
        (["+variant=p_eagle", "module.keep=2"], "module.keep=2 is not possible: it must be a number from 0 to 1"),
        (["+variant=p_eagle", "module.steps=2"], "module.steps=2 but one pass of the draft proposes 4 tokens"),
        (["+variant=p_eagle", "+draft.norm_output=true"], "norm_output is for drafts that feed their output back"),
        (["+variant=dspark", "draft.markov_rank=0"], "markov_rank must be at least 1, got 0"),
        (["+variant=dspark", "draft.confidence_threshold=2"], "confidence_threshold must lie from 0 to 1, got 2"),
        (["+variant=dflash", "draft.causal=maybe"], "draft.causal=maybe is not possible: it must be true or false"),
        (
            ["+variant=dflash", "draft.mask_token=64"],
            "mask_token 64 is no token of the target: choose one from 0 to 63",
        ),
        (["+variant=dflash", "draft.target_layers=[2,9]"], "target layers [2, 9] cannot be tapped on a target of 8"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_wrong_values_are_one_sentence_before_anything_is_captured(
    words: list[str], message: str, world: Path, refused_early: Callable[..., str]
) -> None:
    assert refused_early(world, *words).startswith(message)
