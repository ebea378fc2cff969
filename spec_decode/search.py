"""Which fixed tree to draft: what a shape is worth, and the best shape for a number of nodes.

Model: when a node is reached, its child of rank r at depth d is accepted with probability table[d - 1][r], one child
at most. A node is reached with the product of the probabilities along its path, so a shape yields

    tokens per step = 1 + sum over nodes of reach(node)                     (bonus token included)

(Sequoia, arXiv:2402.12374, section 3.1, where the table has one row for all depths.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from spec_decode.errors import DraftwrightError
from spec_decode.tree import FixedTree, Ranks, SparseTree, StaticTree, paths_of

Table = Sequence[Sequence[float]]


def rank_table(accuracy: Sequence[float], width: int) -> list[list[float]]:
    """The table of a draft whose every candidate at depth d is right with probability accuracy[d - 1], tried in turn:
    rank r is accepted with a (1 - a)^r."""
    return [[a * (1 - a) ** rank for rank in range(width)] for a in accuracy]


def reach(path: Ranks, table: Table) -> float:
    """The probability that a walk gets to this node; 0 outside the table."""
    if len(path) > len(table) or any(rank >= len(row) for rank, row in zip(path, table, strict=False)):
        return 0.0
    return prod(row[rank] for rank, row in zip(path, table, strict=False))


def expected_tokens(plan: FixedTree, table: Table) -> float:
    """Tokens per step, bonus token included."""
    return 1 + sum(reach(path, table) for path in paths_of(plan))


def length_distribution(plan: FixedTree, table: Table) -> list[float]:
    """P(accepted drafts = 0, 1, …, depth)."""
    reached = [1.0] + [0.0] * plan.depth
    for path in paths_of(plan):
        reached[len(path)] += reach(path, table)
    return [here - beyond for here, beyond in zip(reached, [*reached[1:], 0.0], strict=True)]


def prune(plan: FixedTree, table: Table, threshold: float) -> SparseTree | None:
    """The nodes that are reached with at least this probability (EAGLE-2's cumulative score); None if none is."""
    kept = [path for path in paths_of(plan) if reach(path, table) >= threshold]
    return SparseTree(tuple(kept), plan.siblings) if kept else None


def static_shapes(nodes: int, depth: int) -> Iterator[StaticTree]:
    """Every static shape of at most `nodes` nodes (the root not counted) and `depth` levels."""

    def extend(branching: tuple[int, ...], level: int, left: int) -> Iterator[tuple[int, ...]]:
        if branching:
            yield branching
        if len(branching) < depth:
            for width in range(1, left // level + 1):
                yield from extend((*branching, width), level * width, left - level * width)

    return (StaticTree(branching) for branching in extend((), 1, nodes))


def best_trees(table: Table, nodes: int) -> list[SparseTree]:
    """The shapes of at most 1, 2, … `nodes` nodes (the root not counted) that yield most tokens per step.

    Dynamic programme from the deepest level up: what n nodes below a node can add at most is shared out among its
    children, rank by rank. Raises DraftwrightError where nothing is ever accepted.
    """
    if not table or not any(p > 0 for p in table[0]):
        raise DraftwrightError("no draft token was ever accepted at depth 1, so no tree is better than none")
    below = [0.0] * (nodes + 1)  # what n nodes add: nothing below the deepest level
    splits: list[list[Ranks]] = []  # per depth: how many nodes the subtrees of ranks 0, 1, … get, for each n
    for row in reversed(table):
        best = _share_out(row, below, nodes)
        below = [gain for gain, _ in best]
        splits.insert(0, [split for _, split in best])
    alone: list[Ranks] = [(0,)]  # where one node has nothing to gain
    return [SparseTree(tuple(list(_paths(splits, count)) or alone)) for count in range(1, nodes + 1)]


def _share_out(row: Sequence[float], below: list[float], nodes: int) -> list[tuple[float, Ranks]]:
    """For n = 0 … nodes: (the most that n nodes below a node add, sizes of its children's subtrees by rank)."""
    best: list[tuple[float, Ranks]] = [(0.0, ())] * (nodes + 1)
    current: dict[int, tuple[float, Ranks]] = {0: (0.0, ())}  # nodes used -> best way with exactly this many children
    for p in row:
        grown: dict[int, tuple[float, Ranks]] = {}
        for used, (gain, sizes) in current.items():
            for size in range(1, nodes - used + 1):
                found = gain + p * (1 + below[size - 1])
                if found > grown.get(used + size, (-1.0, ()))[0]:
                    grown[used + size] = (found, (*sizes, size))
        current = grown
        for used, way in grown.items():
            best[used] = max(best[used], way, key=lambda one: one[0])
    for count in range(1, nodes + 1):  # n nodes may also stay unused
        best[count] = max(best[count], best[count - 1], key=lambda way: way[0])
    return best


def _paths(splits: list[list[Ranks]], count: int, depth: int = 0) -> Iterator[Ranks]:
    if depth == len(splits):
        return
    for rank, size in enumerate(splits[depth][count]):
        yield (rank,)
        yield from ((rank, *path) for path in _paths(splits, size - 1, depth + 1))
