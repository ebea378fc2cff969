"""Training-time test (EAGLE-3, arXiv:2503.01840, section 3; HASS, arXiv:2408.15766, trains on the same states).

    step 0    all rows give keys and values from the target's states
    step k    selected rows run again on their own state a^{k-1} with the true token x[t + 1 + k], at position t + k;
              row t sees K_0[0..t] and its own K_1[t], ..., K_k[t]

Only rows that predict a supervised token run beyond keys and values: later steps are diagonal, so no other row
ever reads the rest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from data.batch import Batch
from spec_decode.feature_drafter import FeatureDrafter
from spec_decode.target import Target
from train.attention import make_blocks, unrolled_attention


def training_time_test(
    draft: FeatureDrafter,
    target: Target,
    batch: Batch,
    states: Tensor,
    rows: Tensor,
    steps: int,
    *,
    detach: bool = False,
) -> Tensor:
    """What the head reads of `rows` [R] at every step, [steps, R, H]; states [N, in]: the target's, of all rows.

    detach: let no gradient flow from one step into the state that it starts from.
    """
    layer, dtype = draft.midlayer, draft.dtype
    count = batch.ids.numel()
    everything = torch.arange(count, device=rows.device)
    positions = everything - batch.offsets[torch.searchsorted(batch.offsets, everything, right=True) - 1]
    blocks = make_blocks(rows, batch.offsets)

    def embeds(of_rows: Tensor, ahead: int) -> Tensor:
        # A row whose token would lie beyond its document gets some other one: nothing reads that row.
        return target.embed(batch.ids[(of_rows + ahead).clamp(max=count - 1)]).to(dtype)

    fused = draft.fuse(states.to(dtype)).to(dtype)
    residual, x = layer.inputs(embeds(everything, 1), fused)
    k0, v0 = layer.self_attn.key_value(x, positions)
    residual, x = residual[rows], x[rows]
    own_k, own_v = k0.new_empty(0, rows.numel(), *k0.shape[1:]), v0.new_empty(0, rows.numel(), *v0.shape[1:])
    fed = fused  # replaced before it is read
    read_by_head = []
    for step in range(steps):
        at = positions[rows] + step
        if step > 0:
            residual, x = layer.inputs(embeds(rows, 1 + step), fed.detach() if detach else fed)
            key, value = layer.self_attn.key_value(x, at)
            own_k, own_v = torch.cat((own_k, key[None])), torch.cat((own_v, value[None]))
        query = layer.self_attn.query(x, at)
        attended = unrolled_attention(query, k0, v0, own_k, own_v, rows, blocks)
        fed, read = draft.readout(layer.outputs(residual, attended))
        read_by_head.append(read)
    return torch.stack(read_by_head)
