"""A run that is stopped and continued ends with the same bits as one that never stopped."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import nn

from data.batch import Batch, Sequences
from data.module import DraftDataModule
from spec_decode.errors import DraftwrightError
from train.callbacks import KeepRandomState, StopOnSignal, TrainingStopped
from train.optim import build_optimizer, warmup_cosine
from train.resume import AtomicCheckpointIO, data_identity, refuse_changes

LENGTHS = [(13 * i) % 40 + 5 for i in range(23)]
STEPS = 34  # optimiser steps of a whole run


class Source:
    lengths = LENGTHS

    def batch(self, documents: list[int]) -> Batch:
        ids = torch.cat([torch.arange(LENGTHS[d]) * (d + 1) % 32 for d in documents])
        zero = torch.zeros(0)
        return Batch(ids, torch.ones_like(ids, dtype=torch.bool), torch.tensor([0, len(ids)]), zero, zero)

    def flush(self) -> None:
        pass


class TinyModule(LightningModule):
    """Predicts the next token; dropout makes it depend on the random state."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Embedding(32, 16), nn.Linear(16, 16, bias=False), nn.Dropout(0.2), nn.RMSNorm(16), nn.Linear(16, 32)
        )
        self.seen: list[int] = []

    def training_step(self, batch: Batch, batch_index: int) -> torch.Tensor:
        self.seen.append(int(batch.ids.sum()))
        return nn.functional.cross_entropy(self.net(batch.ids[:-1]), batch.ids[1:])

    def validation_step(self, batch: Batch, batch_index: int) -> None:
        self.log("val/loss", nn.functional.cross_entropy(self.net(batch.ids[:-1]), batch.ids[1:]), batch_size=1)

    def configure_optimizers(self) -> Any:
        optimizer = build_optimizer(self.named_parameters(), name="muon", lr=0.02, head_lr_scale=0.3)
        # Asking for the number of steps makes Lightning set up the loader early: see data/module.py.
        total = int(self.trainer.estimated_stepping_batches)
        schedule = warmup_cosine(optimizer, total_steps=total, warmup_steps=3, final_ratio=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class SignalAt(Callback):
    """Sends a signal to this process when `hook` is called after `steps` optimiser steps."""

    def __init__(self, steps: int, signum: int, hook: str = "on_after_backward") -> None:
        self.steps, self.signum, self.sent = steps, signum, False
        setattr(self, hook, self._send)

    def _send(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.steps and not self.sent:
            self.sent = True
            os.kill(os.getpid(), self.signum)


def _run(
    folder: Path, *extra: Callback, resume: bool = False, seed: int = 1, epochs: int = 3, validate_every: int = 4
) -> TinyModule:
    seed_everything(seed, verbose=False)
    datamodule = DraftDataModule(Source(), Source(), tokens_per_batch=64, seed=seed, epochs=epochs)
    module = TinyModule()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        val_check_interval=validate_every,
        gradient_clip_val=0.5,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[KeepRandomState(), StopOnSignal(folder / "last.ckpt"), *extra],
    )
    checkpoint = folder / "last.ckpt" if resume else None
    trainer.fit(module, datamodule=datamodule, ckpt_path=checkpoint, weights_only=True)
    return module


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> TinyModule:
    return _run(tmp_path_factory.mktemp("whole"))


HANDLED = (signal.SIGINT, signal.SIGTERM)


def _check_stopped_and_continued(
    whole: TinyModule, folder: Path, sender: SignalAt, done: int, validate_every: int = 4
) -> None:
    """The run stops after `done` steps, and continued it ends like `whole`."""
    handlers = [signal.getsignal(signum) for signum in HANDLED]
    with pytest.raises(TrainingStopped) as stopped:
        _run(folder, sender, validate_every=validate_every)
    assert (stopped.value.status, stopped.value.step) == (128 + sender.signum, done)
    assert [signal.getsignal(signum) for signum in HANDLED] == handlers

    resumed = _run(folder, resume=True, validate_every=validate_every)
    assert resumed.seen == whole.seen[done:]
    for (name, ours), theirs in zip(resumed.state_dict().items(), whole.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


# Step 3 ends just before a validation, 10 lies in the second epoch.
@pytest.mark.parametrize(("step", "signum"), [(0, signal.SIGINT), (3, signal.SIGTERM), (10, signal.SIGTERM)])
def test_stopped_in_a_step(whole: TinyModule, tmp_path: Path, step: int, signum: int) -> None:
    assert len(whole.seen) == STEPS
    _check_stopped_and_continued(whole, tmp_path, SignalAt(step, signum), done=step + 1)


OUTSIDE_STEPS = {
    "tail of the step before a validation": (4, "on_train_batch_end", 4),
    "middle validation": (8, "on_validation_batch_start", 4),
    "tail of the last step": (STEPS, "on_train_batch_end", 4),
    "end of the epoch": (STEPS, "on_train_epoch_end", 4),
    "last validation": (STEPS, "on_validation_batch_start", STEPS // 2),
}


@pytest.mark.parametrize("case", OUTSIDE_STEPS)
def test_stopped_between_steps(whole: TinyModule, tmp_path: Path, case: str) -> None:
    done, hook, validate_every = OUTSIDE_STEPS[case]
    _check_stopped_and_continued(whole, tmp_path, SignalAt(done, signal.SIGTERM, hook), done, validate_every)


def test_checkpoint_of_another_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingStopped):
        _run(tmp_path, SignalAt(1, signal.SIGTERM))
    with pytest.raises(DraftwrightError, match="other data, batches or seed"):
        _run(tmp_path, resume=True, epochs=4)


def test_checkpoint_holds_no_classes(tmp_path: Path) -> None:
    with pytest.raises(TrainingStopped):
        _run(tmp_path, SignalAt(1, signal.SIGTERM))
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 2


def test_a_checkpoint_is_written_beside_its_name_and_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that fails, on a full disk say, leaves the checkpoint before it alone."""
    path = tmp_path / "folder" / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"step": 1}, path)

    def full(checkpoint: Any, to: Path) -> None:
        Path(to).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(
        DraftwrightError, match=r"No space left on device; .* GB free\): .*last.ckpt from before is kept"
    ):
        AtomicCheckpointIO().save_checkpoint({"step": 2}, path)
    assert torch.load(path, weights_only=True) == {"step": 1}
    assert [file.name for file in path.parent.iterdir()] == ["last.ckpt"]


def test_other_content_of_the_same_lengths_is_noticed() -> None:
    ids, offsets, vocabulary = torch.arange(6, dtype=torch.int32), torch.tensor([0, 2, 6]), torch.tensor([1, 4])
    mask = torch.tensor([False, True] * 3)
    base = data_identity(Sequences(ids, mask, offsets), vocabulary)
    assert data_identity(Sequences(ids.clone(), mask, offsets), vocabulary.clone()) == base
    for other, differs in (
        (data_identity(Sequences(ids + 1, mask, offsets), vocabulary), "data"),
        (data_identity(Sequences(ids, ~mask, offsets), vocabulary), "data"),
        (data_identity(Sequences(ids, mask, offsets), vocabulary + 1), "draft vocabulary"),
    ):
        assert other != base
        with pytest.raises(DraftwrightError, match=f"was written with another {differs} "):
            refuse_changes(Path("last.ckpt"), base, other)
