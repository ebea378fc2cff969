"""eval/tau.py: sums before divisions, the bootstrap interval, and what parts two greedy outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from eval.bench import Pair
from eval.tau import (
    NEAR_TIE,
    at_least_fp32,
    baseline_s_per_forward,
    differences,
    first_divergence,
    refuse_unexplained,
    speedup_interval,
    summarise,
)
from spec_decode.decode import DecodeResult
from spec_decode.errors import DraftwrightError
from spec_decode.target_hf import HFTarget


def make_pair(plain: list[int], drafted: list[int], accepted: list[int], seconds: tuple[float, float]) -> Pair:
    baseline = DecodeResult(plain, [0] * (len(plain) - 1), [0] * (len(plain) - 1), 0.5, 0.0, 0.1 * (len(plain) - 1))
    result = DecodeResult(drafted, accepted, [2] * len(accepted), 0.5, 0.01 * len(accepted), 0.2 * len(accepted))
    return Pair(torch.tensor([1, 2, 3]), baseline, seconds[0], result, seconds[1])


def test_numbers_are_sums_over_rounds_not_means_of_prompts() -> None:
    short = make_pair([1, 2, 3, 4], [1, 2, 3, 4], [2], (4.0, 1.0))
    long = make_pair(list(range(9)), list(range(9)), [1, 0, 0, 1, 0, 1], (8.0, 7.0))
    numbers = summarise([short, long], greedy=True)
    assert numbers["tau"] == pytest.approx((5 + 7) / 7)  # the mean of the prompts' 3 and 1.5 would be 2.25
    assert numbers["speedup"] == pytest.approx(12 / 8)  # the mean of 4 and 8/7 would be 2.57
    assert numbers["tokens_per_s"] == pytest.approx(13 / 8)
    assert numbers["baseline_tokens_per_s"] == pytest.approx(13 / 12)
    assert numbers["acceptance_by_position"] == pytest.approx([4 / 7, 1 / 4])  # the second given the first
    assert numbers["accept_length_histogram"] == [3, 3, 1]
    assert numbers["draft_s_per_round"] == pytest.approx(0.01)
    assert numbers["verify_s_per_round"] == pytest.approx(0.2)
    assert (numbers["identical"], numbers["prompts"], numbers["new_tokens"]) == (True, 2, 13)
    low, high = numbers["speedup_ci"]
    assert low == pytest.approx(8 / 7)
    assert high == pytest.approx(4.0)


def test_answers_of_one_token_have_no_tau() -> None:
    numbers = summarise([make_pair([1], [1], [], (1.0, 1.0))], greedy=True)
    assert numbers["tau"] is None
    assert numbers["acceptance_by_position"] == []
    assert numbers["speedup_ci"] is None


def test_identical_needs_every_token_and_is_unknown_when_sampling() -> None:
    same, other = make_pair([1, 2], [1, 2], [0], (1.0, 1.0)), make_pair([1, 2], [1, 3], [0], (1.0, 1.0))
    assert summarise([same, other], greedy=True)["identical"] is False
    assert summarise([same, other], greedy=False)["identical"] is None


def test_speedup_interval() -> None:
    tokens = np.full((20, 2), 64)
    steady = np.column_stack((np.full(20, 3.0), np.full(20, 2.0)))
    assert speedup_interval(steady, tokens) == pytest.approx([1.5, 1.5])
    noisy = np.column_stack((np.full(20, 3.0), np.linspace(1.0, 3.0, 20)))
    low, high = speedup_interval(noisy, tokens) or (0.0, 0.0)
    assert 1.25 < low < 1.45 < 1.55 < high < 1.8
    assert speedup_interval(noisy, tokens) == [low, high]
    assert speedup_interval(noisy[:1], tokens[:1]) is None


def test_baseline_time_leaves_the_prefill_out() -> None:
    pairs = [make_pair([1, 2, 3], [1, 2, 3], [1], (9.0, 9.0)), make_pair([1], [1], [], (9.0, 9.0))]
    assert baseline_s_per_forward([pair.baseline for pair in pairs]) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [([1, 2], [1, 2], None), ([1, 2, 3], [1, 5, 3], 1), ([1, 2], [1, 2, 3], 2), ([], [4], 0)],
)
def test_first_divergence(left: list[int], right: list[int], expected: int | None) -> None:
    assert first_divergence(left, right) == expected


FIELDS: dict[str, Any] = {
    "vocab_size": 64, "num_hidden_layers": 2, "eos_token_id": None, "bos_token_id": None, "initializer_range": 0.3
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_difference_names_its_place_and_its_logit_gap(
    tiny_llama: Callable[..., LlamaForCausalLM], dtype: torch.dtype
) -> None:
    model = tiny_llama(**FIELDS).to(dtype)
    pairs = [
        make_pair([5, 6, 7], [5, 6, 7], [2], (1.0, 1.0)),
        make_pair([5, 6, 7], [5, 9, 7], [2], (1.0, 1.0)),
        make_pair([5, 6], [5, 6, 7], [2], (1.0, 1.0)),
    ]
    target = HFTarget(model, "tiny")
    found = differences(at_least_fp32(target), pairs, dtype)
    assert model.dtype == dtype  # the fp32 check leaves the target alone
    exact = model.to(torch.float32 if dtype == torch.bfloat16 else dtype)
    with torch.no_grad():
        logits = exact(torch.tensor([[1, 2, 3, 5]])).logits[0, -1]
    gap = abs(float(logits[6] - logits[9]))
    assert gap > 0.01
    assert found == [
        {"prompt": 1, "position": 1, "baseline_token": 6, "token": 9, "logit_gap": pytest.approx(gap, rel=1e-5),
         "near_tie": gap < NEAR_TIE[dtype]},
        {"prompt": 2, "position": 2, "baseline_token": None, "token": 7, "logit_gap": None, "near_tie": False},
    ]  # fmt: skip


def test_equal_logits_are_a_near_tie(tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    model = tiny_llama(**FIELDS).double()
    with torch.no_grad():
        model.lm_head.weight[9] = model.lm_head.weight[6]
    (found,) = differences(HFTarget(model, "tiny"), [make_pair([5, 6], [5, 9], [0], (1.0, 1.0))], torch.float64)
    assert found["logit_gap"] < 1e-9
    assert found["near_tie"]


def test_what_rounding_does_not_explain_is_a_failure() -> None:
    parted = {"prompt": 4, "position": 7, "baseline_token": 5, "token": 9, "logit_gap": 0.7, "near_tie": False}
    tied, unknown = parted | {"near_tie": True}, parted | {"logit_gap": None, "near_tie": None}
    refuse_unexplained({"mt_bench": {"differences": [tied, unknown]}}, torch.bfloat16)
    with pytest.raises(
        DraftwrightError, match=r"prompt 4 of mt_bench leaves .* token 7 with a logit gap of 0.7; rounding"
    ):
        refuse_unexplained({"mt_bench": {"differences": [tied, parted]}}, torch.bfloat16)
