"""Masks and depths against hand-written matrices; plans refuse shapes that are no trees."""

from __future__ import annotations

import pytest
import torch

from spec_decode.errors import DraftwrightError
from spec_decode.tree import DynamicTree, StaticTree, Tree, chain


def tree(parent: list[int]) -> Tree:
    return Tree(torch.arange(len(parent)), torch.tensor(parent))


def test_branching_tree_mask_and_depth() -> None:
    #      0
    #    1   2
    #   3 4  5
    #     6
    got = tree([-1, 0, 0, 1, 1, 2, 4])
    assert got.ancestor_mask().int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0],
        [1, 0, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 1, 0, 1],
    ]
    assert got.depth().tolist() == [0, 1, 1, 2, 2, 2, 3]
    assert len(got) == 7


def test_a_chain_is_causal() -> None:
    chain = tree([-1, 0, 1, 2])
    assert torch.equal(chain.ancestor_mask(), torch.ones(4, 4, dtype=torch.bool).tril())
    assert chain.depth().tolist() == [0, 1, 2, 3]


def test_the_root_alone() -> None:
    assert tree([-1]).ancestor_mask().tolist() == [[True]]
    assert tree([-1]).depth().tolist() == [0]


@pytest.mark.parametrize("branching", [(), (3, 0), (-1,)])
def test_static_tree_refuses(branching: tuple[int, ...]) -> None:
    with pytest.raises(DraftwrightError, match="at least one child"):
        StaticTree(branching)


@pytest.mark.parametrize("fields", [{"depth": 0}, {"top_k": 0}, {"nodes": 1}])
def test_dynamic_tree_refuses(fields: dict[str, int]) -> None:
    with pytest.raises(DraftwrightError, match=next(iter(fields))):
        DynamicTree(**fields)


def test_static_tree_takes_a_list() -> None:
    assert StaticTree([2, 1]).branching == (2, 1)  # type: ignore[arg-type]


def test_a_dynamic_tree_refuses_drawn_siblings() -> None:
    with pytest.raises(ValueError, match="a dynamic tree can't have siblings=independent: it keeps nodes because"):
        DynamicTree(siblings="independent")


@pytest.mark.parametrize("plan", [DynamicTree, StaticTree])
def test_unknown_sibling_rules_are_refused(plan: type) -> None:
    with pytest.raises(ValueError, match="siblings=sorted is unknown: choose top_k, without_replacement or independ"):
        plan(siblings="sorted")


def test_cutting_a_plan() -> None:
    assert StaticTree((4, 3, 2), "independent").cut(2) == StaticTree((4, 3), "independent")
    assert DynamicTree(4, 8, 24).cut(2) == DynamicTree(2, 8, 24)
    assert DynamicTree(4, 8, 24).cut(9) == DynamicTree(4, 8, 24)
    assert chain(3) == StaticTree((1, 1, 1))


@pytest.mark.parametrize(("gamma", "error"), [("3", TypeError), (0, ValueError)])
def test_a_chain_needs_a_length(gamma: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="gamma must be"):
        chain(gamma)  # type: ignore[arg-type]
