"""Medusa-1 (arXiv:2401.10774, section 2.2.1): heads on the frozen target's last state; head k predicts x[t + 2 + k]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from data.batch import Batch
from spec_decode.drafters.medusa import MedusaDraftModel
from train.module import DraftModule, check_heads


class MedusaModule(DraftModule):
    """Every head reads the same row; `steps` is the number of heads."""

    draft: MedusaDraftModel

    def __init__(self, draft: MedusaDraftModel, target: Any, **options: Any) -> None:
        check_heads(draft.config.num_heads, options["steps"])
        super().__init__(draft, target, **options)

    def unroll(self, batch: Batch, rows: Tensor) -> Tensor:
        hidden = batch.last_hidden[rows].to(self.draft.heads()[0].dtype)
        return torch.stack([head.blocks(hidden) for head in self.draft.medusa])  # type: ignore[operator,union-attr]
