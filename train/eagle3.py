"""EAGLE-3 with training-time test (arXiv:2503.01840, section 3; alignment and masks as in the released code).

    step 0    all rows give keys and values from the target's features g
    step k    selected rows run again on their own state a^{k-1} with the true token x[t + 1 + k], at position t + k;
              row t sees K_0[0..t] and its own K_1[t], ..., K_k[t]

Only rows that predict a supervised token run beyond keys and values: later steps are diagonal, so no other row
ever reads the rest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from data.batch import Batch
from spec_decode.drafters.eagle3 import Eagle3Draft
from train.attention import make_blocks, unrolled_attention
from train.module import DraftModule


class Eagle3Module(DraftModule):
    """Training-time test for `Eagle3Draft`."""

    draft: Eagle3Draft

    def unroll(self, batch: Batch, rows: Tensor) -> Tensor:
        draft, layer = self.draft, self.draft.midlayer
        count = batch.ids.numel()
        starts = batch.offsets[
            torch.searchsorted(batch.offsets, torch.arange(count, device=rows.device), right=True) - 1
        ]
        positions = torch.arange(count, device=rows.device) - starts
        blocks = make_blocks(rows, batch.offsets)

        def embeds(of_rows: Tensor, ahead: int) -> Tensor:
            # A row whose token would lie beyond its document gets some other one: nothing reads that row.
            return self.target.embed(batch.ids[(of_rows + ahead).clamp(max=count - 1)]).to(self.residual_dtype)

        everything = torch.arange(count, device=rows.device)
        state = draft.fuse(batch.features.to(self.residual_dtype)).to(self.residual_dtype)
        residual, x = layer.inputs(embeds(everything, 1), state)
        k0, v0 = layer.self_attn.key_value(x, positions)
        residual, x = residual[rows], x[rows]
        own_k, own_v = k0.new_empty(0, rows.numel(), *k0.shape[1:]), v0.new_empty(0, rows.numel(), *v0.shape[1:])
        states = []
        for step in range(self.steps):
            at = positions[rows] + step
            if step > 0:
                residual, x = layer.inputs(embeds(rows, 1 + step), state)
                key, value = layer.self_attn.key_value(x, at)
                own_k, own_v = torch.cat((own_k, key[None])), torch.cat((own_v, value[None]))
            query = layer.self_attn.query(x, at)
            attended = unrolled_attention(query, k0, v0, own_k, own_v, rows, blocks)
            state, normed = draft.readout(layer.outputs(residual, attended))
            states.append(normed)
        return torch.stack(states)
