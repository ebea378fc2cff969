"""The LightningModule that all variants share: loss, metrics and optimiser; a variant adds `unroll`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, distributed
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedTokenizerBase

from data.alignment import Alignment, align
from data.batch import Batch, Share
from spec_decode.drafter import VocabularyDrafter
from spec_decode.errors import DraftwrightError
from spec_decode.target import Target
from train.losses import Loss, build_loss, chunked_head_loss
from train.metrics import UnrollMetrics
from train.sharding import shard, whole

OptimizerFactory = Callable[..., Optimizer]
ScheduleFactory = Callable[..., LRScheduler]

PRECISIONS = ("32-true", "bf16-mixed")


@dataclass(frozen=True)
class Unrolled:
    """Draft states [K, S, H] that predict S supervised tokens at K steps, the target's states for them [S, H'], and
    the tokens [S]; share: that of the batch, None where the rows were drawn."""

    alignment: Alignment
    states: Tensor
    target_states: Tensor
    tokens: Tensor
    share: Share | None = None


def ends_step(trainer: Trainer, batch_index: int) -> bool:
    """Whether an optimiser step ends with this micro-batch: in between, a checkpoint would lack the gradients."""
    return (batch_index + 1) % trainer.accumulate_grad_batches == 0


def is_logged(trainer: Trainer, step: int) -> bool:
    """Whether the trainer writes a row for optimiser step `step`, counted from 0."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return every > 0 and (step + 1) % every == 0


def check_heads(heads: int, steps: int) -> None:
    """Raise DraftwrightError unless there is a step for each of a draft's heads."""
    if heads != steps:
        raise DraftwrightError(
            f"module.steps={steps} but the draft has {heads} heads: leave module.steps out and set draft.num_heads"
        )


