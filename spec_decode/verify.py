"""The accept walk: which path of a draft tree the target takes, and the token that follows it.

At a node with target distribution p and ordered children x_1..x_m, x_j drawn from q_j given its earlier siblings:
    P <- p
    accept x_j with probability min(1, P(x_j) / q_j(x_j))
    on rejection P <- normalize((P - q_j)_+)
    all rejected: emit y ~ P; accepted: go on at x_j with its own p; at a leaf emit y ~ p
(arXiv:2211.17192 for chains, arXiv:2305.09781 for trees.) The tokens emitted then have the target's distribution
exactly. Children chosen deterministically, or by any rule that does not look at the randomness here, have a one-hot
q_j: accept with probability P(x_j), else P(x_j) becomes 0.

This is the only copy of the rule (`verify_greedy` is its case of one-hot p: no chance, no residual). It is written in
operations that tensors and arrays of fractions share, so that tests/test_proof_enumeration.py can run this very code
over all outcomes of its randomness and compare exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from spec_decode.errors import DraftwrightError, check_type
from spec_decode.sampling import Probabilities, sample, without
from spec_decode.tree import Tree


@dataclass(frozen=True)
class Decision:
    """One child that was looked at: it is accepted with this probability; residual [V] is P before the decision."""

    node: int
    probability: float
    accepted: bool
    residual: Any


@dataclass(frozen=True)
class Verdict:
    """path: int64 [A + 1], the accepted nodes, root first, so A drafts were accepted; bonus: the token after them.

    decisions: every child that chance decided about, in order; last: the distribution that bonus was drawn from.
    Both are empty for `verify_greedy`.
    """

    path: Tensor
    bonus: int
    decisions: tuple[Decision, ...] = ()
    last: Any = None


class Chance(Protocol):
    """Where a walk gets its randomness from."""

    def accepts(self, probability: Any) -> bool:
        """True with this probability."""
        ...

    def draw(self, p: Any) -> int:
        """A token from the distribution p [V]."""
        ...


class Dice:
    """Chance from a generator on the CPU; None takes torch's default one."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    def accepts(self, probability: float) -> bool:
        # r < probability, not <=: what has probability 0 is never accepted.
        return float(torch.rand((), dtype=torch.float64, generator=self.generator)) < probability

    def draw(self, p: Tensor) -> int:
        return sample(p, self.generator)


def verify(tree: Tree, p: Tensor | Probabilities, generator: torch.Generator | None = None) -> Verdict:
    """Walk down `tree` with the target's distributions p [N, V] after temperature, top-k and top-p.

    generator: on the CPU; None draws from torch's default one. Raises TypeError for wrong arguments.
    """
    check_type("tree", tree, Tree, "a Tree")
    check_type("p", p, (Tensor, Probabilities), "a tensor [N, V] or Probabilities")
    check_type("generator", generator, torch.Generator | None, "a torch.Generator or None")
    return walk(tree, p, Dice(generator))


def walk(tree: Tree, p: Any, chance: Chance) -> Verdict:
    """`verify` with any source of chance and any kind of numbers."""
    tokens, parent = tree.tokens.tolist(), tree.parent.tolist()
    path, residual = [0], p[0]
    decisions = []
    # Parents precede children, so one pass over the nodes meets the siblings of each level in order.
    for node in range(1, len(tokens)):
        if parent[node] != path[-1]:
            continue
        token = tokens[node]
        q = None if tree.q is None else _like(residual, tree.q[node])
        if q is not None and not _at(q, token) > 0:
            raise DraftwrightError(f"node {node} of the tree was not drawn from its q, which gives it probability 0")
        probability = _at(residual, token) if q is None else min(1, _at(residual, token) / _at(q, token))
        accepted = chance.accepts(probability)
        decisions.append(Decision(node, probability, accepted, residual))
        if accepted:
            path.append(node)
            residual = p[node]
        else:
            # Rounding can leave no mass: P and q are equal then, and p itself stands in.
            rest = without(residual, token) if q is None else positive_part(residual - q)
            residual = p[path[-1]] if rest is None else rest
    return Verdict(torch.tensor(path), chance.draw(residual), tuple(decisions), residual)


def verify_greedy(tree: Tree, argmax: Tensor) -> Verdict:
    """`verify` for p that is one-hot at argmax [N], without the [N, V] matrix."""
    check_type("tree", tree, Tree, "a Tree")
    check_type("argmax", argmax, Tensor, "an int64 tensor [N]")
    tokens, parent, best = tree.tokens.tolist(), tree.parent.tolist(), argmax.tolist()
    path = [0]
    for node in range(1, len(tree)):
        if parent[node] == path[-1] and tokens[node] == best[path[-1]]:
            path.append(node)
    return Verdict(torch.tensor(path), best[path[-1]])


def positive_part(difference: Any) -> Any:
    """normalize((P - q)_+) of a difference P - q [V]; None where nothing is positive."""
    positive = (difference + abs(difference)) / 2  # exact for tensors too, and defined for fractions
    mass = positive.sum()
    return positive / mass if mass > 0 else None


def _at(distribution: Any, token: int) -> Any:
    value = distribution[token]
    return value.item() if isinstance(value, Tensor) else value


def _like(residual: Any, q: Any) -> Any:
    """q on the device and in the precision of the target's distribution."""
    return q.to(residual) if isinstance(q, Tensor) else q
