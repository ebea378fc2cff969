"""Training-time-test attention against one softmax over an explicit [T, (k + 1) T] mask."""

from __future__ import annotations

import pytest
import torch

from train import attention
from train.attention import make_blocks, seen_columns, unrolled_attention
from train.flex import flex_attend


def naive(q, k0, v0, own_k, own_v, rows, offsets):
    """All columns at once, mask built entry by entry."""
    steps, count = own_k.shape[0], k0.shape[0]
    groups = q.shape[1] // k0.shape[1]
    keys = torch.cat((k0, *own_k)).repeat_interleave(groups, dim=1)
    values = torch.cat((v0, *own_v)).repeat_interleave(groups, dim=1)
    mask = torch.zeros(len(rows), count + steps * len(rows), dtype=torch.bool)
    for i, row in enumerate(rows.tolist()):
        start = max(offset for offset in offsets.tolist() if offset <= row)
        mask[i, start : row + 1] = True
        for step in range(steps):
            mask[i, count + step * len(rows) + i] = True
    scores = torch.einsum("mhd,nhd->hmn", q, keys) * q.shape[-1] ** -0.5
    share = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hmn,nhd->mhd", share, values).flatten(1)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("steps", [0, 3])
def test_output_and_gradients_equal_an_explicit_mask(steps, recompute, monkeypatch):
    monkeypatch.setattr(attention, "QUERY_ROWS", 4)
    monkeypatch.setattr(attention, "RECOMPUTE_SCORES", 0 if recompute else 1 << 30)
    torch.manual_seed(0)
    offsets = torch.tensor([0, 7, 8, 19])
    rows = torch.tensor([2, 3, 4, 6, 7, 8, 10, 11, 12, 13, 14, 15, 18])
    shapes = [(13, 4, 8), (19, 2, 8), (19, 2, 8), (steps, 13, 2, 8), (steps, 13, 2, 8)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    ours = unrolled_attention(*inputs, rows, make_blocks(rows, offsets))
    wanted = naive(*inputs, rows, offsets)
    torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-12)
    weights = torch.randn_like(ours)
    used = inputs if steps else inputs[:3]
    for left, right in zip(
        torch.autograd.grad((ours * weights).sum(), used),
        torch.autograd.grad((wanted * weights).sum(), used),
        strict=True,
    ):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-12)


def test_blocks_end_at_the_last_key_that_a_row_sees(monkeypatch):
    monkeypatch.setattr(attention, "QUERY_ROWS", 2)
    blocks = make_blocks(torch.tensor([1, 2, 3, 9]), torch.tensor([0, 5, 7, 10]))
    assert [(block.first, block.last, block.start, block.stop) for block in blocks] == [
        (0, 2, 0, 3),
        (2, 3, 0, 4),
        (3, 4, 7, 10),
    ]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("steps", [0, 3])
def test_flex_attention_computes_the_same(steps, masked):
    torch.manual_seed(0)  # forward only: torch differentiates FlexAttention on GPUs alone
    offsets = torch.tensor([0, 7, 8, 19])
    rows = torch.tensor([2, 3, 4, 6, 7, 8, 10, 11, 12, 13, 14, 15, 18])
    blocks = make_blocks(rows, offsets)
    shapes = [(13, 4, 8), (19, 2, 8), (19, 2, 8), (steps, 13, 2, 8), (steps, 13, 2, 8)]
    inputs = [torch.randn(shape) for shape in shapes]
    own_visible = torch.rand(13, steps) < 0.5 if masked else None
    q, k0, v0, own_k, own_v = inputs
    wanted = unrolled_attention(*inputs, rows, blocks, own_visible)
    keys, values = torch.cat((k0, own_k.flatten(0, 1))), torch.cat((v0, own_v.flatten(0, 1)))
    ours = flex_attend(q, keys, values, seen_columns(rows, blocks, len(k0), own_visible))
    torch.testing.assert_close(ours, wanted)
