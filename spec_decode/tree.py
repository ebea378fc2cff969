"""Trees of draft tokens: the data structure, its mask and the shapes it can be grown to.

Node 0 is the root: the last committed token, which the target has not processed yet. Parents precede children.
A chain is a tree in which every node has one child.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spec_decode.errors import DraftwrightError


@dataclass(frozen=True)
class Tree:
    """tokens: int64 [N]; parent: int64 [N], -1 for the root; q: [N, V] or None.

    q[j] is the distribution that node j was drawn from given its earlier siblings (row 0 is unused).
    None means that nodes were chosen deterministically: verification then treats q as one-hot.
    Siblings are verified in ascending node order.
    """

    tokens: Tensor
    parent: Tensor
    q: Tensor | None = None

    def __len__(self) -> int:
        return self.tokens.numel()

    def depth(self) -> Tensor:
        """int64 [N], 0 at the root."""
        depth: list[int] = []
        for parent in self.parent.tolist():
            depth.append(depth[parent] + 1 if parent >= 0 else 0)
        return torch.tensor(depth)

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


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2's tree (arXiv:2406.16858, section 4): expand the top_k best nodes of each of `depth` levels by
    cumulative log-probability, then keep the `nodes` best of all, root included."""

    depth: int = 4
    top_k: int = 8
    nodes: int = 24

    def __post_init__(self) -> None:
        if self.depth < 1 or self.top_k < 1 or self.nodes < 2:
            raise DraftwrightError(f"a dynamic tree needs depth >= 1, top_k >= 1 and nodes >= 2, got {self}")


@dataclass(frozen=True)
class StaticTree:
    """A fixed shape: every node of level i has branching[i] children, the most probable tokens.
    [1, 1, 1] is a chain of three."""

    branching: tuple[int, ...] = (4, 3, 2, 2)

    def __post_init__(self) -> None:
        object.__setattr__(self, "branching", tuple(self.branching))
        if not self.branching or min(self.branching) < 1:
            raise DraftwrightError(f"a static tree needs at least one level of at least one child, got {self}")


TreePlan = DynamicTree | StaticTree
