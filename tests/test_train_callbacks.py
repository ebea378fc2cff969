import signal
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from torch import nn

from data.batch import Batch
from data.module import PlanLoader
from train import callbacks
from train.callbacks import KeepRandomState, LogProgress, StopOnSignal, TrainingStopped, TrainingTime, progress_bar


class Module(LightningModule):
    """One weight w = 2 with loss 3w, logging into `logged`."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([2.0]))
        self.logged: list[tuple[int, str, float]] = []

    def log(self, name, value, **options) -> None:
        self.logged.append((self.trainer.global_step, name, float(value)))

    def training_step(self, batch: Batch, batch_index: int) -> torch.Tensor:
        return 3 * self.w.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Source:
    """Batches of 100 tokens."""

    lengths: ClassVar = [100]

    def batch(self, documents: list[int]) -> Batch:
        ids, zero = torch.zeros(100, dtype=torch.int64), torch.zeros(0)
        return Batch(ids, ids.bool(), torch.tensor([0, 100]), zero, zero)

    def flush(self) -> None:
        pass


def _fit(folder: Path, callback, monkeypatch: pytest.MonkeyPatch, steps: int) -> Module:
    clock = iter(range(1000))
    monkeypatch.setattr(callbacks.time, "perf_counter", lambda: float(next(clock)))  # one second a batch
    module = Module()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        gradient_clip_val=0.5,
        log_every_n_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[callback],
    )
    trainer.fit(module, train_dataloaders=PlanLoader(Source(), [[0]] * steps))
    return module


def test_speed_norm_and_rate_are_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = _fit(tmp_path, LogProgress(), monkeypatch, steps=5)
    assert module.logged == [
        (1, "train/grad_norm", 3.0),  # before clipping to 0.5; step 2 has not been taken yet
        (1, "train/lr", 0.5),
        (2, "train/tokens_per_s", 100.0),
        (3, "train/grad_norm", 3.0),
        (3, "train/lr", 0.5),
        (4, "train/tokens_per_s", 100.0),
    ]


def test_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    stop = StopOnSignal(tmp_path / "last.ckpt")
    stop._receive(signal.SIGINT, None)
    stop._receive(signal.SIGTERM, None)  # a repeated SIGTERM still waits for the batch
    with pytest.raises(KeyboardInterrupt):
        stop._receive(signal.SIGINT, None)


def test_stop_says_where_it_saved(tmp_path: Path) -> None:
    stop = TrainingStopped(signal.SIGTERM, tmp_path / "last.ckpt", 7)
    assert str(stop) == f"stopped by SIGTERM after step 7, saved {tmp_path}/last.ckpt"
    assert stop.status == 143


def test_random_state_survives() -> None:
    saved, restored = KeepRandomState(), KeepRandomState()
    torch.manual_seed(4)
    state = saved.state_dict()
    expected = torch.rand(3)
    restored.load_state_dict(state)
    restored.on_train_start(None, None)  # type: ignore[arg-type]
    assert torch.equal(torch.rand(3), expected)


def test_training_time_adds_up_over_continued_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(callbacks.time, "perf_counter", lambda: now)
    first, second = TrainingTime(), TrainingTime()
    first.on_fit_start(None, None)  # type: ignore[arg-type]
    now = 130.0
    second.load_state_dict(first.state_dict())
    now = 500.0
    second.on_fit_start(None, None)  # type: ignore[arg-type]
    now = 512.0
    assert second.seconds() == 42.0


@pytest.mark.parametrize(("terminal", "kind"), [(True, RichProgressBar), (False, TQDMProgressBar)])
def test_plain_bar_without_a_terminal(terminal: bool, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(isatty=lambda: terminal)
    monkeypatch.setattr(callbacks, "sys", SimpleNamespace(stderr=stream, stdout=stream))
    bar = progress_bar(total_steps=200)
    assert isinstance(bar, kind)
    assert terminal or bar.refresh_rate == 10
