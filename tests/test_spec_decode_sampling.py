"""Probabilities against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from spec_decode.errors import DraftwrightError
from spec_decode.sampling import Probabilities, Sampling, choose, probabilities, sample

P = torch.tensor([0.35, 0.30, 0.20, 0.10, 0.05], dtype=torch.float64)


def test_temperature_zero_is_one_hot_at_the_argmax() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, -1.0, -2.0]])
    assert probabilities(logits, Sampling()).tolist() == [[0, 1, 0], [1, 0, 0]]


def test_temperature_one_is_softmax_and_two_is_the_square_root() -> None:
    torch.testing.assert_close(probabilities(P.log(), Sampling(1.0)), P)
    torch.testing.assert_close(probabilities(P.log(), Sampling(2.0)), P.sqrt() / P.sqrt().sum())


def test_top_k_renormalises_and_keeps_ties() -> None:
    expected = torch.tensor([0.35, 0.30, 0, 0, 0], dtype=torch.float64) / 0.65
    torch.testing.assert_close(probabilities(P.log(), Sampling(1.0, top_k=2)), expected)
    tied = probabilities(torch.tensor([2.0, 1.0, 1.0, 0.0]), Sampling(1.0, top_k=2))
    assert (tied > 0).tolist() == [True, True, True, False]
    torch.testing.assert_close(probabilities(P.log(), Sampling(1.0, top_k=99)), P)


@pytest.mark.parametrize(("top_p", "kept"), [(0.34, 1), (0.36, 2), (0.64, 2), (0.66, 3), (0.949, 4), (1.0, 5)])
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, kept: int) -> None:
    p = probabilities(P.log()[[4, 2, 0, 1, 3]], Sampling(1.0, top_p=top_p))
    expected = P.clone()
    expected[kept:] = 0
    torch.testing.assert_close(p, (expected / expected.sum())[[4, 2, 0, 1, 3]])


def test_top_p_acts_on_what_temperature_and_top_k_left() -> None:
    # top-k 3 leaves .35/.30/.20 of .85: the first two hold .765 of it
    p = probabilities(P.log(), Sampling(1.0, top_k=3, top_p=0.7))
    torch.testing.assert_close(p, torch.tensor([0.35, 0.30, 0, 0, 0], dtype=torch.float64) / 0.65)


def test_dtypes_and_input_left_alone() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16)
    before = logits.clone()
    assert probabilities(logits, Sampling(0.7, 2, 0.9)).dtype == torch.float32
    assert probabilities(logits.double(), Sampling(0.7)).dtype == torch.float64
    assert torch.equal(logits, before)


def test_a_tiny_temperature_does_not_overflow() -> None:
    assert probabilities(torch.tensor([80.0, 81.0, 79.0]), Sampling(1e-38)).tolist() == [0, 1, 0]


def test_rows_on_demand_equal_the_whole() -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    sampling = Sampling(0.8, 5, 0.9)
    torch.testing.assert_close(
        torch.stack([Probabilities(logits, sampling)[i] for i in range(4)]), probabilities(logits, sampling)
    )


def test_sample_follows_the_weights_and_the_seed() -> None:
    generator = torch.Generator().manual_seed(1)
    draws = [sample(P, generator) for _ in range(4000)]
    share = torch.bincount(torch.tensor(draws), minlength=5) / 4000
    assert 0.5 * (share - P).abs().sum() < 0.03
    assert [sample(P, torch.Generator().manual_seed(1)) for _ in range(3)] == draws[:1] * 3
    assert choose(torch.tensor([0.0, 2.0, 1.0]), Sampling()) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
    ],
)
def test_sampling_refuses(fields: dict[str, float]) -> None:
    with pytest.raises(DraftwrightError, match=next(iter(fields))):
        Sampling(**fields)  # type: ignore[arg-type]
