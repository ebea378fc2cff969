"""Trees of draft tokens: the data structure, its mask and the shapes it can be grown to.

Node 0 is the root: the last committed token, which the target has not processed yet. Parents precede children.
A chain is a tree in which every node has one child.

How siblings are chosen decides how they must be verified, so the plan that grows a tree names the rule and the tree
carries what verification needs, the distribution q that each node was drawn from:

    top_k                 the most probable tokens, no chance involved: q is one-hot
    without_replacement   drawn one after the other; q without the siblings drawn before, normalised again
    independent           drawn independently: the draft's q for every sibling

Dynamic trees keep nodes by their probability, which would bias drawn ones: they take top_k alone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from spec_decode.errors import DraftwrightError, check_positive, check_type

Ranks = tuple[int, ...]  # of a node and its ancestors among their siblings, the root's child first

SIBLINGS = ("top_k", "without_replacement", "independent")


class Rows(Protocol):
    """Distributions by row, a tensor [N, V] or something that makes each [V] when it is asked for."""

    def __getitem__(self, node: int, /) -> Tensor: ...


@dataclass(frozen=True)
class Tree:
    """tokens: int64 [N]; parent: int64 [N], -1 for the root; q: [N, V], or what gives its rows, or None.

    q[j] is the distribution that node j was drawn from given its earlier siblings (row 0 is unused).
    None means that nodes were chosen deterministically: verification then treats q as one-hot.
    Siblings are verified in ascending node order. log_q: what the draft gave each node given its parent, [N] (0 at
    the root), for people to look at; verification doesn't use it.
    """

    tokens: Tensor
    parent: Tensor
    q: Rows | None = None
    log_q: Tensor | None = None

    def __post_init__(self) -> None:
        for name, value in (("tokens", self.tokens), ("parent", self.parent)):
            check_type(name, value, Tensor, "an int64 tensor [N]")
        if self.tokens.dim() != 1 or self.tokens.shape != self.parent.shape or not len(self):
            raise DraftwrightError(
                f"a tree needs tokens and parent of the same length, got {list(self.tokens.shape)} and "
                f"{list(self.parent.shape)}"
            )
        if bool((self.parent >= torch.arange(len(self), device=self.parent.device)).any()):
            raise DraftwrightError("a tree's parents must precede their children")

    @classmethod
    def of_root(cls, root: int) -> Tree:
        """The tree that proposes nothing."""
        return cls(torch.tensor([root]), torch.tensor([-1]))

    def __len__(self) -> int:
        return self.tokens.numel()

    def depth(self) -> Tensor:
        """int64 [N], 0 at the root."""
        depth: list[int] = []
        for parent in self.parent.tolist():
            depth.append(depth[parent] + 1 if parent >= 0 else 0)
        return torch.tensor(depth)

    def ranks(self, path: list[int]) -> Ranks:
        """The place of each node of a path, root first, among its siblings; the root has none."""
        parent = self.parent.tolist()
        return tuple(parent[:node].count(parent[node]) for node in path[1:])

    def ancestor_mask(self) -> Tensor:
        """bool [N, N]: row sees column exactly when column is the row itself or one of its ancestors."""
        seen: list[list[int]] = []
        for node, parent in enumerate(self.parent.tolist()):
            seen.append([*(seen[parent] if parent >= 0 else ()), node])
        mask = torch.zeros(len(self), len(self), dtype=torch.bool)
        mask[[row for row, columns in enumerate(seen) for _ in columns], [c for columns in seen for c in columns]] = (
            True
        )
        return mask

    def padded(self, size: int) -> Tree:
        """The tokens and mask of the same tree with `size` nodes: those added are roots of their own, seen by none."""
        extra = size - len(self)
        if not extra:
            return self
        return Tree(F.pad(self.tokens, (0, extra)), F.pad(self.parent, (0, extra), value=-1))


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2's tree (arXiv:2406.16858, section 4): expand the top_k best nodes of each of `depth` levels by
    cumulative log-probability, then keep the `nodes` best of all, root included."""

    depth: int = 4
    top_k: int = 8
    nodes: int = 24
    siblings: str = "top_k"

    def __post_init__(self) -> None:
        check_siblings(self.siblings)
        check_positive(depth=self.depth, top_k=self.top_k, nodes=self.nodes)
        if self.nodes < 2:
            raise DraftwrightError(f"a dynamic tree needs nodes >= 2, root included, got {self.nodes}")
        if self.siblings != "top_k":
            raise DraftwrightError(
                f"a dynamic tree can't have siblings={self.siblings}: it keeps nodes because of their probability, so "
                "what it keeps no longer has the distribution it was drawn from and the output would be biased; use "
                "siblings=top_k, or a static tree"
            )

    def cut(self, depth: int) -> DynamicTree:
        """The same plan with at most `depth` levels."""
        return self if depth >= self.depth else replace(self, depth=depth)


