"""LOSSY acceptance: faster, but the output no longer has the target's distribution. Nothing here is exact.

Typical acceptance (Medusa, arXiv:2401.10774, section 2.3.1) takes a drafted token x that the target finds plausible,

    p(x) > min(epsilon, delta * exp(-H(p)))          H(p) = -sum_v p(v) log p(v)

and of all paths of such tokens the longest. Use it only where its effect on the output has been judged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_decode.errors import DraftwrightError, check_type
from spec_decode.sampling import Probabilities, sample
from spec_decode.tree import Tree
from spec_decode.verify import Verdict


@dataclass(frozen=True)
class LossyTypicalAcceptance:
    """The two thresholds; the paper's are epsilon = 0.09 and delta = sqrt(epsilon) = 0.3."""

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        for name, value in (("epsilon", self.epsilon), ("delta", self.delta)):
            check_type(name, value, int | float, "a number")
        if not (0 < self.epsilon < 1 and self.delta > 0):
            raise DraftwrightError(f"typical acceptance needs 0 < epsilon < 1 and delta > 0, got {self}")

    def threshold(self, p: torch.Tensor) -> float:
        """What p(x) must exceed, for the distribution p [V]."""
        entropy = float(torch.special.entr(p).sum())
        return min(self.epsilon, self.delta * float(torch.tensor(-entropy).exp()))


def verify_lossy_typical(
    tree: Tree, p: Probabilities, rule: LossyTypicalAcceptance, generator: torch.Generator | None = None
) -> Verdict:
    """The longest path of typical tokens, the first one in node order among equals; the token after it ~ p there."""
    check_type("tree", tree, Tree, "a Tree")
    check_type("p", p, Probabilities, "Probabilities")
    check_type("rule", rule, LossyTypicalAcceptance, "a LossyTypicalAcceptance")
    tokens, parent, depth = tree.tokens.tolist(), tree.parent.tolist(), tree.depth().tolist()
    reached = {0: p[0]}
    thresholds = {0: rule.threshold(p[0])}
    deepest = 0
    for node in range(1, len(tokens)):
        above = parent[node]
        if above not in reached or float(reached[above][tokens[node]]) <= thresholds[above]:
            continue
        reached[node] = p[node]
        thresholds[node] = rule.threshold(p[node])
        if depth[node] > depth[deepest]:
            deepest = node
    path = [deepest]
    while path[0]:
        path.insert(0, parent[path[0]])
    return Verdict(torch.tensor(path), sample(reached[deepest], generator))
