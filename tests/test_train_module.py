"""DraftModule with a real EAGLE-3 draft: what is logged when, precisions, and both sources of features."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from lightning.pytorch import Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from data.batch import Batch, Sequences
from data.features import Features, cached_features
from data.module import DraftDataModule
from data.states import StateDtype
from spec_decode.drafters.eagle3 import Eagle3Config, Eagle3Draft
from spec_decode.errors import DraftwrightError
from spec_decode.target_hf import HFTarget
from train.callbacks import LogProgress
from train.eagle3 import Eagle3Module
from train.losses import soft_cross_entropy
from train.metrics import UnrollMetrics
from train.module import is_logged
from train.optim import build_optimizer, warmup_cosine

VOCABULARY, DRAFT_VOCABULARY, STEPS = 60, 40, 2


def make_target(dtype: torch.dtype) -> HFTarget:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    return HFTarget(LlamaForCausalLM(config).to(dtype), "tiny")


def make_module(target: HFTarget, kind: type[Eagle3Module] = Eagle3Module) -> Eagle3Module:
    torch.manual_seed(1)
    draft = Eagle3Draft(Eagle3Config.for_target(target.spec, draft_vocab_size=DRAFT_VOCABULARY))
    draft.set_vocabulary(torch.arange(10, 10 + DRAFT_VOCABULARY))
    draft.init_head(target.head_weight())
    draft.bind(target)
    optimizer = partial(build_optimizer, name="adamw")
    schedule = partial(warmup_cosine, warmup_steps=3, final_ratio=0.1)
    return kind(
        draft, target, steps=STEPS, decay=0.8, loss=soft_cross_entropy, lr=0.01, optimizer=optimizer, schedule=schedule
    )


def make_sequences(*lengths: int) -> Sequences:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(VOCABULARY, (sum(lengths),), generator=generator, dtype=torch.int32)
    masks = [torch.arange(length) >= 3 for length in lengths]
    return Sequences(ids, torch.cat(masks), torch.tensor([0, *lengths]).cumsum(0))


class Recorder(DummyLogger):
    """Keeps the rows that training writes, by step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "train/loss" in metrics:
            assert step is not None
            self.rows[step] = metrics


def fit(module: Eagle3Module, folder: Path, *, steps: int, precision: Any = "32-true") -> dict[int, dict[str, float]]:
    """Train for `steps` steps on batches of one or two documents, writing every second row."""
    source = Features(module.target, make_sequences(14, 11, 9, 12), module.draft.taps)
    datamodule = DraftDataModule(source, source, tokens_per_batch=24, seed=0, epochs=1, max_steps=steps)
    recorder = Recorder()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        precision=precision,
        gradient_clip_val=0.5,
        log_every_n_steps=2,
        num_sanity_val_steps=0,
        logger=recorder,
        callbacks=[LogProgress()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, datamodule=datamodule)
    return recorder.rows


class Watched(Eagle3Module):
    """Notes by itself what the row of every step should hold."""

    def training_step(self, batch: Batch, batch_index: int) -> Tensor:
        metrics, unrolled = UnrollMetrics(STEPS), self._unrolled(batch)
        self._measure(unrolled, metrics)
        wanted = {f"train/{name}": value.item() for name, value in metrics.compute().items() if "loss" not in name}
        wanted |= {f"train/loss/{step}": value.item() for step, value in enumerate(self._loss(unrolled)[1])}
        loss = super().training_step(batch, batch_index)
        wanted |= {"train/loss": loss.item(), "train/lr": self.trainer.optimizers[0].param_groups[0]["lr"]}
        self.wanted = {**getattr(self, "wanted", {}), self.global_step: wanted}
        return loss


def test_the_row_of_a_step_holds_the_values_of_that_step(tmp_path: Path) -> None:
    module = make_module(make_target(torch.float32), Watched)
    rows = fit(module, tmp_path, steps=6)
    assert sorted(rows) == [1, 3, 5]
    for step, row in rows.items():
        assert {name: row[name] for name in module.wanted[step]} == pytest.approx(module.wanted[step], rel=1e-6)
        assert {"train/tau", "train/accuracy/1", "train/acceptance/0", "train/loss/0"} <= module.wanted[step].keys()
        assert {"train/grad_norm", "train/tokens_per_s"} <= row.keys()
    assert [rows[step]["train/lr"] for step in (1, 3)] == pytest.approx([0.01 * 2 / 3, 0.01])


