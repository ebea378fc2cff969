"""Draft layers against transformers' Llama."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from spec_decode.errors import DraftwrightError
from spec_decode.layers import Rope, attend

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        LLAMA3,
    ],
    ids=lambda parameters: parameters["rope_type"],
)
def test_rope_equals_transformers(parameters):
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=dict(parameters))
    x, positions = torch.randn(9, 4, 16), torch.tensor([0, 1, 2, 5, 30, 31, 100, 400, 401])
    cos, sin = LlamaRotaryEmbedding(config)(x, positions[None])
    wanted, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    torch.testing.assert_close(Rope(parameters, 16).rotate(x, positions), wanted[0].transpose(0, 1))


@pytest.mark.parametrize("parameters", [{"rope_type": "yarn"}, {"rope_type": "longrope", "long_factor": [1.0, 2.0]}])
def test_unknown_rope_is_refused(parameters):
    with pytest.raises(DraftwrightError, match=f"rope type '{parameters['rope_type']}'"):
        Rope({"rope_theta": 1e4, **parameters}, 16)


def test_attend_shares_keys_between_query_heads():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 6, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    visible = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 1, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
    keys, values = k.repeat_interleave(3, dim=0), v.repeat_interleave(3, dim=0)
    wanted = F.scaled_dot_product_attention(q.transpose(0, 1), keys, values, attn_mask=visible)
    torch.testing.assert_close(attend(q, k, v, visible), wanted.transpose(0, 1).flatten(1))
    everything = F.scaled_dot_product_attention(q.transpose(0, 1), keys, values)
    torch.testing.assert_close(attend(q, k, v), everything.transpose(0, 1).flatten(1))


@pytest.mark.parametrize("key", sorted(LLAMA3.keys() - {"rope_type"}))
def test_a_missing_parameter_is_named(key):
    parameters = {name: value for name, value in LLAMA3.items() if name != key}
    with pytest.raises(DraftwrightError, match=f"rope_parameters of type 'llama3' lack the key '{key}'"):
        Rope(parameters, 16)
