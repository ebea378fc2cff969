"""Both decoders on the same prompts, interleaved, so that a machine that slows down slows both.

Prompt by prompt: plain decoding, then speculative decoding; every other prompt the order is swapped.
Seconds are wall time of the whole decoding, prefill included, for both. An accelerator is waited for before each
look at the clock, so that no work which one decoder leaves queued is billed to the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spec_decode.decode import DecodeResult, plain_decode, speculative_decode
from spec_decode.drafter import Drafter
from spec_decode.errors import DraftwrightError
from spec_decode.lossy import LossyTypicalAcceptance
from spec_decode.sampling import Sampling
from spec_decode.target import Target
from spec_decode.tree import TreePlan


@dataclass(frozen=True)
class Pair:
    """One prompt decoded both ways. input_ids: the prompt's token ids, int64 [P]."""

    input_ids: Tensor
    baseline: DecodeResult
    baseline_seconds: float
    drafted: DecodeResult
    drafted_seconds: float


def measure(
    target: Target,
    draft: Drafter,
    prompts: Sequence[Tensor],
    *,
    tree: TreePlan,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    lossy: LossyTypicalAcceptance | None = None,
    warm_up: bool = True,
    advance: Callable[[], None] = lambda: None,
) -> list[Pair]:
    """Decode every prompt ([P] token ids) with and without the draft; `advance` is called after each prompt.

    With `warm_up` the first prompt is decoded once more beforehand, uncounted. Prompt i samples from a generator
    seeded with seed + i, so neither the order nor the number of prompts changes what one prompt gives.
    """

    def plain(ids: Tensor, generator: torch.Generator) -> DecodeResult:
        return plain_decode(target, ids, max_new_tokens=max_new_tokens, sampling=sampling, generator=generator)

    def speculative(ids: Tensor, generator: torch.Generator) -> DecodeResult:
        return speculative_decode(
            target,
            draft,
            ids,
            tree=tree,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            generator=generator,
            lossy=lossy,
        )

    def both(i: int, ids: Tensor) -> Pair:
        order = (plain, speculative) if i % 2 == 0 else (speculative, plain)
        timed = {decode: _timed(decode, ids, torch.Generator().manual_seed(seed + i)) for decode in order}
        return Pair(ids, *timed[plain], *timed[speculative])

    if warm_up:
        both(0, prompts[0])
    pairs = []
    for i, ids in enumerate(prompts):
        pairs.append(both(i, ids))
        advance()
    return pairs


def check_lengths(name: str, prompts: Sequence[Tensor], max_positions: int) -> None:
    """Raise DraftwrightError for a benchmark without prompts and for a prompt that the target can't hold."""
    if not prompts:
        raise DraftwrightError(f"benchmark '{name}' has no prompts: raise limit=… or choose another path=…")
    for i, ids in enumerate(prompts):
        if ids.numel() > max_positions:
            raise DraftwrightError(
                f"prompt {i} of benchmark '{name}' has {ids.numel()} tokens but the target holds {max_positions}: "
                "shorten it, or leave it out of the file"
            )


def _timed(
    decode: Callable[[Tensor, torch.Generator], DecodeResult], ids: Tensor, generator: torch.Generator
) -> tuple[DecodeResult, float]:
    begin = now()
    result = decode(ids, generator)
    return result, now() - begin


def now() -> float:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()
