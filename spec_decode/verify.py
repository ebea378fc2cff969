"""The accept walk: which path of a draft tree the target takes, and the token that follows it.

At a node with target distribution p and ordered children x_1..x_m, x_j drawn from q_j given its earlier siblings:
    P <- p
    accept x_j with probability min(1, P(x_j) / q_j(x_j))
    on rejection P <- normalize((P - q_j)_+)
    all rejected: emit y ~ P; accepted: go on at x_j with its own p; at a leaf emit y ~ p
(arXiv:2211.17192 for chains, arXiv:2305.09781 for trees.) The tokens emitted then have the target's distribution
exactly. Children chosen deterministically, or by any rule that does not look at the randomness here, have a one-hot
q_j: accept with probability P(x_j), else P(x_j) becomes 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spec_decode.sampling import Probabilities, sample
from spec_decode.tree import Tree


@dataclass(frozen=True)
class Verdict:
    """path: int64 [A + 1], the accepted nodes, root first, so A drafts were accepted; bonus: the token after them."""

    path: Tensor
    bonus: int


def verify(tree: Tree, p: Tensor | Probabilities, generator: torch.Generator | None = None) -> Verdict:
    """Walk down `tree` with the target's distributions p [N, V] after temperature, top-k and top-p.

    generator: on the CPU; None draws from torch's default one.
    """
    tokens, parent = tree.tokens.tolist(), tree.parent.tolist()
    chance = torch.rand(len(tree), dtype=torch.float64, generator=generator).tolist()
    path, here = [0], p[0]
    residual = here
    # Parents precede children, so one pass over the nodes meets the siblings of each level in order.
    for node in range(1, len(tree)):
        if parent[node] != path[-1]:
            continue
        token = tokens[node]
        q = None if tree.q is None else tree.q[node].to(residual)
        # r < P / q, written without the division: q(x) may have underflowed to 0.
        if chance[node] * (1.0 if q is None else float(q[token])) < float(residual[token]):
            path.append(node)
            residual = here = p[node]
        else:
            residual = _reject(residual, token, q, here)
    return Verdict(torch.tensor(path), sample(residual, generator))


def verify_greedy(tree: Tree, argmax: Tensor) -> Verdict:
    """`verify` for p that is one-hot at argmax [N], without the [N, V] matrix."""
    tokens, parent, best = tree.tokens.tolist(), tree.parent.tolist(), argmax.tolist()
    path = [0]
    for node in range(1, len(tree)):
        if parent[node] == path[-1] and tokens[node] == best[path[-1]]:
            path.append(node)
    return Verdict(torch.tensor(path), best[path[-1]])


def _reject(residual: Tensor, token: int, q: Tensor | None, p: Tensor) -> Tensor:
    """normalize((P - q)_+) with q None for one-hot at token; p where rounding left no mass."""
    if q is None:
        residual = residual.clone()
        residual[token] = 0.0
    else:
        residual = (residual - q).clamp_min(0.0)
    mass = residual.sum()
    return residual / mass if mass > 0 else p
