"""Training in two processes (gloo): the same weights as in one, and checkpoints that either continues."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import FSDPStrategy
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
from train.module import DraftModule
from train.optim import build_optimizer, warmup_cosine
from train.processes import in_turn

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
    micro_batches: int = 1,
    stop: Callback | None = None,
    resume: Path | None = None,
) -> dict[str, float]:
    """Train for 5 steps of about 40 tokens; returns what was logged last."""
    seed_everything(0, verbose=False)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(50, (sum(LENGTHS),), generator=generator, dtype=torch.int32)
    mask = torch.cat([torch.arange(length) >= length // 3 for length in LENGTHS])
    source = Features(module.target, Sequences(ids, mask, torch.tensor([0, *LENGTHS]).cumsum(0)), module.draft.taps)
    trainer = Trainer(
        accelerator="cpu", devices=processes, strategy="ddp_fork" if processes > 1 else "auto", max_epochs=1,
        accumulate_grad_batches=micro_batches, gradient_clip_val=0.5, val_check_interval=5 * micro_batches,
        log_every_n_steps=1, num_sanity_val_steps=0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        callbacks=[KeepRandomState(), *([stop] if stop else [])],
    )  # fmt: skip
    datamodule = DraftDataModule(source, source, tokens_per_batch=40, seed=0, epochs=1, max_steps=5)
    trainer.fit(module, datamodule=datamodule, ckpt_path=resume, weights_only=True)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


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


@pytest.mark.parametrize(("processes", "micro_batches"), [(2, 1), (1, 2), (2, 2), (1, 5)])
def test_shared_work_gives_the_same_weights(alone, tiny_llama, tmp_path, processes: int, micro_batches: int) -> None:
    """With 5 micro-batches a step has fewer documents than parts."""
    module = _module(alone.variant, tiny_llama())
    logged = _fit(module, tmp_path, processes=processes, micro_batches=micro_batches)
    _assert_same(module, logged, alone)


@pytest.mark.parametrize(("processes", "micro_batches"), [(2, 1), (1, 2)])
def test_muon_shares_the_work_as_well(
    tiny_llama, tmp_path, monkeypatch: pytest.MonkeyPatch, processes: int, micro_batches: int
) -> None:
    """In fp64, since its orthogonalisation enlarges rounding: in fp32 the weights differ by 9e-5 here."""
    monkeypatch.setattr("train.optim.multiplies_bfloat16", lambda device: False)
    one, two = (_module("eagle3", tiny_llama().double(), optimizer="muon", lr=1.5e-2) for _ in range(2))
    _fit(one, tmp_path)
    _fit(two, tmp_path, processes=processes, micro_batches=micro_batches)
    torch.testing.assert_close(dict(two.draft.state_dict()), dict(one.draft.state_dict()), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_either_continues_the_checkpoint_of_the_other(alone, tiny_llama, tmp_path, before: int, after: int) -> None:
    checkpoint = tmp_path / "last.ckpt"
    _fit(_module(alone.variant, tiny_llama()), tmp_path, processes=before, stop=_StopAfter(2, checkpoint))
    module = _module(alone.variant, tiny_llama())
    logged = _fit(module, tmp_path, processes=after, resume=checkpoint)
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


def test_sharded_strategies_are_refused() -> None:
    trainer = SimpleNamespace(strategy=FSDPStrategy(accelerator="cpu"))
    with pytest.raises(DraftwrightError, match=r"strategy=FSDPStrategy is not supported.*use trainer=ddp"):
        check_strategy(trainer)
