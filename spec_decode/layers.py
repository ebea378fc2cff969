"""Pieces shared by drafts: rotary positions, the gated MLP and grouped-query attention over one token axis."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_decode.errors import DraftwrightError


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), no biases: [..., H] -> [..., H]."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class FrozenHead(nn.Module):
    """The target's rows of the draft vocabulary as a head, [..., H] -> [..., V_draft]: neither trained nor stored."""

    weight: Tensor

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(vocab_size, hidden_size), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


_ROPE_KEYS = {
    "default": {"rope_theta"},
    "linear": {"rope_theta", "factor"},
    "llama3": {
        "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    },
}  # fmt: skip


class Rope:
    """Rotary position embedding (arXiv:2104.09864) with the target's parameters, angles in fp32.

    Types default, linear and llama3 of transformers' `rope_parameters`; others raise DraftwrightError.
    """

    def __init__(self, parameters: dict[str, Any], head_dim: int) -> None:
        kind = parameters.get("rope_type", "default")
        if kind not in ("default", "linear", "llama3"):
            raise DraftwrightError(f"rope type '{kind}' is not supported by drafts; supported: default, linear, llama3")
        if missing := sorted(_ROPE_KEYS[kind] - parameters.keys()):
            raise DraftwrightError(f"rope_parameters of type '{kind}' lack the key '{missing[0]}'")
        self._key = (tuple(sorted(parameters.items())), head_dim)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [..., T, heads, head_dim] rotated to positions [T]."""
        angles = positions[:, None].float() * _inverse_frequencies(*self._key, x.device)
        cos, sin = angles.cos()[:, None].to(x.dtype), angles.sin()[:, None].to(x.dtype)
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


@lru_cache(maxsize=16)
def _inverse_frequencies(items: tuple[tuple[str, Any], ...], head_dim: int, device: torch.device) -> Tensor:
    """fp32 [head_dim / 2]."""
    parameters = dict(items)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float, device=device) / head_dim
    frequencies = 1.0 / parameters["rope_theta"] ** exponents
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / parameters["factor"]
    return _llama3(frequencies, parameters)


def _llama3(frequencies: Tensor, parameters: dict[str, Any]) -> Tensor:
    """Llama 3.1's scaling: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    blend = (parameters["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    return torch.lerp(frequencies / parameters["factor"], frequencies, blend.clamp(0, 1))


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None) -> Tensor:
    """Grouped-query attention without a batch axis.

    q [M, heads, d], k and v [kv_heads, S, d], visible bool [M, S] or None for everything -> [M, heads * d].
    """
    rows, heads, size = q.shape
    groups = heads // k.shape[0]
    # Query heads that share a key/value head become extra rows, so keys are never repeated.
    grouped = q.view(rows, k.shape[0], groups, size).permute(1, 2, 0, 3).reshape(k.shape[0], groups * rows, size)
    mask = visible.repeat(groups, 1) if visible is not None else None
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask)
    return out.view(k.shape[0], groups, rows, size).permute(2, 0, 1, 3).reshape(rows, heads * size)
