"""Hydra (arXiv:2402.05109, section 3): head k reads the row's state and the true tokens x[t + 1], ..., x[t + 1 + k]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from data.batch import Batch
from spec_decode.drafters.hydra import HydraDraft
from train.module import DraftModule, check_heads


class HydraModule(DraftModule):
    """`steps` is the number of heads."""

    draft: HydraDraft

    def __init__(self, draft: HydraDraft, target: Any, **options: Any) -> None:
        check_heads(draft.config.num_heads, options["steps"])
        super().__init__(draft, target, **options)

    def unroll(self, batch: Batch, rows: Tensor) -> Tensor:
        inputs = batch.last_hidden[rows].to(self.draft.heads()[0].dtype)
        states = []
        for ahead, head in enumerate(self.draft.hydra, start=1):
            # A row whose token would lie beyond its document gets some other one: nothing reads that row.
            embeds = self.target.embed(batch.ids[(rows + ahead).clamp(max=batch.ids.numel() - 1)])
            inputs = torch.cat((inputs, embeds.to(inputs.dtype)), dim=-1)
            states.append(head.state(inputs))  # type: ignore[operator]
        return torch.stack(states)
