"""Growing a draft tree from a draft's log-probabilities; knows no model.

EAGLE-2's dynamic tree (arXiv:2406.16858, section 4) scores a node by the sum of log q along its path, expands the
best nodes level by level and keeps the best of all nodes generated. A static tree gives each node of a level the same
number of children. Both choose children deterministically, so the tree carries no q.

Nodes live in Python lists until the end: a level has at most a few dozen, and each tensor call costs more than that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from spec_decode.tree import StaticTree, Tree, TreePlan

Step = Callable[[Tensor, Tensor], Tensor]


def grow(
    root_logp: Tensor,
    step: Step,
    plan: TreePlan,
    root: int,
    to_target: Callable[[Tensor], Tensor] | None = None,
) -> Tree:
    """The tree below the token `root`, whose children have the log-probabilities root_logp [V_draft].

    step(tokens [M], parent_rows [M]) runs the draft over M nodes of one level and returns log-probabilities
    [M, V_draft]; tokens are target ids, parent_rows index all rows run so far, -1 for children of the root. It is
    called at most depth - 1 times. to_target maps draft ids to target ids, elementwise. The tree lies on the CPU.
    """
    widths = plan.branching if isinstance(plan, StaticTree) else (plan.top_k,) * plan.depth
    tokens, parent, score = [root], [-1], [0.0]  # every node generated, siblings by descending probability
    row = {0: -1}  # node -> row in which the draft ran it
    level, logp = [0], root_logp[None]
    kept: set[int] = set()
    for depth, width in enumerate(widths, start=1):
        first = len(tokens)
        values, ids = logp.topk(min(width, logp.shape[-1]), dim=-1)
        ids = ids if to_target is None else to_target(ids)
        for node, child_values, child_ids in zip(level, values.tolist(), ids.tolist(), strict=True):
            tokens += child_ids
            parent += [node] * len(child_ids)
            score += [score[node] + value for value in child_values]
        generated = range(first, len(tokens))
        if isinstance(plan, StaticTree):
            kept.update(generated)
            level = list(generated)
        else:
            kept = set(_best([*kept, *generated], score, plan.nodes - 1))
            # Scores only fall along a path: what is out of the budget now has no descendant that could come in.
            level = [node for node in _best(generated, score, plan.top_k) if node in kept]
        if depth == len(widths) or not level:
            break
        parent_rows = [row[parent[node]] for node in level]
        row |= {node: len(row) - 1 + i for i, node in enumerate(level)}
        logp = step(
            torch.tensor([tokens[node] for node in level], device=root_logp.device),
            torch.tensor(parent_rows, device=root_logp.device),
        )
    nodes = [0, *sorted(kept)]
    place = {-1: -1} | {node: i for i, node in enumerate(nodes)}
    return Tree(
        tokens=torch.tensor([tokens[node] for node in nodes]),
        parent=torch.tensor([place[parent[node]] for node in nodes]),
    )


def _best(nodes: Iterable[int], score: list[float], count: int) -> list[int]:
    """The `count` nodes of the highest score, best first; the lower index wins ties."""
    return sorted(nodes, key=lambda node: (-score[node], node))[:count]
