"""Expected tokens of a shape, and the best shape for a budget, against brute force."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path

import pytest

from spec_decode.errors import DraftwrightError
from spec_decode.search import (
    best_trees,
    expected_tokens,
    length_distribution,
    prune,
    rank_table,
    reach,
    static_shapes,
)
from spec_decode.tree import SparseTree, StaticTree, chain, paths_of
from spec_decode.tree_file import read_tree, write_tree

ACCURACY = [0.70, 0.55, 0.42, 0.32]
TABLE = [[0.5, 0.2, 0.1], [0.4, 0.25, 0.1], [0.3, 0.1, 0.05]]


def test_the_example_of_the_docs() -> None:
    tree, table = StaticTree((4, 3, 2, 2)), rank_table(ACCURACY, 4)
    assert len(paths_of(tree)) == 88
    assert round(expected_tokens(tree, table), 4) == 3.8133
    assert round(expected_tokens(chain(4), table), 4) == 2.2984
    assert round(expected_tokens(tree, table) / expected_tokens(chain(4), table), 3) == 1.659


def test_reach_is_the_product_along_the_path() -> None:
    assert reach((0, 1, 0), TABLE) == pytest.approx(0.5 * 0.25 * 0.3)
    assert reach((3,), TABLE) == 0
    assert reach((0, 0, 0, 0), TABLE) == 0


@pytest.mark.parametrize("plan", [chain(3), StaticTree((3, 2, 1)), SparseTree(((0,), (1,), (0, 0)))])
def test_lengths_are_a_distribution_with_that_mean(plan) -> None:
    lengths = length_distribution(plan, TABLE)
    assert len(lengths) == plan.depth + 1
    assert sum(lengths) == pytest.approx(1)
    assert min(lengths) >= 0
    assert 1 + sum(k * share for k, share in enumerate(lengths)) == pytest.approx(expected_tokens(plan, TABLE))


def test_pruning_keeps_what_is_reached_often_enough() -> None:
    pruned = prune(StaticTree((3, 3)), TABLE, 0.1)
    assert pruned is not None
    assert set(pruned.paths) == {(0,), (1,), (2,), (0, 0), (0, 1)}
    assert prune(StaticTree((3,)), TABLE, 0.9) is None


def test_static_shapes_are_all_within_the_budget() -> None:
    found = {shape.branching for shape in static_shapes(7, 3)}
    expected = {
        branching
        for depth in (1, 2, 3)
        for branching in product(range(1, 8), repeat=depth)
        if len(paths_of(StaticTree(branching))) <= 7
    }
    assert found == expected


def brute_force(nodes: int) -> float:
    """The best of all prefix-closed sets of this many paths."""
    every = [path for depth in (1, 2, 3) for path in product(range(3), repeat=depth)]
    best = 1.0
    for chosen in combinations(every, nodes):
        try:
            best = max(best, expected_tokens(SparseTree(chosen), TABLE))
        except DraftwrightError:
            continue
    return best


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
def test_the_best_tree_is_the_best_of_all(nodes: int) -> None:
    tree = best_trees(TABLE, nodes)[-1]
    assert len(tree.paths) == nodes
    assert expected_tokens(tree, TABLE) == pytest.approx(brute_force(nodes))


def test_more_nodes_never_yield_less_and_beat_every_static_shape() -> None:
    trees = best_trees(TABLE, 20)
    values = [expected_tokens(tree, TABLE) for tree in trees]
    assert values == sorted(values)
    assert all(len(tree.paths) <= count for count, tree in enumerate(trees, start=1))
    for shape in static_shapes(20, 3):
        assert expected_tokens(shape, TABLE) <= values[len(paths_of(shape)) - 1] + 1e-12


def test_with_falling_rows_the_best_tree_takes_the_likeliest_nodes() -> None:
    """Where a node's value is its reach alone, the best n nodes are the n that are reached most often."""
    every = [path for depth in (1, 2, 3) for path in product(range(3), repeat=depth)]
    likeliest = sorted((reach(path, TABLE) for path in every), reverse=True)
    for count, tree in enumerate(best_trees(TABLE, 15), start=1):
        assert expected_tokens(tree, TABLE) == pytest.approx(1 + sum(likeliest[:count]))


def test_more_nodes_than_the_table_has_room_for() -> None:
    assert best_trees([[0.5]], 3)[-1].paths == ((0,),)


def test_a_later_sibling_may_be_the_better_one() -> None:
    """Measured tables are noisy: a rank that was never accepted can be the price of the next."""
    assert [tree.paths for tree in best_trees([[0.0, 0.4]], 2)] == [((0,),), ((0,), (1,))]
    assert best_trees([[0.1, 0.4], [0.5]], 3)[-1].paths == ((0,), (1,), (1, 0))


def test_nothing_accepted_is_an_error() -> None:
    with pytest.raises(DraftwrightError, match="no draft token was ever accepted"):
        best_trees([[0.0, 0.0]], 4)


# --- sparse trees and their files -----------------------------------------------------------------------------------


def test_a_sparse_tree_knows_its_widths() -> None:
    tree = SparseTree(((0, 0), (1,), (0,), (0, 1), (0, 0, 0)))
    assert tree.paths == ((0,), (1,), (0, 0), (0, 1), (0, 0, 0))
    assert [tree.width(path) for path in [(), *tree.paths]] == [2, 2, 0, 1, 0, 0]
    assert tree.depth == 3
    assert tuple(paths_of(tree)) == tree.paths
    assert tree.cut(1).paths == ((0,), (1,))


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ((), "at least one path"),
        (((),), "at least one path"),
        (((-1,),), "ranks that are 0 or more"),
        (((0.5,),), "ranks that are 0 or more"),
        (((1,),), r"has the path \[1\] but not \[0\]: add it"),
        (((0,), (1, 0)), r"has the path \[1, 0\] but not \[1\]: add it"),
    ],
)
def test_shapes_with_holes_are_refused(paths, message: str) -> None:
    with pytest.raises(DraftwrightError, match=message):
        SparseTree(paths)


def test_a_tree_file_gives_the_tree_back(tmp_path: Path) -> None:
    tree = SparseTree(((0,), (1,), (0, 0)))
    write_tree(tree, tmp_path / "new" / "tree.json", expected_tau=1.9)
    assert read_tree(tmp_path / "new" / "tree.json") == tree


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"paths": 3}', '{"paths": [[1]]}', '{"paths": ["a"]}'])
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tree.json").write_text(content)
    with pytest.raises(DraftwrightError, match=r"tree.json is no tree file .*pass one that python -m eval tune wrote"):
        read_tree(tmp_path / "tree.json")
    with pytest.raises(DraftwrightError, match=r"nothing\.json can't be read"):
        read_tree(tmp_path / "nothing.json")
