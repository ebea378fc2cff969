"""Attention through torch's FlexAttention: on a GPU one kernel that skips what a row doesn't see."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


def flex_attend(q: Tensor, keys: Tensor, values: Tensor, sees: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """q [R, heads, d], keys and values [C, kv_heads, d] -> [R, heads * d].

    sees(row, column): whether a row sees a column, for index tensors of any shape.
    """
    attend, make_mask = _kernels(q.is_cuda)

    def of_any_head(_batch: Tensor, _head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return sees(row, column)

    mask = make_mask(of_any_head, None, None, len(q), len(keys), device=q.device)
    query, key, value = (part[None].transpose(1, 2) for part in (q, keys, values))
    return attend(query, key, value, block_mask=mask, enable_gqa=True)[0].transpose(0, 1).flatten(1)


@functools.cache
def _kernels(compiled: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Without compiling, flex_attention is a reference that holds all scores and has no gradient on CPUs: for tests."""
    if not compiled:
        return flex_attention, create_block_mask
    return torch.compile(flex_attention, dynamic=True), torch.compile(create_block_mask, dynamic=True)
