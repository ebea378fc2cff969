"""Dynamic trees against a literal, unpruned EAGLE-2; static shapes; what the draft is asked for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spec_decode.growth import DraftVocabulary, grow
from spec_decode.sampling import Sampling, probabilities
from spec_decode.tree import DynamicTree, SparseTree, StaticTree, Tree, TreePlan

DRAFT_VOCAB = 11


class TableDraft:
    """Log-probabilities that depend on the whole path below the root, and a record of the calls."""

    def __init__(self, seed: int, sharpness: float = 1.0) -> None:
        self.seed, self.sharpness = seed, sharpness
        self.paths: list[tuple[int, ...]] = []
        self.calls: list[int] = []

    def logp(self, path: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, *path)) % 2**31)
        noise = torch.randn(DRAFT_VOCAB, dtype=torch.float64, generator=generator)
        return (self.sharpness * noise).log_softmax(-1)

    def step(self, tokens: Tensor, parent_rows: Tensor) -> Tensor:
        self.calls.append(len(tokens))
        known = list(self.paths)
        for token, row in zip(tokens.tolist(), parent_rows.tolist(), strict=True):
            self.paths.append((*(known[row] if row >= 0 else ()), token))
        return torch.stack([self.logp(path) for path in self.paths[len(known) :]])


def to_target(ids: Tensor) -> Tensor:
    return 3 * ids + 5


VOCABULARY = DraftVocabulary(to_target(torch.arange(DRAFT_VOCAB)), 40)


def paths(tree: Tree) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parent.tolist(), strict=True):
        found.append((*found[parent], token) if parent >= 0 else ())
    return found[1:]


def eagle2(draft: TableDraft, plan: DynamicTree) -> set[tuple[int, ...]]:
    """Every level expands its top_k best nodes, whether or not they can survive; the best of all generated stay."""
    scores: dict[tuple[int, ...], float] = {}
    level: list[tuple[int, ...]] = [()]
    for _ in range(plan.depth):
        generated = {}
        for path in level:
            values, ids = draft.logp(path).topk(plan.top_k)
            for value, token in zip(values.tolist(), to_target(ids).tolist(), strict=True):
                generated[(*path, token)] = scores.get(path, 0.0) + value
        scores |= generated
        level = sorted(generated, key=lambda path: -generated[path])[: plan.top_k]
    return set(sorted(scores, key=lambda path: -scores[path])[: plan.nodes - 1])


PLANS = [
    DynamicTree(4, 4, 12),
    DynamicTree(1, 3, 24),
    DynamicTree(5, 2, 60),
    DynamicTree(3, 8, 2),
    DynamicTree(4, 8, 24),
]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("sharpness", [0.3, 2.0, 5.0])
def test_dynamic_tree_is_eagle2s(plan: DynamicTree, sharpness: float) -> None:
    for seed in range(5):
        draft = TableDraft(seed, sharpness)
        tree = grow(draft.logp(()), draft.step, plan, root=7, vocabulary=VOCABULARY)
        expected = eagle2(TableDraft(seed, sharpness), plan)
        assert len(tree) == len(expected) + 1
        assert set(paths(tree)) == expected
        assert len(draft.calls) <= plan.depth - 1
        assert all(count <= plan.top_k for count in draft.calls)


SPARSE = SparseTree(((0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 0), (2, 0, 0)))


def test_a_sparse_tree_has_exactly_its_paths() -> None:
    draft = TableDraft(0)
    tree = grow(draft.logp(()), draft.step, SPARSE, root=1, vocabulary=VOCABULARY)
    found = [tree.ranks(tree.ancestor_mask()[node].nonzero().flatten().tolist()) for node in range(1, len(tree))]
    assert tuple(found) == SPARSE.paths
    assert draft.calls == [2, 2]  # only nodes with children are run
    for path, ranks in zip(paths(tree), found, strict=True):
        assert path[-1] == to_target(draft.logp(path[:-1]).topk(3).indices)[ranks[-1]]


@pytest.mark.parametrize("plan", [*PLANS, StaticTree((4, 3, 2)), StaticTree((1, 1, 1, 1)), SPARSE])
def test_node_order_and_root(plan: TreePlan) -> None:
    draft = TableDraft(3)
    tree = grow(draft.logp(()), draft.step, plan, root=7, vocabulary=VOCABULARY)
    parent = tree.parent.tolist()
    assert tree.tokens[0] == 7
    assert parent[0] == -1
    assert all(0 <= above < node for node, above in enumerate(parent) if node)
    assert tree.q is None
    assert tree.tokens.dtype == tree.parent.dtype == torch.int64
    for node in range(len(tree)):  # siblings by descending probability
        siblings = [path for path, above in zip(paths(tree), parent[1:], strict=True) if above == node]
        logp = [float(draft.logp(path[:-1])[(path[-1] - 5) // 3]) for path in siblings]
        assert logp == sorted(logp, reverse=True)


def test_static_tree_has_every_child_and_runs_every_inner_node_once() -> None:
    draft = TableDraft(0)
    tree = grow(draft.logp(()), draft.step, StaticTree((4, 3, 2)), root=1, vocabulary=VOCABULARY)
    assert torch.bincount(tree.depth()).tolist() == [1, 4, 12, 24]
    assert draft.calls == [4, 12]
    assert torch.bincount(tree.parent[1:]).tolist() == [4] + [3] * 4 + [2] * 12
    for path in paths(tree):
        best = to_target(draft.logp(path[:-1]).topk((4, 3, 2)[len(path) - 1]).indices)
        assert path[-1] in best.tolist()


def test_a_chain_is_the_greedy_continuation() -> None:
    draft = TableDraft(0)
    tree = grow(draft.logp(()), draft.step, StaticTree((1, 1, 1)), root=1)
    path: tuple[int, ...] = ()
    for _ in range(3):
        path = (*path, int(draft.logp(path).argmax()))
    assert tree.tokens.tolist() == [1, *path]
    assert tree.parent.tolist() == [-1, 0, 1, 2]


def test_the_draft_is_not_run_where_nothing_can_come_in() -> None:
    draft = TableDraft(0, sharpness=0.01)  # nearly uniform: one level fills the budget
    tree = grow(draft.logp(()), draft.step, DynamicTree(depth=6, top_k=8, nodes=8), root=1)
    assert tree.depth().tolist() == [0] + [1] * 7
    assert len(draft.calls) == 1  # level 1 has to be looked below, level 2 is out already


def test_ties_go_to_the_lower_index() -> None:
    flat = torch.zeros(4, dtype=torch.float64)  # every node scores 0, so the budget goes by order of generation
    tree = grow(flat, lambda tokens, rows: flat.expand(len(tokens), -1), DynamicTree(3, 2, 5), root=0)
    assert tree.parent.tolist() == [-1, 0, 0, 1, 1]


def test_width_beyond_the_draft_vocabulary_is_capped() -> None:
    draft = TableDraft(0)
    assert len(grow(draft.logp(()), draft.step, StaticTree((50,)), root=0)) == DRAFT_VOCAB + 1
    assert len(grow(draft.logp(()), draft.step, DynamicTree(2, 50, 20), root=0)) == 20


# --- drawn siblings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["independent", "without_replacement"])
def test_drawn_nodes_carry_the_distribution_they_were_drawn_from(rule: str) -> None:
    draft, sampling = TableDraft(0), Sampling(0.7, top_k=6)
    tree = grow(
        draft.logp(()),
        draft.step,
        StaticTree((4, 2), siblings=rule),
        root=7,
        vocabulary=VOCABULARY,
        sampling=sampling,
        generator=torch.Generator().manual_seed(0),
    )
    assert tree.q is not None
    before: dict[int, Tensor] = {}
    for node, (path, above) in enumerate(zip(paths(tree), tree.parent.tolist()[1:], strict=True), start=1):
        q = VOCABULARY.spread(probabilities(draft.logp(path[:-1]), sampling))
        expected = before.get(above, q)
        torch.testing.assert_close(tree.q[node], expected)
        assert tree.q[node][path[-1]] > 0
        if rule == "without_replacement":
            rest = expected.clone()
            rest[path[-1]] = 0
            before[above] = rest / rest.sum()


def test_siblings_without_replacement_end_with_the_distribution() -> None:
    draft = TableDraft(0)
    plan = StaticTree((9,), siblings="without_replacement")
    tree = grow(draft.logp(()), draft.step, plan, root=7, sampling=Sampling(1.0, top_k=3))
    assert sorted(tree.tokens[1:].tolist()) == sorted(draft.logp(()).topk(3).indices.tolist())


@pytest.mark.parametrize("rule", ["independent", "without_replacement"])
def test_at_temperature_0_drawn_siblings_are_the_top_k(rule: str) -> None:
    draft = TableDraft(0)
    trees = [grow(draft.logp(()), draft.step, StaticTree((3, 2), siblings), root=7) for siblings in (rule, "top_k")]
    assert trees[0].tokens.tolist() == trees[1].tokens.tolist()
    assert trees[0].q is None


def test_log_q_is_the_drafts() -> None:
    draft = TableDraft(0)
    tree = grow(draft.logp(()), draft.step, DynamicTree(3, 3, 9), root=7)
    assert tree.log_q is not None
    for node, path in enumerate(paths(tree), start=1):
        assert float(tree.log_q[node]) == pytest.approx(float(draft.logp(path[:-1])[path[-1]]))
