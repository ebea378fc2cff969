"""From logits to the distribution that a request samples from: temperature, then top-k, then top-p."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spec_decode.errors import DraftwrightError, check_type


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; top_k 0 and top_p 1 keep all tokens. Raises DraftwrightError on values outside."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        check_type("temperature", self.temperature, int | float, "a number")
        check_type("top_k", self.top_k, int, "an int")
        check_type("top_p", self.top_p, int | float, "a number")
        if not (0 <= self.temperature < math.inf and self.top_k >= 0 and 0 < self.top_p <= 1):
            raise DraftwrightError(f"sampling needs temperature >= 0, top_k >= 0 and 0 < top_p <= 1, got {self}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


GREEDY = Sampling()


@dataclass(frozen=True)
class Probabilities:
    """p [N, V] of a tree, computed row by row: the accept walk visits few of the N rows, and top-p sorts each."""

    logits: Tensor
    sampling: Sampling

    def __getitem__(self, row: int) -> Tensor:
        return probabilities(self.logits[row], self.sampling)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution to sample from, [..., V] -> [..., V]; fp64 stays fp64, all else becomes fp32.

    Temperature 0 gives one-hot rows. Tokens that tie with the k-th best survive top-k; top-p keeps the fewest best
    tokens whose probabilities reach top_p.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if sampling.greedy:
        best = logits.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(logits).scatter_(-1, best, 1.0)
    # Subtracting the maximum first keeps tiny temperatures from overflowing.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        worst_kept = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < worst_kept, -math.inf)
    p = logits.softmax(dim=-1)
    return p if sampling.top_p == 1 else _nucleus(p, sampling.top_p)


def sample(weights: Tensor, generator: torch.Generator | None = None) -> int:
    """A token drawn in proportion to non-negative weights [V]; on the CPU, so that a seed means the same anywhere."""
    return int(torch.multinomial(weights.cpu(), 1, generator=generator))


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator | None = None) -> int:
    """One token from logits [V]."""
    return int(logits.argmax()) if sampling.greedy else sample(probabilities(logits, sampling), generator)


def siblings(q: Any, count: int, rule: str, draw: Callable[[Any], int]) -> tuple[list[int], list[Any]]:
    """At most `count` tokens drawn from the draft's q [V], and the distribution that each was drawn from.

    rule: "independent" or "without_replacement" (`spec_decode.tree`). q may be a tensor or an array of fractions.
    """
    if rule not in ("independent", "without_replacement"):
        raise DraftwrightError(f"siblings can't be drawn by the rule {rule}: use independent or without_replacement")
    tokens: list[int] = []
    rows: list[Any] = []
    while len(tokens) < count and q is not None:
        tokens.append(draw(q))
        rows.append(q)
        if rule == "without_replacement":
            q = without(q, tokens[-1])
    return tokens, rows


def without(distribution: Any, token: int) -> Any:
    """The distribution [V] given that it isn't `token`; None if it can't be anything else."""
    rest = distribution * 1  # a copy, of tensors and arrays alike
    rest[token] = 0
    mass = rest.sum()
    return rest / mass if mass > 0 else None


def _nucleus(p: Tensor, top_p: float) -> Tensor:
    ranked, order = p.sort(dim=-1, descending=True, stable=True)
    before = ranked.cumsum(dim=-1) - ranked
    ranked = ranked.masked_fill(before >= top_p, 0.0)
    kept = torch.zeros_like(p).scatter_(-1, order, ranked)
    return kept / kept.sum(dim=-1, keepdim=True)
