"""The LightningModule that all variants share: loss, metrics and optimiser; a variant adds `unroll`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from data.alignment import Alignment, align
from data.batch import Batch
from spec_decode.errors import DraftwrightError
from spec_decode.target import Target
from train.losses import Loss, chunked_head_loss
from train.metrics import UnrollMetrics

OptimizerFactory = Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]
ScheduleFactory = Callable[..., LRScheduler]

PRECISIONS = ("32-true", "bf16-mixed")


@dataclass(frozen=True)
class Unrolled:
    """Draft states [K, S, H] that predict S supervised tokens at K steps, and the target's states for them [S, H']."""

    alignment: Alignment
    states: Tensor
    target_states: Tensor


def is_logged(trainer: Trainer, step: int) -> bool:
    """Whether the trainer writes a row for optimiser step `step`, counted from 0."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return every > 0 and (step + 1) % every == 0


class DraftModule(LightningModule):
    """Trains `draft` against a frozen target.

    Loss: sum over steps k of decay^k times the mean loss over the supervised tokens that step k predicts.
    The target is no submodule: its weights never enter a checkpoint.
    """

    def __init__(
        self,
        draft: nn.Module,
        target: Target,
        *,
        steps: int,
        decay: float,
        loss: Loss,
        optimizer: OptimizerFactory,
        schedule: ScheduleFactory,
    ) -> None:
        super().__init__()
        self.draft = draft
        self.target = target
        self.steps, self.decay, self.loss = steps, decay, loss
        self._optimizer, self._schedule = optimizer, schedule
        vocabulary = draft.vocabulary()  # type: ignore[operator]
        head = target.head_weight().detach()
        self.register_buffer("vocabulary", vocabulary, persistent=False)
        self.register_buffer("target_head", head[vocabulary.to(head.device)], persistent=False)
        self.train_metrics, self.val_metrics = UnrollMetrics(steps), UnrollMetrics(steps)

    vocabulary: Tensor
    target_head: Tensor

    @abstractmethod
    def unroll(self, batch: Batch, rows: Tensor) -> Tensor:
        """Normed states of `rows` [R] at every step, ready for the draft's head: [K, R, H]."""

    def head_weight(self) -> Tensor:
        """The draft's unembedding, [V_draft, H]."""
        return self.draft.lm_head.weight  # type: ignore[union-attr,return-value]

    @property
    def residual_dtype(self) -> torch.dtype:
        """The precision of the residual stream: that of the draft's weights, whatever autocast multiplies in."""
        return self.head_weight().dtype

    def setup(self, stage: str) -> None:
        """Raises DraftwrightError for a precision in which training would silently fail."""
        if self.trainer.precision not in PRECISIONS:
            # The head's gradient is cast before a loss scale could act; weights of 16 bits lose small updates.
            raise DraftwrightError(
                f"trainer.precision={self.trainer.precision} loses small gradients in this training: choose "
                f"{' or '.join(PRECISIONS)}"
            )

    def training_step(self, batch: Batch, batch_index: int) -> Tensor:
        unrolled = self._unrolled(batch)
        loss, steps = self._loss(unrolled)
        self.log("train/loss", loss.detach(), prog_bar=True)
        self.log_dict({f"train/loss/{step}": value for step, value in enumerate(steps)})
        if is_logged(self.trainer, self.global_step):
            self._measure(unrolled, self.train_metrics)
            metrics = self.train_metrics.compute()
            self.log_dict({f"train/{name}": value for name, value in metrics.items() if "loss" not in name})
            self.train_metrics.reset()
        return loss

    def validation_step(self, batch: Batch, batch_index: int) -> None:
        self._measure(self._unrolled(batch), self.val_metrics)

    def on_validation_epoch_end(self) -> None:
        metrics = self.val_metrics.compute()
        self.log("val/loss", sum(self.decay**step * metrics[f"loss/{step}"] for step in range(self.steps)))
        self.log_dict({f"val/{name}": value for name, value in metrics.items()})
        self.log("val_tau", metrics["tau"], prog_bar=True, logger=False)
        self.val_metrics.reset()

    def _unrolled(self, batch: Batch) -> Unrolled:
        alignment = align(batch.loss_mask, batch.offsets, self.steps)
        states = self.unroll(batch, alignment.rows)
        states = torch.stack([state[index] for state, index in zip(states, alignment.index, strict=True)])
        return Unrolled(alignment, states, batch.last_hidden[alignment.targets - 1])

    def _loss(self, unrolled: Unrolled) -> tuple[Tensor, Tensor]:
        """(loss, mean loss of each step [K])."""
        valid = unrolled.alignment.valid
        counts = valid.sum(dim=1, keepdim=True).clamp(min=1)
        decay = self.decay ** torch.arange(self.steps, device=valid.device)[:, None]
        loss, sums = chunked_head_loss(
            unrolled.states,
            self.head_weight(),
            valid / counts * decay,
            unrolled.target_states,
            self.target_head,
            self.loss,
        )
        return loss, sums / counts[:, 0]

    def _measure(self, unrolled: Unrolled, metrics: UnrollMetrics) -> None:
        head = self.target.head_weight()
        metrics.update(
            unrolled.states.detach(),
            self.head_weight(),
            unrolled.target_states.to(head.dtype),
            head,
            self.vocabulary,
            unrolled.alignment,
            self.loss,
        )

    def configure_optimizers(self) -> Any:
        optimizer = self._optimizer(list(self.draft.named_parameters()))
        schedule = self._schedule(optimizer, total_steps=int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
