"""P-EAGLE (arXiv:2602.01469): all depths of a row in one pass, of which later ones are sub-sampled.

    loss = sum over depths d of decay^d * mean over supervised tokens of KL(p, q^d)        uniform: decay 1

Depth d of row t is step d of data/alignment.py. It sees depth 0 of the rows up to t and its own depths up to d:

    keys:          depth 0, rows 0 1 2   own depths 1 2
    t=1, depth 0                 1 1 0              0 0
    t=1, depth 1                 1 1 0              1 0
    t=1, depth 2                 1 1 0              1 1

In training depth d keeps a share max(keep^d, 0.2) of all rows, which depth d - 1 keeps too: a depth that is kept has
all before it. The rows are drawn anew in each step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conf.check import Share
from data.alignment import align
from data.batch import Batch
from spec_decode.drafters.p_eagle import PEagleDraft
from spec_decode.target import Target
from train.attention import make_blocks, unrolled_attention
from train.block import check_drafts
from train.module import DraftModule, Unrolled

LEAST = 0.2  # share of the rows that every depth keeps


class PEagleModule(DraftModule):
    """keep: share of rows of one depth that the next keeps in training; `steps` is the number of depths."""

    draft: PEagleDraft

    def __init__(self, draft: PEagleDraft, target: Target, *, keep: Share, **options: Any) -> None:
        check_drafts(draft.config.num_drafts, options["steps"])
        super().__init__(draft, target, **options)
        self.keep = keep

    def unroll(self, batch: Batch, rows: Tensor) -> Tensor:
        kept = torch.ones(self.steps, len(rows), dtype=torch.bool, device=rows.device)
        return run_depths(self.draft, self.target, batch, rows, kept)

    def _unrolled(self, batch: Batch) -> Unrolled:
        if not self.training:
            return super()._unrolled(batch)
        alignment = align(batch.loss_mask, batch.offsets, self.steps)
        kept = nested(len(alignment.rows), self.steps, self.keep, alignment.rows.device)
        states = run_depths(self.draft, self.target, batch, alignment.rows, kept)
        states = torch.stack([state[index] for state, index in zip(states, alignment.index, strict=True)])
        alignment = replace(alignment, valid=alignment.valid & kept.gather(1, alignment.index))
        targets = alignment.targets
        return Unrolled(alignment, states, batch.last_hidden[targets - 1], batch.ids[targets])


def nested(rows: int, depths: int, keep: float, device: torch.device) -> Tensor:
    """Which rows each depth keeps, bool [depths, rows], drawn from torch's random state; depth 0 keeps all."""
    rank = torch.randperm(rows, device=device)
    shares = torch.tensor([max(keep**depth, LEAST) for depth in range(depths)], device=device)
    return rank < (shares * rows).ceil()[:, None]


def run_depths(draft: PEagleDraft, target: Target, batch: Batch, rows: Tensor, kept: Tensor) -> Tensor:
    """What the head reads of `rows` [R] at every depth, [K, R, H]; zeros where `kept` [K, R] is false.

    All rows of the batch run at depth 0, since their keys and values are read in every layer.
    """
    count, depths = batch.ids.numel(), len(kept)
    everything = torch.arange(count, device=rows.device)
    positions = everything - batch.offsets[torch.searchsorted(batch.offsets, everything, right=True) - 1]
    later, place = kept[1:].nonzero(as_tuple=True)
    row, depth = torch.cat((everything, rows[place])), torch.cat((torch.zeros_like(everything), later + 1))
    order = (row * depths + depth).argsort()
    row, depth = row[order], depth[order]
    first, at, blocks = depth == 0, positions[row] + depth, make_blocks(row, batch.offsets)
    own_visible = torch.arange(1, depths, device=rows.device) <= depth[:, None]
    # A row whose token would lie beyond its document gets some other one: nothing reads that row.
    embeds = target.embed(batch.ids[(row + 1).clamp(max=count - 1)]).to(draft.dtype)
    embeds = torch.where(first[:, None], embeds, draft.mask_embedding())
    fused, masked = draft.fuse(batch.features), draft.fuse(draft.mask_hidden)
    hidden = torch.where(first[:, None], fused[row], masked).to(draft.dtype)

    def own(values: Tensor) -> Tensor:
        """Keys or values [M, kv_heads, d] -> of every row those of its own depths 1, ..., [K - 1, M, kv_heads, d]."""
        table = values.new_zeros(depths - 1, count, *values.shape[1:])
        return table.index_put((depth[~first] - 1, row[~first]), values[~first])[:, row]

    for layer in draft.all_layers():
        residual, x = layer.inputs(embeds, hidden)
        key, value = layer.self_attn.key_value(x, at)
        query = layer.self_attn.query(x, at)
        attended = unrolled_attention(query, key[first], value[first], own(key), own(value), row, blocks, own_visible)
        hidden = layer.outputs(residual, attended)
    read = draft.norm(hidden)
    return read.new_zeros(depths, count, read.shape[-1]).index_put((depth, row), read)[:, rows]