@dataclass(frozen=True)
class StaticTree:
    """A fixed shape: every node of level i has branching[i] children. [1, 1, 1] is a chain of three.

    Drawn siblings need a temperature above 0; at 0 there is nothing to draw and every rule takes the top k. Fewer
    children than asked for come where the distribution has no more tokens.
    """

    branching: tuple[int, ...] = (4, 3, 2, 2)
    siblings: str = "top_k"

    def __post_init__(self) -> None:
        check_siblings(self.siblings)
        check_type("branching", self.branching, list | tuple, "a list of ints")
        object.__setattr__(self, "branching", tuple(self.branching))
        for width in self.branching:
            check_type("each entry of branching", width, int, "an int")
        if not self.branching or min(self.branching) < 1:
            raise DraftwrightError(f"a static tree needs at least one level of at least one child, got {self}")

    @property
    def depth(self) -> int:
        return len(self.branching)

    def width(self, ranks: Ranks) -> int:
        """Children of the node with these ranks on its path."""
        return self.branching[len(ranks)] if len(ranks) < self.depth else 0

    def cut(self, depth: int) -> StaticTree:
        """The same plan with at most `depth` levels."""
        return self if depth >= self.depth else replace(self, branching=self.branching[:depth])


@dataclass(frozen=True)
class SparseTree:
    """A fixed shape whose nodes have different numbers of children (Medusa's sparse tree, arXiv:2401.10774, section
    2.3.3). A node is its path of ranks: (0, 2) is the third child of the first child of the root.

    Each parent and each sibling of a lower rank must be there too. Siblings as in `StaticTree`.
    """

    paths: tuple[Ranks, ...]
    siblings: str = "top_k"

    def __post_init__(self) -> None:
        check_siblings(self.siblings)
        check_type("paths", self.paths, list | tuple, "a list of lists of ranks")
        for path in self.paths:
            check_type("each entry of paths", path, list | tuple, "a list of ranks")
        paths = sorted({tuple(path) for path in self.paths}, key=lambda path: (len(path), path))
        object.__setattr__(self, "paths", tuple(paths))
        known = {(), *paths}
        if not paths or () in paths or any(type(rank) is not int or rank < 0 for path in paths for rank in path):
            raise DraftwrightError("a sparse tree needs at least one path, each of ranks that are 0 or more")
        for path in paths:
            needed = path[:-1] if path[-1] == 0 else (*path[:-1], path[-1] - 1)
            if needed not in known:
                raise DraftwrightError(f"a sparse tree has the path {list(path)} but not {list(needed)}: add it")

    @property
    def depth(self) -> int:
        return len(self.paths[-1])

    def width(self, ranks: Ranks) -> int:
        """Children of the node with these ranks on its path."""
        return self._widths.get(ranks, 0)

    @cached_property
    def _widths(self) -> Counter[Ranks]:
        return Counter(path[:-1] for path in self.paths)

    def cut(self, depth: int) -> SparseTree:
        """The same plan with at most `depth` levels."""
        if depth >= self.depth:
            return self
        return replace(self, paths=tuple(path for path in self.paths if len(path) <= depth))


FixedTree = StaticTree | SparseTree
TreePlan = DynamicTree | FixedTree


def paths_of(plan: FixedTree) -> list[Ranks]:
    """Every node of a fixed shape but the root, as its path of ranks, parents first."""
    level: list[Ranks] = [()]
    paths: list[Ranks] = []
    while level:
        level = [(*path, rank) for path in level for rank in range(plan.width(path))]
        paths += level
    return paths


def chain(gamma: int, siblings: str = "top_k") -> StaticTree:
    """A chain of `gamma` draft tokens."""
    check_positive(gamma=gamma)
    return StaticTree((1,) * gamma, siblings)


def check_siblings(rule: str) -> None:
    """Raise DraftwrightError for a rule that doesn't exist."""
    if rule not in SIBLINGS:
        raise DraftwrightError(f"siblings={rule} is unknown: choose {', '.join(SIBLINGS[:-1])} or {SIBLINGS[-1]}")
