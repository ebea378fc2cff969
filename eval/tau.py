"""From many decoded prompts to the numbers of one benchmark.

    tau     = (accepted tokens + rounds) / rounds             over all rounds of all prompts
    speedup = (baseline seconds / baseline tokens) / (seconds / tokens)   over all prompts

Sums first, then one division: never a mean of per-prompt means. A round is one forward pass of the target over
a tree; it commits the accepted draft tokens plus one token of the target's own, so plain decoding has tau = 1.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from data.chat import common_prefix
from eval.bench import Pair
from spec_decode import acceptance
from spec_decode.decode import DecodeResult
from spec_decode.errors import DraftwrightError
from spec_decode.target_hf import HFTarget

# fp32 logit gap below which two tokens count as tied, because kernels round otherwise over N rows than over one. For
# 16 bits that is about four steps of the format between 16 and 32, where the best logits lie.
NEAR_TIE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.0625}
RESAMPLES = 5000


def summarise(pairs: Sequence[Pair], *, greedy: bool) -> dict[str, Any]:
    """The numbers of one benchmark, as they stand in report.json; `identical` is None unless greedy,
    tau is None when every answer ended with the token that the prefill gives."""
    drafted, baseline = [pair.drafted for pair in pairs], [pair.baseline for pair in pairs]
    seconds = np.array([[pair.baseline_seconds, pair.drafted_seconds] for pair in pairs])
    tokens = np.array([[len(pair.baseline.tokens), len(pair.drafted.tokens)] for pair in pairs])
    accepted = [n for result in drafted for n in result.accepted]
    offered = [n for result in drafted for n in result.offered]
    baseline_rate, drafted_rate = tokens.sum(axis=0) / seconds.sum(axis=0)
    rounds = max(1, len(accepted))
    return {
        "tau": acceptance.tau(accepted) if accepted else None,
        "speedup": float(drafted_rate / baseline_rate),
        "speedup_ci": speedup_interval(seconds, tokens),
        "tokens_per_s": float(drafted_rate),
        "baseline_tokens_per_s": float(baseline_rate),
        "acceptance_by_position": acceptance.acceptance_by_position(accepted, offered),
        "accept_length_histogram": acceptance.histogram(accepted),
        "draft_s_per_round": sum(result.draft_seconds for result in drafted) / rounds,
        "verify_s_per_round": sum(result.verify_seconds for result in drafted) / rounds,
        "identical": [r.tokens for r in drafted] == [r.tokens for r in baseline] if greedy else None,
        "prompts": len(pairs),
        "new_tokens": int(tokens[:, 1].sum()),
    }


def speedup_interval(seconds: np.ndarray, tokens: np.ndarray, *, seed: int = 0) -> list[float] | None:
    """Bootstrap 95% interval of the speedup over prompts; both arrays are [prompts, (baseline, drafted)].

    None for a single prompt, which says nothing about how much prompts differ.
    """
    if len(seconds) < 2:
        return None
    rows = np.random.default_rng(seed).integers(len(seconds), size=(RESAMPLES, len(seconds)))
    rates = tokens[rows].sum(axis=1) / seconds[rows].sum(axis=1)
    low, high = np.quantile(rates[:, 1] / rates[:, 0], [0.025, 0.975])
    return [float(low), float(high)]


def baseline_s_per_forward(results: Sequence[DecodeResult]) -> float:
    """Mean seconds of one plain decoding step, prefill excluded."""
    return sum(r.verify_seconds for r in results) / max(1, sum(r.rounds for r in results))


def first_divergence(left: Sequence[int], right: Sequence[int]) -> int | None:
    """The first index at which two token lists differ, or None when they are equal."""
    shared = common_prefix(left, right)
    return None if shared == max(len(left), len(right)) else shared


def partings(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """Where greedy outputs part: prompt, position, both tokens. Gaps aren't measured yet: near_tie is None."""
    found = [(i, first_divergence(pair.baseline.tokens, pair.drafted.tokens)) for i, pair in enumerate(pairs)]
    return [
        {
            "prompt": i,
            "position": position,
            "baseline_token": _token(pairs[i].baseline.tokens, position),
            "token": _token(pairs[i].drafted.tokens, position),
            "logit_gap": None,
            "near_tie": None,
        }
        for i, position in found
        if position is not None
    ]


def differences(target: HFTarget, pairs: Sequence[Pair], dtype: torch.dtype) -> list[dict[str, Any]]:
    """`partings` with the fp32 logit gap of the two tokens on the common prefix.

    near_tie: whether NEAR_TIE of `dtype`, which the prompts were decoded in, explains it. One output that simply ends
    before the other has no gap. The target is in at least fp32 (`at_least_fp32`).
    """
    return [
        _with_gap(target, difference, pairs[difference["prompt"]], NEAR_TIE[dtype]) for difference in partings(pairs)
    ]


def refuse_unexplained(benchmarks: Mapping[str, dict[str, Any]], dtype: torch.dtype) -> None:
    """Raise DraftwrightError for a greedy output that leaves the baseline where rounding doesn't explain it."""
    for name, numbers in benchmarks.items():
        for difference in numbers["differences"]:
            if difference["near_tie"] is False:
                gap = difference["logit_gap"]
                how = "where one of both ends" if gap is None else f"with a logit gap of {gap:.3g}"
                raise DraftwrightError(
                    f"prompt {difference['prompt']} of {name} leaves plain decoding at token {difference['position']} "
                    f"{how}; rounding explains gaps below {NEAR_TIE[dtype]} only, so the target's passes over one and "
                    "over many tokens disagree: please report it"
                )


def _with_gap(target: HFTarget, difference: dict[str, Any], pair: Pair, tolerance: float) -> dict[str, Any]:
    plain, drafted, position = (difference[key] for key in ("baseline_token", "token", "position"))
    gap = None
    if plain is not None and drafted is not None:
        prefix = torch.cat((pair.input_ids.cpu(), torch.tensor(pair.baseline.tokens[:position], dtype=torch.int64)))
        logits = target.forward(prefix[None].to(target.device), logits=slice(-1, None)).logits
        assert logits is not None
        gap = abs(float(logits[0, -1, plain] - logits[0, -1, drafted]))
    return difference | {"logit_gap": gap, "near_tie": gap is not None and gap < tolerance}


def _token(tokens: Sequence[int], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None


def at_least_fp32(target: HFTarget) -> HFTarget:
    """The target itself in fp32 or fp64, else an fp32 copy of it (made only when outputs differ)."""
    if target.dtype in (torch.float32, torch.float64):
        return target
    return HFTarget(copy.deepcopy(target.model).float(), target.spec.name)
