"""Grouped attention under a mask is transformers' own, without the copies."""

from __future__ import annotations

import pytest
import torch

from spec_decode import grouped_attention
from spec_decode.grouped_attention import NAME
from spec_decode.target_hf import HFTarget


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_states_as_with_sdpa(tiny_llama, dtype, monkeypatch):
    target = HFTarget(tiny_llama().to(dtype), "tiny")
    assert target.model.config._attn_implementation == NAME
    ids = torch.arange(12)[None]
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool)

    def states():
        cache = target.new_cache()
        target.forward(ids, cache=cache)
        positions = torch.tensor([[12, 13, 13, 14]])
        return target.forward(ids[:, :4], cache=cache, positions=positions, mask=mask, last_hidden=True).last_hidden

    grouped = states()
    target.model.set_attn_implementation("sdpa")
    assert torch.equal(grouped, states())


def test_one_token_of_many_sequences_sees_what_each_head_would():
    """query [3, 6, 1, 8] over two key heads of 5 positions, of which the rows see 1, 5 and 3."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, heads, tokens, 8).double() for heads, tokens in ((6, 1), (2, 5), (2, 5)))
    seen = torch.arange(5) < torch.tensor([1, 5, 3])[:, None, None, None]
    mask = torch.zeros(3, 1, 1, 5).double().masked_fill(~seen, float("-inf"))
    found, _ = grouped_attention._attend(torch.nn.Module(), q, k, v, mask, scaling=0.5)
    for head in range(6):
        weights = (0.5 * q[:, head] @ k[:, head // 3].mT + mask[:, 0]).softmax(-1)
        torch.testing.assert_close(found[:, :, head], weights @ v[:, head // 3], rtol=0, atol=1e-14)


def test_other_implementations_are_left_alone(tiny_llama):
    model = tiny_llama()
    model.set_attn_implementation("eager")
    assert HFTarget(model, "tiny").model.config._attn_implementation == "eager"


def test_what_it_does_not_know_goes_to_transformers(monkeypatch):
    calls = []
    monkeypatch.setattr(grouped_attention, "sdpa_attention_forward", lambda *a, **k: calls.append(k))
    q, mask = torch.zeros(1, 4, 2, 8), torch.zeros(1, 1, 2, 2)
    k = torch.zeros(1, 2, 2, 8)
    module = torch.nn.Module()
    for more in ({"softcap": 3.0}, {"dropout": 0.1}, {"position_bias": mask}):
        grouped_attention._attend(module, q, k, k, mask, scaling=1.0, **more)
    grouped_attention._attend(module, q, k, k, None, scaling=1.0)
    assert len(calls) == 4
    assert grouped_attention._attend(module, q, k, k, mask, scaling=1.0)[0].shape == (1, 2, 4, 8)
