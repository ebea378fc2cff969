"""A small language model that learns the target's distribution (DistillSpec, arXiv:2310.08461).

    loss = mean over supervised tokens x[j] of D(p(. | x[0..j-1]), q(. | x[0..j-1]))

Which divergence D is best depends on the task and on the sampling, so `module.loss` chooses it. The paper trains on
the models' own answers, the draft's above all; here the data can be the target's, which `python -m data regenerate`
writes.

The draft reads tokens alone, so a token is predicted alike at every step of the chain:

    step k, row t    the draft's state at t + 1 + k predicts x[t + 2 + k]          (data/alignment.py)

Metrics see all steps, which makes tau comparable with other variants. The loss sees step 0 alone (decay 0).
"""

from __future__ import annotations

import torch
from torch import Tensor

from data.batch import Batch
from spec_decode.drafters.leviathan import LeviathanDraft
from train.module import DraftModule


class LeviathanModule(DraftModule):
    """`steps` is the length of the chain that metrics simulate."""

    draft: LeviathanDraft

    def unroll(self, batch: Batch, rows: Tensor) -> Tensor:
        states = batch.packed(self.draft(batch.padded()))
        # A row whose token would lie beyond its document gets some other state: nothing reads it.
        ahead = torch.arange(1, self.steps + 1, device=rows.device)[:, None]
        return states[(rows + ahead).clamp(max=len(states) - 1)]
