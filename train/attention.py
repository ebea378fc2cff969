"""Attention of training-time test: a row sees the first pass causally and its own later states.

At step i, row t attends to K_0[0..t] and to K_1[t], ..., K_i[t], in one softmax. The own columns are kept apart as
[rows, i] scores, so no [T, i * T] mask or score matrix ever exists. On GPUs FlexAttention does the same in one kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from train.flex import flex_attend

QUERY_ROWS = 256  # query rows per block; a block sees only the keys up to its last row
RECOMPUTE_SCORES = 1 << 20  # blocks with more scores than this are recomputed in the backward pass


@dataclass(frozen=True)
class Block:
    """Query rows [first, last) of the selected rows, and the document's keys [start, stop) that they may see."""

    first: int
    last: int
    start: int
    stop: int


def make_blocks(rows: Tensor, offsets: Tensor) -> list[Block]:
    """Blocks that cover the selected rows (ascending int64 [R]) of documents with these offsets [D + 1]."""
    cuts = torch.searchsorted(rows, offsets).tolist()
    starts = offsets.tolist()
    blocks = []
    for document in range(len(starts) - 1):
        for first in range(cuts[document], cuts[document + 1], QUERY_ROWS):
            last = min(first + QUERY_ROWS, cuts[document + 1])
            blocks.append(Block(first, last, starts[document], int(rows[last - 1]) + 1))
    return blocks


def unrolled_attention(
    q: Tensor,
    k0: Tensor,
    v0: Tensor,
    own_k: Tensor,
    own_v: Tensor,
    rows: Tensor,
    blocks: list[Block],
    own_visible: Tensor | None = None,
) -> Tensor:
    """q [R, heads, d] of the selected rows; k0, v0 [N, kv_heads, d] of all rows at step 0; own_k, own_v
    [i, R, kv_heads, d] of the selected rows at steps 1 to i -> [R, heads * d].

    own_visible: bool [R, i], which of its own columns a row sees; None for all."""
    if q.is_cuda and blocks:
        all_k, all_v = torch.cat((k0, own_k.flatten(0, 1))), torch.cat((v0, own_v.flatten(0, 1)))
        return flex_attend(q, all_k, all_v, seen_columns(rows, blocks, len(k0), own_visible))
    outputs = []
    for block in blocks:
        queries = slice(block.first, block.last)
        keys = slice(block.start, block.stop)
        causal = rows[queries, None] >= torch.arange(block.start, block.stop, device=rows.device)
        own = None if own_visible is None else own_visible[queries]
        parts = (q[queries], k0[keys], v0[keys], own_k[:, queries], own_v[:, queries], causal, own)
        if torch.is_grad_enabled() and causal.numel() * q.shape[1] > RECOMPUTE_SCORES:
            outputs.append(checkpoint(_attend, *parts, use_reentrant=False))
        else:
            outputs.append(_attend(*parts))
    return torch.cat(outputs) if outputs else q.flatten(1)


def seen_columns(
    rows: Tensor, blocks: list[Block], shared: int, own_visible: Tensor | None
) -> Callable[[Tensor, Tensor], Tensor]:
    """What a row sees where keys are laid out as K_0[0..shared), then every row's own step by step: K_1[0..R), ..."""
    count = len(rows)
    sizes = torch.tensor([block.last - block.first for block in blocks])
    starts = torch.tensor([block.start for block in blocks]).repeat_interleave(sizes).to(rows.device)

    def sees(row: Tensor, column: Tensor) -> Tensor:
        context = (column < shared) & (column >= starts[row]) & (column <= rows[row])
        own = (column - shared).clamp(min=0)
        mine = (column >= shared) & (own % count == row)
        if own_visible is not None and own_visible.shape[1]:
            mine = mine & own_visible[row, own // count]
        return context | mine

    return sees


def _attend(
    q: Tensor, k0: Tensor, v0: Tensor, own_k: Tensor, own_v: Tensor, causal: Tensor, own_visible: Tensor | None
) -> Tensor:
    rows, heads, size = q.shape
    kv_heads, keys = k0.shape[1], k0.shape[0]
    groups = heads // kv_heads
    grouped = (q * size**-0.5).view(rows, kv_heads, groups, size).permute(1, 2, 0, 3)
    # Query heads that share a key/value head become extra rows: [kv_heads, groups * rows, keys].
    shared = grouped.reshape(kv_heads, groups * rows, size) @ k0.permute(1, 2, 0)
    shared = shared.view(kv_heads, groups, rows, keys).masked_fill(~causal, float("-inf"))
    own = torch.einsum("kgmd,imkd->kgmi", grouped, own_k)
    if own_visible is not None:
        own = own.masked_fill(~own_visible, float("-inf"))
    precise = torch.promote_types(q.dtype, torch.float32)
    share = torch.cat((shared, own), dim=-1).softmax(dim=-1, dtype=precise).to(q.dtype)
    out = share[..., :keys].reshape(kv_heads, groups * rows, keys) @ v0.permute(1, 0, 2)
    out = out.view(kv_heads, groups, rows, size) + torch.einsum("kgmi,imkd->kgmd", share[..., keys:], own_v)
    return out.permute(2, 0, 1, 3).reshape(rows, heads * size)
