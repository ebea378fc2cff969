"""Tiny targets to study decoding on: a table of next-token probabilities, and a real transformer of width 16."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from spec_decode.errors import DraftwrightError, check_positive, check_type
from spec_decode.target import TargetOutput, TargetSpec, check_taps
from spec_decode.target_hf import HFTarget

_LOG_ZERO = -1e4  # stands for log 0: exp gives exactly 0, and 0 * _LOG_ZERO is a number


class BigramLM:
    """A target whose next token depends on the last one alone: table [V, V], row v the distribution after token v.

    Its hidden state is the one-hot last token (H = V), after each of 7 layers that do nothing, so that every drafter
    finds the states it reads. Raises TypeError and ValueError for what is no such table.
    """

    def __init__(self, table: Tensor, eos_token_ids: Sequence[int] = (), max_positions: int = 4096) -> None:
        check_type("table", table, Tensor, "a tensor [V, V] of probabilities")
        check_type("eos_token_ids", eos_token_ids, list | tuple, "a list of ints")
        check_positive(max_positions=max_positions)
        if table.dim() != 2 or table.shape[0] != table.shape[1] or not table.is_floating_point():
            raise DraftwrightError(f"table must be [V, V] of floats, got {table.dtype} {list(table.shape)}")
        if bool((table < 0).any()) or not torch.allclose(table.sum(1), table.new_ones(())):
            raise DraftwrightError("table must hold probabilities: no entry below 0, and every row sums to 1")
        self._log = table.log().clamp_min(_LOG_ZERO)
        size = table.shape[0]
        self.spec = TargetSpec(
            name="bigram",
            hidden_size=size,
            vocab_size=size,
            num_layers=7,
            num_heads=1,
            num_kv_heads=1,
            head_dim=2,
            intermediate_size=size,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            max_positions=max_positions,
            eos_token_ids=tuple(eos_token_ids),
        )

    @property
    def device(self) -> torch.device:
        return self._log.device

    @property
    def dtype(self) -> torch.dtype:
        return self._log.dtype

    def new_cache(self) -> _Positions:
        return _Positions()

    def embed(self, ids: Tensor) -> Tensor:
        return F.one_hot(ids, self.spec.vocab_size).to(self.dtype)

    def head(self, hidden: Tensor) -> Tensor:
        return hidden @ self._log

    def head_weight(self) -> Tensor:
        return self._log.T

    def identity(self) -> str:
        return sha256(str(self._log.tolist()).encode()).hexdigest()

    def forward(
        self,
        ids: Tensor,
        *,
        cache: _Positions | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        taps: tuple[int, ...] = (),
        logits: slice | None = None,
        last_hidden: bool = False,
    ) -> TargetOutput:
        """As in `spec_decode.target.Target`; positions and mask make no difference."""
        if cache is not None:
            cache.held += ids.shape[1]
        hidden = self.embed(ids)
        taps = check_taps(taps, self.spec.num_layers) if taps else ()
        return TargetOutput(
            logits=self.head(hidden[:, logits]) if logits is not None else None,
            features=torch.cat([hidden] * len(taps), dim=-1) if taps else None,
            last_hidden=hidden if last_hidden else None,
        )


class _Positions:
    """The cache of a target without memory: how many positions it would hold."""

    def __init__(self) -> None:
        self.held = 0

    def length(self) -> int:
        return self.held

    def keep(self, lengths: Sequence[int], start: int, paths: Sequence[Tensor]) -> None:
        self.held = max(length + path.numel() for length, path in zip(lengths, paths, strict=True))

    def select(self, rows: Sequence[int]) -> None:
        pass


class MultiLayerCausalLM(HFTarget):
    """A random Llama, deterministic for a seed, in fp64: what is exact in theory is exact here.

    `hidden_states` shows every layer's states; everything else is that of any target. std is the spread of its
    weights: the wider, the further its distributions are from uniform. Raises TypeError and ValueError that name the
    argument.
    """

    def __init__(
        self,
        vocab_size: int = 32,
        hidden_size: int = 16,
        num_layers: int = 7,
        num_heads: int = 2,
        num_kv_heads: int = 1,
        max_positions: int = 256,
        seed: int = 0,
        std: float = 0.3,
    ) -> None:
        check_positive(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            max_positions=max_positions,
        )
        check_type("seed", seed, int, "an int")
        check_type("std", std, int | float, "a number")
        if std < 0:
            raise DraftwrightError(f"std must be at least 0, got {std}")
        if hidden_size % (2 * num_heads) or num_heads % num_kv_heads:
            raise DraftwrightError(
                "hidden_size must be a multiple of 2 * num_heads, and num_heads one of num_kv_heads; got "
                f"hidden_size={hidden_size}, num_heads={num_heads}, num_kv_heads={num_kv_heads}"
            )
        config = LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=2 * hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            max_position_embeddings=max_positions,
            initializer_range=std,
            bos_token_id=None,
            eos_token_id=None,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = LlamaForCausalLM(config)
        super().__init__(_without_fp32_norms(model.double()), "toy")

    def hidden_states(self, ids: Tensor) -> tuple[Tensor, ...]:
        """ids [B, T] -> the embedding's output and each layer's, [B, T, H] each, before the final norm.

        (transformers' own `output_hidden_states` puts the final norm on the last one.)
        """
        check_type("ids", ids, Tensor, "an int64 tensor [B, T]")
        states: list[Tensor] = []
        layers = self.model.base_model.layers
        hooks = [layer.register_forward_hook(lambda _m, _a, out: states.append(out)) for layer in layers]
        try:
            self.forward(ids)
        finally:
            for hook in hooks:
                hook.remove()
        return (self.embed(ids), *states)


def _without_fp32_norms(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """transformers' norm rounds to fp32 on the way; torch's keeps the input's precision."""
    for module in model.modules():
        for name, child in module.named_children():
            if type(child).__name__ == "LlamaRMSNorm":
                weight: Any = child.weight
                eps: Any = child.variance_epsilon
                norm = nn.RMSNorm(weight.numel(), eps=eps, dtype=weight.dtype)
                norm.weight = weight
                setattr(module, name, norm)
    return model
