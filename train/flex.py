"""The attention of train/attention.py through torch's FlexAttention: on a GPU one kernel that skips what isn't seen.

Keys are laid out as one row of columns, first those that all rows share, then every row's own, step by step:

    K_0[0..N)   K_1[0..R)   ...   K_i[0..R)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


def flex_unrolled_attention(
    q: Tensor,
    k0: Tensor,
    v0: Tensor,
    own_k: Tensor,
    own_v: Tensor,
    rows: Tensor,
    starts: Tensor,
    own_visible: Tensor | None = None,
) -> Tensor:
    """As `train.attention.unrolled_attention`; starts [R]: the first key of each row's document."""
    shared, count = len(k0), len(rows)
    visible = (
        own_visible
        if own_visible is not None and len(own_k)
        else rows.new_ones(count, max(1, len(own_k)), dtype=torch.bool)
    )

    def sees(_batch: Tensor, _head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        context = (column < shared) & (column >= starts[row]) & (column <= rows[row])
        own = (column - shared).clamp(min=0)
        step = (own // count).clamp(max=visible.shape[1] - 1)
        return context | ((column >= shared) & (own % count == row) & visible[row, step])

    attend, make_mask = _kernels(q.is_cuda)
    mask = make_mask(sees, None, None, count, shared + own_k[:, :, 0, 0].numel(), device=q.device)
    keys, values = (
        torch.cat((first, own.flatten(0, 1)))[None].transpose(1, 2) for first, own in ((k0, own_k), (v0, own_v))
    )
    out = attend(q[None].transpose(1, 2), keys, values, block_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1).flatten(1)


@functools.cache
def _kernels(compiled: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Without compiling, flex_attention is a reference that holds all scores and has no gradient on CPUs: for tests."""
    if not compiled:
        return flex_attention, create_block_mask
    return torch.compile(flex_attention, dynamic=True), torch.compile(create_block_mask, dynamic=True)