class DraftModule(LightningModule):
    """Trains `draft` against a frozen target.

    Loss: sum over steps k of decay^k times the mean loss over the supervised tokens that step k predicts, against the
    target's distribution (labels="target") or the tokens of the data (labels="data"). decay=0 leaves step 0 alone.
    The target is no submodule: its weights never enter a checkpoint.
    shardable: whether all that is trained belongs to submodules alone, as FSDP needs it.
    """

    shardable = True

    def __init__(
        self,
        draft: VocabularyDrafter,
        target: Target,
        *,
        steps: int,
        decay: float,
        loss: Loss | str | Mapping[str, float],
        labels: Literal["target", "data"] = "target",
        lr: float,
        optimizer: OptimizerFactory,
        schedule: ScheduleFactory,
    ) -> None:
        super().__init__()
        self.draft: VocabularyDrafter = draft
        self.target = target
        if labels not in ("target", "data"):
            raise DraftwrightError(f"module.labels={labels} is unknown; choose target or data")
        self.steps, self.decay, self.loss, self.labels = steps, decay, build_loss(loss), labels
        self.lr, self._optimizer, self._schedule = lr, optimizer, schedule
        vocabulary = draft.vocabulary()
        head = target.head_weight().detach()
        self.register_buffer("vocabulary", vocabulary, persistent=False)
        self.register_buffer("target_head", head[vocabulary.to(head.device)], persistent=False)
        self.train_metrics, self.val_metrics = UnrollMetrics(steps), UnrollMetrics(steps)
        self._losses: list[Tensor] = []  # of the micro-batches of this step: the total, then each step's, [1 + K]

    vocabulary: Tensor
    target_head: Tensor

    @abstractmethod
    def unroll(self, batch: Batch, rows: Tensor) -> Tensor:
        """What the draft's heads read of `rows` [R] at every step, [K, R, H]."""

    def configure_model(self) -> None:
        shard(self)

    def setup(self, stage: str) -> None:
        """Raises DraftwrightError for a precision in which training would silently fail."""
        if self.trainer.precision not in PRECISIONS:
            # The head's gradient is cast before a loss scale could act; weights of 16 bits lose small updates.
            raise DraftwrightError(
                f"trainer.precision={self.trainer.precision} loses small gradients in this training: choose "
                f"{' or '.join(PRECISIONS)}"
            )

    def training_step(self, batch: Batch, batch_index: int) -> Tensor:
        unrolled = self._counted(batch)
        loss, steps = self._loss(unrolled)
        self._losses.append(torch.stack((loss.detach(), *steps.detach())))
        logged = is_logged(self.trainer, self.global_step)
        if logged:
            self._measure(unrolled, self.train_metrics)
        if ends_step(self.trainer, batch_index):
            self._log_step(logged)
        return loss

    def _log_step(self, logged: bool) -> None:
        """Log what the micro-batches of an optimiser step have left, of all processes together."""
        loss, *steps = torch.stack(self._losses).mean(0)
        self._losses.clear()
        self.log("train/loss", loss, prog_bar=True, sync_dist=True)
        self.log_dict({f"train/loss/{step}": value for step, value in enumerate(steps)}, sync_dist=True)
        if logged:
            metrics = self.train_metrics.compute()
            self.log_dict({f"train/{name}": value for name, value in metrics.items() if "loss" not in name})
            self.train_metrics.reset()

    def validation_step(self, batch: Batch, batch_index: int) -> None:
        self._measure(self._counted(batch), self.val_metrics)

    def _counted(self, batch: Batch) -> Unrolled:
        """The unrolled batch, in which no token counts if the batch is a spare one."""
        unrolled = self._unrolled(batch)
        if batch.share is None or not batch.share.spare:
            return unrolled
        alignment = replace(unrolled.alignment, valid=torch.zeros_like(unrolled.alignment.valid))
        return replace(unrolled, alignment=alignment)

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
        target_states, tokens = batch.last_hidden[alignment.targets - 1], batch.ids[alignment.targets]
        return Unrolled(alignment, states, target_states, tokens, batch.share)

    def _counts(self, unrolled: Unrolled, valid: Tensor) -> Tensor:
        """By how many tokens the loss of each step is divided, float [K], where it counts `valid` [K, S] here.

        The average over processes and micro-batches, as Lightning averages their gradients: so the sum over all of
        them is divided by the tokens of them all.
        """
        share = unrolled.share
        if share is None:
            counts = valid.sum(1).float()
            if distributed.is_initialized():
                distributed.all_reduce(counts, distributed.ReduceOp.SUM)
                counts /= distributed.get_world_size()
            return counts.clamp(min=1)
        alignment = align(share.tokens.loss_mask, share.tokens.offsets, self.steps)
        whole = alignment.valid[: len(valid)]
        if self.labels == "data":
            whole = whole & self._draft_ids(share.tokens.ids.long()[alignment.targets])[1]
        return whole.sum(1).clamp(min=1) / share.parts

    def _loss(self, unrolled: Unrolled) -> tuple[Tensor, Tensor]:
        """(loss, mean loss of each step that counts [K])."""
        steps = self.steps if self.decay else 1
        valid, labels = unrolled.alignment.valid[:steps], None
        if self.labels == "data":
            labels, known = self._draft_ids(unrolled.tokens)
            valid = valid & known
        counts = self._counts(unrolled, valid)
        decay = self.decay ** torch.arange(steps, device=valid.device)[:, None]
        heads, objective = self._objective()
        loss, sums = chunked_head_loss(
            unrolled.states[:steps],
            heads[:steps],
            valid / counts[:, None] * decay,
            unrolled.target_states,
            self.target_head,
            objective,
            labels,
        )
        return loss, sums / counts

    def _objective(self) -> tuple[list[Tensor], Loss]:
        """The heads and the loss that are trained; metrics take the draft's heads and `self.loss`."""
        return self.draft.heads(), self.loss

    def _draft_ids(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Draft ids of target ids [S], and whether the draft has them: its other tokens are no labels."""
        ids = torch.searchsorted(self.vocabulary, tokens).clamp(max=self.vocabulary.numel() - 1)
        return ids, self.vocabulary[ids] == tokens

    def _measure(self, unrolled: Unrolled, metrics: UnrollMetrics) -> None:
        head = self.target.head_weight()
        metrics.update(
            unrolled.states.detach(),
            self.draft.heads(),
            unrolled.target_states.to(head.dtype),
            head,
            self.vocabulary,
            unrolled.alignment,
            self.loss,
        )

    def whole_draft(self) -> VocabularyDrafter:
        """The trained draft with whole weights, for which all processes ask together."""
        return whole(self, self.draft, self.target)

    def export_target(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> Path | None:
        """Write the target to `folder` if training has changed it; None if it hasn't."""
        return None

    def configure_optimizers(self) -> Any:
        return self._configure()

    def _configure(self, **more: Any) -> dict[str, Any]:
        """more: further arguments of the optimiser's factory."""
        optimizer = self._optimizer(list(self.draft.named_parameters()), lr=self.lr, **more)
        schedule = self._schedule(optimizer, total_steps=int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
