"""What a target model is to the rest of the code: a few sizes and one forward pass.

Shapes use B for batch, T for new tokens, H for the hidden size, V for the vocabulary.
Layer ids ("taps") follow Hugging Face's `hidden_states`: id j is the residual stream after j layers,
before the final norm; id 0 is the embedding output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from spec_decode.errors import DraftwrightError, type_error


@dataclass(frozen=True)
class TargetSpec:
    """Sizes and constants of a target, enough to shape a draft for it."""

    name: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_positions: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class TargetOutput:
    """What one forward pass returns; what wasn't asked for is None.

    logits: [B, rows, V] for the rows asked for; features: [B, T, len(taps) * H], taps concatenated in the
    order given; last_hidden: [B, T, H], after the final norm (the head's input).
    """

    logits: Tensor | None
    features: Tensor | None
    last_hidden: Tensor | None

    def row(self, index: int, count: int) -> TargetOutput:
        """The first `count` tokens of one row of the batch, still with a batch axis of 1."""
        parts = (self.logits, self.features, self.last_hidden)
        return TargetOutput(*(None if part is None else part[index : index + 1, :count] for part in parts))


class Cache(Protocol):
    """Key/value cache of a target that can keep one path of a tree in every row of a batch."""

    def length(self) -> int:
        """Number of positions held, of the row that holds most."""
        ...

    def keep(self, lengths: Sequence[int], start: int, paths: Sequence[Tensor]) -> None:
        """Row b keeps its positions < lengths[b] and start + paths[b] (ascending int64), in this order."""
        ...

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows of the batch."""
        ...


class Target(Protocol):
    """A causal language model that can verify a tree in one pass."""

    spec: TargetSpec

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def new_cache(self) -> Cache: ...

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings: [...] -> [..., H]."""
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of final-normed hidden states: [..., H] -> [..., V]."""
        ...

    def head_weight(self) -> Tensor:
        """The unembedding matrix, [V, H]."""
        ...

    def identity(self) -> str:
        """A hash of all that `forward` depends on: weights, dtype and constants, not the name."""
        ...

    def forward(
        self,
        ids: Tensor,
        *,
        cache: Any = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        taps: tuple[int, ...] = (),
        logits: slice | None = None,
        last_hidden: bool = False,
    ) -> TargetOutput:
        """Run ids [B, T] after what `cache` holds.

        positions: [B, T] absolute, default: consecutive. mask: bool [T, S] or [B, T, S], what each new token sees of
        the last S positions, the new ones included; what lies before them is visible to all; default: causal.
        logits: which rows of T get logits.
        """
        ...


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's three target states, hidden_states[2], [n//2] and [n-3] (arXiv:2503.01840, reference code).

    Raises DraftwrightError where a shallow target makes them collide.
    """
    return check_taps((2, num_layers // 2, num_layers - 3), num_layers)  # type: ignore[return-value]


def check_taps(taps: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """Return ascending, distinct taps that exist before the last layer, or raise DraftwrightError naming valid ones."""
    if not taps or list(taps) != sorted(set(taps)) or taps[0] < 1 or taps[-1] >= num_layers:
        raise DraftwrightError(
            f"target layers {list(taps)} cannot be tapped on a target of {num_layers} layers: choose ascending, "
            f"distinct ids from 1 to {num_layers - 1}, for example draft.target_layers={_example(num_layers)}"
        )
    return taps


def _example(num_layers: int) -> list[int]:
    return sorted({max(1, min(num_layers - 1, i)) for i in (1, num_layers // 2, num_layers - 1)})


def check_target(name: str, target: object, also: str = "") -> None:
    """Raise TypeError that names the argument unless it looks like a target; `also` says what else it could be."""
    if not (hasattr(target, "spec") and callable(getattr(target, "forward", None))):
        raise type_error(name, target, f"{also}a target such as HFTarget, with `spec` and `forward`")
