"""Properties of any tree: its mask, its order, and the cache that is left when one of its paths is committed."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_decode.toy import MultiLayerCausalLM
from spec_decode.tree import Tree
from spec_decode.verify import verify_greedy

TARGET = MultiLayerCausalLM(num_layers=2)
PROMPT = torch.tensor([[5, 17, 3]])


@st.composite
def trees(draw: st.DrawFn, largest: int = 12) -> Tree:
    size = draw(st.integers(1, largest))
    parent = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, size)]
    tokens = draw(st.lists(st.integers(0, 31), min_size=size, max_size=size))
    return Tree(torch.tensor(tokens), torch.tensor(parent))


def ancestors(tree: Tree, node: int) -> list[int]:
    path = [node]
    while (above := int(tree.parent[path[0]])) >= 0:
        path.insert(0, above)
    return path


@given(trees())
def test_each_node_sees_itself_and_its_ancestors(tree: Tree) -> None:
    mask, depth = tree.ancestor_mask(), tree.depth()
    for node in range(len(tree)):
        path = ancestors(tree, node)
        assert mask[node].nonzero().flatten().tolist() == path
        assert int(depth[node]) == len(path) - 1


@given(trees(), st.integers(0, 5))
def test_padding_adds_nodes_that_nobody_sees(tree: Tree, extra: int) -> None:
    padded = tree.padded(len(tree) + extra)
    mask = padded.ancestor_mask()
    assert torch.equal(mask[: len(tree), : len(tree)], tree.ancestor_mask())
    assert not mask[: len(tree), len(tree) :].any()
    assert mask.any(dim=1).all()
    assert torch.equal(padded.tokens[: len(tree)], tree.tokens)


@given(trees(), st.lists(st.integers(0, 31), min_size=12, max_size=12))
def test_the_greedy_path_descends_and_cannot_be_extended(tree: Tree, best: list[int]) -> None:
    verdict = verify_greedy(tree, torch.tensor(best[: len(tree)]))
    path = verdict.path.tolist()
    assert path == ancestors(tree, path[-1])
    for above, node in pairwise(path):
        assert int(tree.tokens[node]) == best[above]
    children = [node for node in range(1, len(tree)) if int(tree.parent[node]) == path[-1]]
    assert verdict.bonus == best[path[-1]]
    assert verdict.bonus not in [int(tree.tokens[node]) for node in children]


@settings(max_examples=30, deadline=None)
@given(trees(), st.data())
def test_the_committed_cache_equals_a_fresh_one(tree: Tree, data: st.DataObject) -> None:
    path = torch.tensor(ancestors(tree, data.draw(st.integers(0, len(tree) - 1))))
    cache = TARGET.new_cache()
    TARGET.forward(PROMPT, cache=cache)
    TARGET.forward(tree.tokens[None], cache=cache, positions=(3 + tree.depth())[None], mask=tree.ancestor_mask())
    cache.keep([3], 3, [path])
    fresh = TARGET.new_cache()
    TARGET.forward(torch.cat((PROMPT, tree.tokens[path][None]), dim=1), cache=fresh)
    for kept, expected in zip(cache.layers, fresh.layers, strict=True):
        torch.testing.assert_close(kept.keys, expected.keys, rtol=0, atol=1e-10)
        torch.testing.assert_close(kept.values, expected.values, rtol=0, atol=1e-10)


@settings(max_examples=30, deadline=None)
@given(trees())
def test_logits_of_each_path_are_those_of_the_sequence(tree: Tree) -> None:
    cache = TARGET.new_cache()
    TARGET.forward(PROMPT, cache=cache)
    logits = TARGET.forward(
        tree.tokens[None],
        cache=cache,
        positions=(3 + tree.depth())[None],
        mask=tree.ancestor_mask(),
        logits=slice(None),
    ).logits
    assert logits is not None
    for node in range(len(tree)):
        path = torch.tensor(ancestors(tree, node))
        alone = TARGET.forward(torch.cat((PROMPT, tree.tokens[path][None]), dim=1), logits=slice(3, None)).logits
        torch.testing.assert_close(logits[0, path], alone[0], rtol=0, atol=1e-10)
