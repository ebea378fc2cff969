"""Attention under a tree mask for Hugging Face models, without a copy of keys and values for each query head.

transformers' `sdpa` repeats keys and values of grouped queries as soon as there is a mask, in every layer of every
pass. On a CPU torch's own grouped attention takes them as they are, with the same result and half the time; one token
of many sequences takes half of that again, as its heads are multiplied group by group.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "draftwright_grouped_sdpa"
_SPECIAL = ("position_bias", "softcap", "s_aux", "output_attentions")  # left to transformers


def group_attention(model: PreTrainedModel) -> None:
    """Let a model that uses `sdpa` use the grouped one."""
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(NAME)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """query [B, heads, T, d], key and value [B, kv_heads, S, d] -> ([B, T, heads, d], None)."""
    plain = not options.get("dropout") and all(options.get(name) is None for name in _SPECIAL)
    if attention_mask is None or query.device.type != "cpu" or not plain:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    batch, heads, tokens, _ = query.shape
    if tokens == 1 and attention_mask.shape[1] == 1:
        # The heads of a group see the same keys through the same mask, as several tokens would: one product for all.
        query = query.reshape(batch, key.shape[1], -1, query.shape[3])
    scale = options.get("scaling")
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scale, enable_gqa=True)
    return out.reshape(batch, heads, tokens, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
