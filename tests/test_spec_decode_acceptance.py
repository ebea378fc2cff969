from __future__ import annotations

import math

import pytest

from spec_decode.acceptance import acceptance_by_position, histogram, tau


def test_tau_counts_the_bonus_and_sums_over_rounds() -> None:
    assert tau([2, 0, 1, 1]) == 2.0
    assert tau([0, 0]) == 1.0
    assert math.isnan(tau([]))


def test_acceptance_is_conditional_and_counts_only_rounds_that_offered_the_depth() -> None:
    accepted = [3, 1, 0, 2, 1]
    offered = [3, 3, 3, 2, 1]
    # depth 1: 4 of 5; depth 2: rounds 0, 1, 3 got there, 2 accepted; depth 3: only round 0 both offered and got there
    assert acceptance_by_position(accepted, offered) == [4 / 5, 2 / 3, 1.0]


def test_acceptance_ends_where_no_round_got_to() -> None:
    assert acceptance_by_position([0, 0], [4, 4]) == [0.0]
    assert acceptance_by_position([1, 0], [4, 4]) == [0.5, 0.0]
    assert acceptance_by_position([], []) == []
    assert acceptance_by_position([0], [0]) == []


def test_histogram() -> None:
    assert histogram([0, 2, 2, 4]) == [1, 0, 2, 0, 1]
    assert histogram([]) == []


def test_lists_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        acceptance_by_position([1], [1, 1])
