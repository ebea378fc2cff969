"""A loss or a gradient that is NaN or infinite: stop with the batch on disk, or leave its step out and count it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer

from data.batch import Batch
from spec_decode.checkpoint import as_text, write_folder
from spec_decode.errors import DraftwrightError
from train.sharding import gradient_norm

Action = Literal["stop", "skip"]

HOW_TO_LOOK = """\
The loss of step {step} was {loss}, the norm of its gradient {norm}. {name}.safetensors holds the batch:
documents end to end, ids [N], loss_mask [N] (true where a token is supervised), offsets [D + 1] (document d holds the
rows offsets[d] to offsets[d + 1]), and what the target computed, features [N, layers * H] and last_hidden [N, H].

To look at it, in this folder:

    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    batch = load_file("{name}.safetensors")
    print({{key: bool(value.float().isfinite().all()) for key, value in batch.items()}})  # False: the target's fault
    print(AutoTokenizer.from_pretrained("TARGET").decode(batch["ids"]))  # TARGET: the folder or name of the target

If all is finite there, the draft overflows: lower module.lr.
"""


class GuardSteps(Callback):
    """Looks at loss and gradient before every optimiser step, so no weight and no checkpoint ever takes a bad one.

    stop: write the batch to `folder` and raise DraftwrightError. skip: take away the gradients, which makes the step an
    empty one, and log how many there were as train/skipped_batches.
    """

    def __init__(self, folder: Path, action: Action, checkpoint: Path) -> None:
        self.folder, self.action, self.checkpoint = folder, action, checkpoint
        self.skipped = 0
        self._batch: Batch | None = None
        self._loss = torch.zeros(())

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._batch = batch

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._loss = loss.detach()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        norm = gradient_norm(pl_module)
        bad = not bool(self._loss.isfinite() & norm.isfinite())
        # Every process must decide alike, or their weights part.
        if not trainer.strategy.reduce_boolean_decision(bad, all=False):
            return
        step = trainer.global_step + 1
        if self.action == "stop":
            raise self._stopped(step, float(norm), trainer.global_rank)
        for parameter in pl_module.parameters():
            parameter.grad = None
        self.skipped += 1
        pl_module.log("train/skipped_batches", float(self.skipped))
        if self.skipped == 1:
            print(f"the loss of step {step} is {float(self._loss)} (gradient {float(norm)}): the batch is skipped")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.skipped:
            print(f"{self.skipped:,} batches with a loss or gradient that is NaN or infinite were skipped")

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": self.skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.skipped = state_dict["skipped"]

    def _stopped(self, step: int, norm: float, rank: int) -> DraftwrightError:
        """Write the batch and how to look at it; the error that ends the run."""
        assert self._batch is not None
        tensors = {name: tensor.cpu().contiguous() for name, tensor in self._batch.tensors().items()}
        name, loss = "bad_batch" if rank == 0 else f"bad_batch_{rank}", float(self._loss)
        text = HOW_TO_LOOK.format(step=step, loss=loss, norm=norm, name=name)
        write_folder(
            self.folder,
            {f"{name}.safetensors": lambda path: save_file(tensors, path), f"{name}.txt": as_text(text)},
        )
        kept = f"{self.checkpoint} is good and kept" if self.checkpoint.exists() else "no checkpoint was written yet"
        return DraftwrightError(
            f"the loss of step {step} is {loss} (gradient {norm}), so training stopped before it changed a weight: "
            f"{kept}; {self.folder / name}.txt says how to look at the batch; lower module.lr, or set on_nan=skip"
        )
