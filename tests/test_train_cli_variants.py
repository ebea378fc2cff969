"""Every variant through the command line, small: train, the draft's folder, the report on it, stopping and going on."""

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
from train.eagle import EagleModule

VARIANTS = {"eagle": 1, "hass": 3, "mtp": 3, "hydra": 4, "medusa": 4}  # and their steps


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, make_world: Callable[[Path], Path]) -> Path:
    """A folder in which runs are started."""
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_from_training_to_its_report(
    variant: str, world: Path, train_in: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "max_steps=8",
        "logger=csv",
        "eval.limit=2",
        "trainer.log_every_n_steps=1",
        "module.schedule.warmup_steps=1",
    ]
    train_in(world, f"+variant={variant}", *words, f"output_dir={tmp_path}")
    record = json.loads((tmp_path / "run.json").read_text())
    steps, metrics = VARIANTS[variant], record["metrics"]
    assert [name for name in metrics if name.startswith("val/loss/")] == [f"val/loss/{step}" for step in range(steps)]
    assert all(math.isfinite(value) for value in metrics.values())
    assert 1 <= metrics["val/tau"] <= 1 + steps
    with (tmp_path / "csv" / "metrics.csv").open() as file:
        losses = [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]
    assert len(losses) == 8
    assert sum(losses[-3:]) < sum(losses[:3])
    assert len(list((world / "cache" / "features").iterdir())) == 2  # one capture of each side serves all of them

    own = json.loads((tmp_path / "eval" / "report.json").read_text())["benchmarks"]["held_out"]
    assert (own["prompts"], own["identical"], own["differences"]) == (2, True, [])
    draft: Any = load_draft(tmp_path / "draft")
    assert draft.config.draft_vocab_size == 40

    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w3 w5"}\n{"prompt": "w7"}\n')
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    options = ["benchmark=file", f"path={tmp_path / 'prompts.jsonl'}", "max_new_tokens=6", "tree=static"]
    fixed = ["target=hf", "target.path=target", "target.dtype=float32", f"output_dir={tmp_path / 'report'}"]
    monkeypatch.setattr(sys, "argv", ["eval", f"checkpoint={tmp_path / 'draft'}", *fixed, *options])
    evaluate()
    report = json.loads((tmp_path / "report" / "report.json").read_text())["benchmarks"]["file"]
    assert (report["prompts"], report["new_tokens"], report["identical"]) == (2, 12, True)
    assert (tmp_path / "report" / "report.html").exists()


def test_eagle_stopped_and_continued_ends_with_the_same_bits(
    world: Path, train_in: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its noise is drawn from the random state, which a validation in between and the continued run must not change."""
    words = ["+variant=eagle", "max_steps=6", "logger=none", "eval.enabled=false", "trainer.val_check_interval=2"]
    train_in(world, *words, f"output_dir={tmp_path / 'whole'}")
    train_in(world, *words, f"output_dir={tmp_path / 'without noise'}", "module.noise=0")

    def stopping(module: EagleModule, *arguments: Any) -> Any:
        if module.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(module, *arguments)

    step = EagleModule.training_step
    with monkeypatch.context() as patched:
        patched.setattr(EagleModule, "training_step", stopping)
        with pytest.raises(SystemExit) as stopped:
            train_in(world, *words, f"output_dir={tmp_path / 'stopped'}")
    assert stopped.value.code == 143
    assert not (tmp_path / "stopped" / "draft").exists()
    train_in(world, *words, f"output_dir={tmp_path / 'resumed'}", f"ckpt_path={tmp_path / 'stopped' / 'last.ckpt'}")

    whole, resumed, without = (
        load_file(tmp_path / name / "draft" / "model.safetensors") for name in ("whole", "resumed", "without noise")
    )
    assert whole.keys() == resumed.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name
    assert not torch.equal(whole["midlayer.fc.weight"], without["midlayer.fc.weight"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["+variant=medusa", "module.steps=2"], "module.steps=2 but the draft has 4 heads: leave module.steps out"),
        (
            ["+variant=eagle", "module.labels=answers"],
            "module.labels=answers is not possible: it must be target or data",
        ),
        (["+variant=eagle", "module.loss=mse"], "module.loss=mse is unknown; choose from soft_cross_entropy, kl"),
        (["+variant=eagle", "~module.loss", "+module.loss={kl: much}"], "module.loss.kl=much is not possible"),
        (
            ["+variant=eagle", "module.noise=much"],
            "module.noise=much is not possible: it must be a number of at least 0",
        ),
        (["+variant=hass", "module.regression=-1"], "module.regression=-1 is not possible"),
        (["+variant=medusa", "draft.num_layers=-1"], "num_layers must be at least 0, got -1"),
        (["+variant=hydra", "+draft.num_layers=1"], "there is no config key 'draft.num_layers'"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_wrong_values_of_variants_are_one_sentence_before_anything_is_captured(
    words: list[str], message: str, world: Path, refused_early: Callable[..., str]
) -> None:
    assert refused_early(world, *words).startswith(message)
