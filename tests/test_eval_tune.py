"""`python -m eval tune`: counting by rank, interpolated costs, the search, and the file that eval then takes."""

from __future__ import annotations

import pytest
import torch

from eval.costs import Costs, measure_costs
from eval.tune import acceptance_by_rank, calibration_tree, search
from spec_decode.decode import DecodeResult, speculative_decode
from spec_decode.drafters.leviathan import LanguageModelDraft
from spec_decode.errors import DraftwrightError
from spec_decode.search import best_trees, expected_tokens
from spec_decode.toy import BigramLM, MultiLayerCausalLM
from spec_decode.tree import SparseTree, StaticTree

COSTS = Costs(9.0, [1, 2, 4, 8], [10.0, 11.0, 12.0, 20.0], [[1.0] * 4, [2.0, 2.0, 2.0, 4.0]])


def result(*ranks: tuple[int, ...]) -> DecodeResult:
    return DecodeResult([], [len(path) for path in ranks], [2] * len(ranks), 0.0, 0.0, 0.0, list(ranks))


def test_nothing_is_learnt_beyond_what_a_round_offered() -> None:
    cut = DecodeResult([], [1], [1], 0.0, 0.0, 0.0, [(0,)])
    assert acceptance_by_rank([cut], StaticTree((2, 2))) == [[1.0, 0.0]]


def test_shares_are_of_the_rounds_that_offered_the_rank() -> None:
    plan = SparseTree(((0,), (1,), (0, 0), (0, 1), (1, 0)))
    table = acceptance_by_rank([result((0, 0), (0,), (1, 0)), result((), (1,))], plan)
    assert table[0] == [2 / 5, 2 / 5]
    assert table[1] == [2 / 4, 0]  # rank 1 was offered twice, below rank 0 only, and never accepted
    assert len(table) == 2


def test_depths_that_nobody_got_to_are_left_out() -> None:
    assert len(acceptance_by_rank([result((0,), ())], calibration_tree())) == 2


def test_the_calibration_tree_is_narrow_where_it_is_unlikely() -> None:
    tree = calibration_tree()
    assert len(tree.paths) == 125
    assert max(sum(path) for path in tree.paths) == 3
    assert tree.depth == 5


def test_ranks_of_a_real_run_are_those_of_the_draft() -> None:
    """The draft knows the target's best token, but ranks it second: only rank 1 is ever accepted."""
    generator = torch.Generator().manual_seed(0)
    target = BigramLM((2 * torch.randn(12, 12, dtype=torch.float64, generator=generator)).softmax(-1))
    logits = target.head(torch.eye(12, dtype=torch.float64))
    best = logits.argmax(-1, keepdim=True)
    wrong = logits.scatter(1, (best + 1) % 12, float(logits.max()) + 1).softmax(-1)
    got = speculative_decode(
        target, LanguageModelDraft(BigramLM(wrong)), [1], tree=StaticTree((3, 2)), max_new_tokens=40
    )
    assert [len(path) for path in got.ranks] == got.accepted
    assert set(got.ranks) == {(1, 1)}


def test_costs_between_two_sizes_are_interpolated() -> None:
    assert COSTS.verify_at(1) == 10
    assert COSTS.verify_at(3) == 11.5
    assert COSTS.verify_at(5) == 14
    assert COSTS.round(8, 2) == 24
    assert COSTS.draft_at(6, 2) == 3


def test_the_search_weighs_tokens_against_cost() -> None:
    table = [[0.5, 0.3, 0.1, 0.05], [0.4, 0.2, 0.1, 0.05]]
    found = search([best_trees(table[:depth], 7) for depth in (1, 2)], table, COSTS)
    assert len(found) == 7
    for budget, one in enumerate(found, start=2):
        assert one.nodes <= budget
        assert one.tau == pytest.approx(expected_tokens(one.tree, table))
        assert one.speedup == pytest.approx(one.tau * 9 / COSTS.round(one.nodes, one.tree.depth))
    assert max(found, key=lambda one: one.speedup).nodes == 4  # five nodes and more cost too much


def test_costs_are_measured_at_every_size() -> None:
    target = MultiLayerCausalLM(max_positions=200)
    draft = LanguageModelDraft(MultiLayerCausalLM(num_layers=1, max_positions=200))
    table = [[0.5, 0.3, 0.1]] * 3
    trees = [best_trees(table[:depth], 11) for depth in (1, 2, 3)]
    costs = measure_costs(target, draft, torch.arange(30), trees)
    assert costs.sizes == [1, 2, 4, 8, 12]
    assert len(costs.verify) == 5
    assert [len(seconds) for seconds in costs.draft] == [5, 5, 5]
    assert min(costs.plain, *costs.verify, *costs.draft[0]) > 0
    assert costs.draft[2][-1] > costs.draft[0][-1]
    with pytest.raises(DraftwrightError, match="context=190 and nodes=12 exceed the 200 positions"):
        measure_costs(target, draft, torch.arange(190) % 32, trees)
