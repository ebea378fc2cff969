"""Block drafts (DFlash, arXiv:2602.06036): blocks behind anchors that are drawn anew in every step.

    loss = sum over k of decay^k * mean over anchors a of CE(x[a + 1 + k], q^k_a)        decay = exp(-1 / gamma)

An anchor a is a supervised token whose successor is supervised too. Of its K tokens those count that are supervised
up to there, in its document. In terms of data/alignment.py a block is the row a - 1 and draft k is its step k, so
validation measures all rows at the same tokens as for every other variant.

A block's queries see the context at positions before their anchor and their own block, nothing else:

    context 0 1 2 3      blocks of 2 behind anchors 1 and 3; rows are slots, B own keys
    a=1     1 0 0 0      1 1
            1 0 0 0      1 1
    a=3     1 1 1 0      1 1        (causal: 1 0 above 1 1)
            1 1 1 0      1 1
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from conf.check import Positive
from data.alignment import FIRST_AHEAD, Alignment, align
from data.batch import Batch
from spec_decode.drafters.block import BlockDraft
from spec_decode.errors import DraftwrightError
from spec_decode.target import Target
from train.attention import make_blocks, unrolled_attention
from train.module import DraftModule, Unrolled


def check_drafts(drafts: int, steps: int) -> None:
    """Raise DraftwrightError unless there is a step for each token that one pass of a draft proposes."""
    if drafts != steps:
        raise DraftwrightError(
            f"module.steps={steps} but one pass of the draft proposes {drafts} tokens: leave module.steps out and set "
            "draft.num_drafts"
        )


class BlockModule(DraftModule):
    """anchors: blocks drawn in each training step; `steps` is the number of tokens that a block proposes."""

    draft: BlockDraft

    def __init__(self, draft: BlockDraft, target: Target, *, anchors: Positive, **options: Any) -> None:
        check_drafts(draft.config.num_drafts, options["steps"])
        super().__init__(draft, target, **options)
        self.anchors = anchors

    def unroll(self, batch: Batch, rows: Tensor) -> Tensor:
        return run_blocks(self.draft, batch, rows).transpose(0, 1)

    def _unrolled(self, batch: Batch) -> Unrolled:
        return self._drawn(batch) if self.training else super()._unrolled(batch)

    def _drawn(self, batch: Batch) -> Unrolled:
        """The states [K, N, H] of N blocks; each predicts tokens of its own, so tokens are [K, N] too."""
        alignment = draw_blocks(batch, self.anchors, self.steps)
        states, targets = self.unroll(batch, alignment.rows), alignment.targets
        return Unrolled(alignment, states, batch.last_hidden[targets - 1], batch.ids[targets])


def draw_blocks(batch: Batch, anchors: int, steps: int) -> Alignment:
    """At most `anchors` blocks of `steps` tokens, from torch's random state; targets are [K, N], any valid token where
    a block reaches beyond its document."""
    rows = align(batch.loss_mask, batch.offsets, 1).rows
    rows = rows[batch.loss_mask[rows + 1]]
    rows = rows[torch.randperm(len(rows), device=rows.device)[:anchors].sort().values]
    stops = batch.offsets[torch.searchsorted(batch.offsets, rows, right=True)]
    targets = rows + FIRST_AHEAD + torch.arange(steps, device=rows.device)[:, None]
    exists = targets < stops
    targets = targets.clamp(max=batch.ids.numel() - 1)
    valid = (exists & batch.loss_mask[targets]).int().cumprod(dim=0).bool()
    return Alignment(rows, targets, torch.arange(len(rows), device=rows.device).expand_as(targets), valid)


def run_blocks(draft: BlockDraft, batch: Batch, rows: Tensor) -> Tensor:
    """What the head reads of the blocks whose anchors follow `rows` [R], ascending: [R, K, H]."""
    count, size = batch.ids.numel(), draft.config.block_size
    everything = torch.arange(count, device=rows.device)
    positions = everything - batch.offsets[torch.searchsorted(batch.offsets, everything, right=True) - 1]
    at = (positions[rows, None] + 1 + torch.arange(size, device=rows.device)).flatten()
    last_seen = rows.repeat_interleave(size)
    spans = make_blocks(last_seen, batch.offsets)
    causal = torch.ones(size, size, dtype=torch.bool, device=rows.device).tril()
    own_visible = causal.repeat(len(rows), 1) if draft.config.causal else None
    context = draft.fuse(batch.features)
    # A row whose anchor would lie beyond its document gets some other one: nothing reads that row.
    x = draft.inputs(batch.ids[(rows + 1).clamp(max=count - 1)]).flatten(0, 1)
    for layer in draft.layers:
        attention = layer.self_attn
        normed = layer.input_layernorm(x)
        own_k, own_v = (_of_block(each, size) for each in attention.key_value(normed, at))
        k0, v0 = attention.key_value(context, positions)
        query = attention.query(normed, at)
        attended = unrolled_attention(query, k0, v0, own_k, own_v, last_seen, spans, own_visible)
        x = layer.outputs(x, attended)
    return draft.outputs(x.unflatten(0, (len(rows), size)))


def _of_block(own: Tensor, size: int) -> Tensor:
    """Keys or values [R * B, kv_heads, d] -> those of its block for every row, [B, R * B, kv_heads, d]."""
    blocks = own.unflatten(0, (len(own) // size, size)).transpose(0, 1)
    return blocks.repeat_interleave(size, dim=1)
