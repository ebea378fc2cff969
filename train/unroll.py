"""Training-time test (EAGLE-3, arXiv:2503.01840, section 3; HASS, arXiv:2408.15766, trains on the same states).

    step 0    all rows give keys and values from the target's states
    step k    selected rows run again on their own state a^{k-1} with the true token x[t + 1 + k], at position t + k;
              row t sees K_0[0..t] and its own K_1[t], ..., K_k[t]

Only rows that predict a supervised token run beyond keys and values: later steps are diagonal, so no other row
ever reads the rest. For the same reason a later step can run for some rows alone, drawn anew in each batch (P-EAGLE,
arXiv:2602.01469, draws the depths of its rows so): the mean over them is an unbiased estimate of the step's loss.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conf.check import Share
from data.alignment import align
from data.batch import Batch
from spec_decode.drafter import VocabularyDrafter
from spec_decode.feature_drafter import FeatureDrafter
from spec_decode.target import Target
from train.attention import make_blocks, unrolled_attention
from train.module import DraftModule, Unrolled

LEAST = 0.2  # share of the rows that every step keeps


class SubsampledModule(DraftModule):
    """keep: share of the rows of one step that the next keeps in training."""

    def __init__(self, draft: VocabularyDrafter, target: Target, *, keep: Share, **options: Any) -> None:
        super().__init__(draft, target, **options)
        self.keep = keep

    @abstractmethod
    def unroll(self, batch: Batch, rows: Tensor, kept: Tensor | None = None) -> Tensor:
        """kept: bool [K, R], which rows each step keeps, nested; None for all. States of others are zeros."""

    def _unrolled(self, batch: Batch) -> Unrolled:
        if not self.training or self.keep == 1:
            return super()._unrolled(batch)
        alignment = align(batch.loss_mask, batch.offsets, self.steps)
        kept = nested(len(alignment.rows), self.steps, self.keep, alignment.rows.device)
        states = self.unroll(batch, alignment.rows, kept)
        states = torch.stack([state[index] for state, index in zip(states, alignment.index, strict=True)])
        alignment = replace(alignment, valid=alignment.valid & kept.gather(1, alignment.index))
        targets = alignment.targets
        return Unrolled(alignment, states, batch.last_hidden[targets - 1], batch.ids[targets])


def nested(rows: int, steps: int, keep: float, device: torch.device) -> Tensor:
    """Which rows each step keeps, bool [steps, rows], drawn from torch's random state: step k keeps a share
    max(keep^k, LEAST) of all, which step k - 1 keeps too."""
    rank = torch.randperm(rows, device=device)
    shares = torch.tensor([max(keep**step, LEAST) for step in range(steps)], device=device)
    return rank < (shares * rows).ceil()[:, None]


def training_time_test(
    draft: FeatureDrafter,
    target: Target,
    batch: Batch,
    states: Tensor,
    rows: Tensor,
    steps: int,
    *,
    kept: Tensor | None = None,
    detach: bool = False,
) -> Tensor:
    """What the head reads of `rows` [R] at every step, [steps, R, H]; states [N, in]: the target's, of all rows.

    kept: bool [steps, R], which rows each step keeps of those that the step before kept; None for all. Others get
    zeros. detach: let no gradient flow from one step into the state that it starts from.
    """
    layer, dtype = draft.midlayer, draft.dtype
    count = batch.ids.numel()
    everything = torch.arange(count, device=rows.device)
    positions = everything - batch.offsets[torch.searchsorted(batch.offsets, everything, right=True) - 1]

    def embeds(of_rows: Tensor, ahead: int) -> Tensor:
        # A row whose token would lie beyond its document gets some other one: nothing reads that row.
        return target.embed(batch.ids[(of_rows + ahead).clamp(max=count - 1)]).to(dtype)

    fused = draft.fuse(states.to(dtype)).to(dtype)
    residual, x = layer.inputs(embeds(everything, 1), fused)
    k0, v0 = layer.self_attn.key_value(x, positions)
    residual, x = residual[rows], x[rows]
    own_k, own_v = k0.new_empty(0, rows.numel(), *k0.shape[1:]), v0.new_empty(0, rows.numel(), *v0.shape[1:])
    fed = fused  # replaced before it is read
    place = torch.arange(rows.numel(), device=rows.device)  # in `rows`, of those that the step keeps
    blocks = make_blocks(rows, batch.offsets)
    read_by_head = []
    for step in range(steps):
        if kept is not None and step > 0:
            stays = kept[step, place]
            place, fed, own_k, own_v = place[stays], fed[stays], own_k[:, stays], own_v[:, stays]
            blocks = make_blocks(rows[place], batch.offsets)
        at = positions[rows[place]] + step
        if step > 0:
            residual, x = layer.inputs(embeds(rows[place], 1 + step), fed.detach() if detach else fed)
            key, value = layer.self_attn.key_value(x, at)
            own_k, own_v = torch.cat((own_k, key[None])), torch.cat((own_v, value[None]))
        query = layer.self_attn.query(x, at)
        attended = unrolled_attention(query, k0, v0, own_k, own_v, rows[place], blocks)
        fed, read = draft.readout(layer.outputs(residual, attended))
        if kept is not None:
            read = read.new_zeros(len(rows), read.shape[1]).index_copy(0, place, read)
        read_by_head.append(read)
    return torch.stack(read_by_head)
