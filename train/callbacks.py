"""Lightning callbacks: stop on a signal, log speed and gradient norm, keep random state and time, pick a bar."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar, RichProgressBar, TQDMProgressBar
from torch.optim import Optimizer

from data.batch import Batch
from train.module import ends_step, is_logged
from train.sharding import gradient_norm


class StepCheckpoint(ModelCheckpoint):
    """Writes checkpoints only where an optimiser step ends."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if ends_step(trainer, batch_idx):
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)


class TrainingStopped(Exception):
    """Training ended early on a signal, after saving `checkpoint`. `status` is the shell's: 128 + signal."""

    def __init__(self, signum: int, checkpoint: Path, step: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name} after step {step}, saved {checkpoint}")
        self.status, self.checkpoint, self.step = 128 + signum, checkpoint, step


class StopOnSignal(Callback):
    """On Ctrl-C or SIGTERM, finish the batch or the validation, save `checkpoint` and raise TrainingStopped.

    A second Ctrl-C ends at once. Waiting keeps weights, optimiser and data position consistent.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self._received: int | None = None
        self._previous: dict[int, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._previous[signum] = signal.signal(signum, self._receive)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if self._received is not None and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self._received = signum
        print("\nStopping after this batch or validation …", file=sys.stderr)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if ends_step(trainer, batch_idx):
            self._stop_if_asked(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop_if_asked(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore()  # first, so that no signal falls between the last look and the old handlers
        self._stop_if_asked(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore()

    def _stop_if_asked(self, trainer: Trainer) -> None:
        # Every process must decide alike, since saving is collective.
        if trainer.strategy.reduce_boolean_decision(self._received is not None, all=False):
            trainer.save_checkpoint(self.checkpoint)
            raise TrainingStopped(self._received or signal.SIGTERM, self.checkpoint, trainer.global_step)

    def _restore(self) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())


class KeepRandomState(Callback):
    """Saves torch's random state in checkpoints, so that a continued run draws what an uninterrupted one does."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return {"cpu": torch.get_rng_state(), "cuda": cuda}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._loaded:
            torch.set_rng_state(self._loaded["cpu"].cpu())
            if torch.cuda.is_available() and self._loaded["cuda"]:
                torch.cuda.set_rng_state_all([state.cpu() for state in self._loaded["cuda"]])


class TrainingTime(Callback):
    """Seconds of fitting, validation included. Checkpoints carry them, so they add up over the runs that continue one
    another; work that a killed run had not saved isn't counted."""

    def __init__(self) -> None:
        self._earlier, self._begin = 0.0, 0.0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin = time.perf_counter()

    def seconds(self) -> float:
        """Up to now, once fitting has begun."""
        return self._earlier + time.perf_counter() - self._begin

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._earlier = state_dict["seconds"]


class LogProgress(Callback):
    """Logs tokens per second (data loading included, validation not), gradient norm before clipping, and the learning
    rate that the step uses (first parameter group), whenever the trainer logs; tokens of all processes."""

    def __init__(self) -> None:
        self._tokens, self._seconds, self._mark = 0, 0.0, 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._tokens, self._seconds, self._mark = 0, 0.0, time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._mark = time.perf_counter()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if is_logged(trainer, trainer.global_step):
            pl_module.log("train/grad_norm", gradient_norm(pl_module))
            pl_module.log("train/lr", optimizer.param_groups[0]["lr"])  # before the schedule moves on

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        self._tokens, self._seconds, self._mark = (
            self._tokens + batch.ids.numel(),
            self._seconds + now - self._mark,
            now,
        )
        if ends_step(trainer, batch_idx) and is_logged(trainer, trainer.global_step - 1):  # it was counted meanwhile
            speed = torch.tensor(self._tokens / self._seconds, device=pl_module.device)
            pl_module.log("train/tokens_per_s", speed, prog_bar=True, sync_dist=True, reduce_fx="sum")
            self._tokens, self._seconds = 0, 0.0


def progress_bar(total_steps: int) -> ProgressBar:
    """Rich's bar on a terminal; elsewhere plain lines, about 20 for the whole run, so that a log file stays short."""
    if sys.stderr.isatty() and sys.stdout.isatty():
        return RichProgressBar(leave=True)
    return TQDMProgressBar(refresh_rate=max(1, total_steps // 20))