def test_rows_are_written_after_every_nth_step_and_never_for_zero() -> None:
    assert [step for step in range(9) if is_logged(SimpleNamespace(log_every_n_steps=4), step)] == [3, 7]
    assert not is_logged(SimpleNamespace(log_every_n_steps=0), 3)


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_a_bfloat16_target_trains_in_both_precisions(precision: str, tmp_path: Path) -> None:
    module = make_module(make_target(torch.bfloat16))
    losses = [row["train/loss"] for row in fit(module, tmp_path, steps=40, precision=precision).values()]
    assert all(math.isfinite(loss) for loss in losses)
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])


@pytest.mark.parametrize("precision", ["16-mixed", "16-true", "bf16-true"])
def test_other_precisions_are_refused(precision: str) -> None:
    module = make_module(make_target(torch.float32))
    module.trainer = SimpleNamespace(precision=precision)
    with pytest.raises(DraftwrightError, match=f"precision={precision} loses small gradients.*32-true or bf16-mixed"):
        module.setup("fit")


def test_a_refused_precision_ends_a_run_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(DraftwrightError, match="precision=bf16-true"):
        fit(make_module(make_target(torch.float32)), tmp_path, steps=1, precision="bf16-true")


@pytest.mark.parametrize(
    ("dtype", "stored", "tolerance"),
    [
        (torch.float32, "same", 1e-5),
        (torch.float32, "bfloat16", 1e-3),
        (torch.float32, "float8", 2e-3),
        (torch.bfloat16, "bfloat16", 1e-3),
    ],
)
def test_online_and_cached_features_give_the_same_loss(
    dtype: torch.dtype, stored: StateDtype, tolerance: float, tmp_path: Path
) -> None:
    target = make_target(dtype)
    module, sequences = make_module(target), make_sequences(14, 11, 9, 12)
    online = Features(target, sequences, module.draft.taps)
    cached = cached_features(target, sequences, module.draft.taps, tmp_path, "train", dtype=stored)

    def loss(batch: Batch) -> float:
        return module._loss(module._unrolled(batch))[0].item()

    for documents in ([2, 0], [1], [3, 1, 0]):
        wanted, batch = loss(online.batch(documents)), cached.batch(documents)
        assert loss(batch) == pytest.approx(wanted, rel=tolerance)
        shifted = Batch(batch.ids, batch.loss_mask, batch.offsets, batch.features.roll(1, 0), batch.last_hidden)
        assert loss(shifted) != pytest.approx(wanted, rel=tolerance)


def test_what_lies_behind_the_last_supervised_token_changes_no_loss() -> None:
    target = make_target(torch.float32)
    module, sequences = make_module(target), make_sequences(14, 11, 9, 12)
    mask = sequences.loss_mask.clone()
    for stop in sequences.offsets[1:].tolist():
        mask[stop - 4 : stop] = False
    whole = Sequences(sequences.ids, mask, sequences.offsets)
    trimmed = whole.trimmed()
    assert trimmed.ids.numel() <= whole.ids.numel() - 16

    losses = []
    for data in (whole, trimmed):
        batch = Features(target, data, module.draft.taps).batch([2, 0, 3, 1])
        loss = module._loss(module._unrolled(batch))[0]
        loss.backward()
        losses.append([loss.detach(), *(p.grad.clone() for p in module.draft.parameters() if p.grad is not None)])
        module.zero_grad()
    torch.testing.assert_close(losses[0], losses[1])


CHOICES = {
    "default": ([], 3, "float32"),
    "gpu": (["trainer=gpu"], 7, "bfloat16"),
    "gpu and another target dtype": (["trainer=gpu", "target.dtype=float16"], 7, "float16"),
    "set by hand": (["trainer=gpu", "module.steps=5", "eval.dtype=float32"], 5, "float32"),
}


@pytest.mark.parametrize("case", CHOICES)
def test_unrolled_steps_and_decoding_dtype_follow_the_trainer(case: str) -> None:
    words, steps, dtype = CHOICES[case]
    with initialize_config_module("conf", version_base="1.3"):
        cfg = compose("train", overrides=["+variant=eagle3", *words])
    assert (cfg.module.steps, cfg.eval.dtype) == (steps, dtype)
