"""Which draft row predicts which supervised token.

At unrolled step k, row t predicts x[t + 2 + k]: it holds the target state at t and the token x[t + 1].

    token          x0  x1  x2  x3  x4        supervised: x3, x4
    step 0, row         1   2                row 1 -> x3, row 2 -> x4
    step 1, row     0   1                    row 0 -> x3, row 1 -> x4
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FIRST_AHEAD = 2  # the first draft token lies two after the row: the target itself predicts the one in between


@dataclass(frozen=True)
class Alignment:
    """rows: int64 [R], rows that predict a supervised token at some step, ascending;
    targets: int64 [S], supervised tokens that some row predicts, ascending;
    index: int64 [K, S], position in `rows` of the row that predicts targets[s] at step k (0 where there is none);
    valid: bool [K, S], whether that row exists in the same document."""

    rows: Tensor
    targets: Tensor
    index: Tensor
    valid: Tensor


def align(loss_mask: Tensor, offsets: Tensor, steps: int) -> Alignment:
    """Alignment of packed documents for `steps` unrolled steps."""
    targets = loss_mask.nonzero().squeeze(1)
    starts = offsets[torch.searchsorted(offsets, targets, right=True) - 1]
    ahead = FIRST_AHEAD + torch.arange(steps, device=targets.device)[:, None]
    rows_of = targets - ahead
    valid = rows_of >= starts
    reachable = valid[0]
    targets, rows_of, valid = targets[reachable], rows_of[:, reachable], valid[:, reachable]
    rows = rows_of[valid].unique()
    index = torch.searchsorted(rows, rows_of.clamp(min=0)).clamp(max=max(0, rows.numel() - 1))
    return Alignment(rows, targets, index * valid, valid)
