"""Growing a draft tree from a draft's log-probabilities; knows no model.

EAGLE-2's dynamic tree (arXiv:2406.16858, section 4) scores a node by the sum of log q along its path, expands the
best nodes level by level and keeps the best of all nodes generated. A fixed shape says how many children each node
has, the most probable ones or drawn ones (`spec_decode.tree` has the rules).

Nodes live in Python lists until the end: a level has at most a few dozen, and each tensor call costs more than that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import compress

import torch
from torch import Tensor
from torch.nn import functional as F

from spec_decode.sampling import GREEDY, Sampling, probabilities, sample, siblings
from spec_decode.tree import DynamicTree, Ranks, Rows, Tree, TreePlan

Step = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class DraftVocabulary:
    """Target id of every draft id, ascending int64 [V_draft], and the size V of the target's vocabulary."""

    ids: Tensor
    size: int

    def spread(self, q: Tensor) -> Tensor:
        """A distribution over draft ids [V_draft] as one over target ids [V]."""
        return q.new_zeros(self.size).index_copy_(0, self.ids.to(q.device), q)


@dataclass(frozen=True)
class SpreadRows:
    """q [N, V] of a tree from draft ids: the accept walk reads few rows, so only those are spread."""

    rows: list[Tensor]
    vocabulary: DraftVocabulary

    def __getitem__(self, node: int) -> Tensor:
        return self.vocabulary.spread(self.rows[node])


@dataclass(frozen=True)
class _Children:
    """Of one node: draft ids as target ids, their log-probabilities, and the q each was drawn from (or none)."""

    tokens: list[int]
    log_q: list[float]
    q: list[Tensor]


def grow(
    root_logp: Tensor,
    step: Step,
    plan: TreePlan,
    root: int,
    vocabulary: DraftVocabulary | None = None,
    *,
    sampling: Sampling = GREEDY,
    generator: torch.Generator | None = None,
    expands: Callable[[list[int]], list[bool]] | None = None,
) -> Tree:
    """The tree below the token `root`, whose children have the log-probabilities root_logp [V_draft].

    step(tokens [M], parent_rows [M]) runs the draft over M nodes of one level and returns log-probabilities
    [M, V_draft], or [1, V_draft] where they are the same for all; tokens are target ids, parent_rows index all rows
    run so far, -1 for children of the root. It is called at most depth - 1 times. vocabulary: None when draft ids are
    target ids. sampling: what drawn siblings are drawn with, the target's own. expands: which nodes of a level, given
    as target ids before the step that would run them, get children at all; None for all to which the plan gives some.
    It sees nothing of those children, which keeps the output exact. The tree lies on the CPU.
    """
    drawn = plan.siblings != "top_k" and not sampling.greedy
    choose = partial(_draw, rule=plan.siblings, sampling=sampling, generator=generator) if drawn else _top_k
    tokens, parent, log_q, score = [root], [-1], [0.0], [0.0]  # every node generated, siblings in order
    ranks: list[Ranks] = [()]
    q = [root_logp.new_zeros(root_logp.shape)]  # unused, at the root
    row = {0: -1}  # node -> row in which the draft ran it
    level, logp = [0], root_logp[None]
    kept: set[int] = set()
    for depth in range(1, plan.depth + 1):
        first = len(tokens)
        widths = [plan.top_k if isinstance(plan, DynamicTree) else plan.width(ranks[node]) for node in level]
        for node, width, children in zip(level, widths, choose(logp, len(level), max(widths), vocabulary), strict=True):
            tokens += children.tokens[:width]
            log_q += children.log_q[:width]
            score += [score[node] + value for value in children.log_q[:width]]
            q += children.q[:width]
            ranks += [(*ranks[node], rank) for rank in range(len(children.tokens[:width]))]
            parent += [node] * (len(tokens) - len(parent))
        generated = range(first, len(tokens))
        if isinstance(plan, DynamicTree):
            kept = set(_best([*kept, *generated], score, plan.nodes - 1))
            # Scores only fall along a path: what is out of the budget now has no descendant that could come in.
            level = [node for node in _best(generated, score, plan.top_k) if node in kept]
        else:
            kept.update(generated)
            level = [node for node in generated if plan.width(ranks[node])]
        if expands is not None and depth < plan.depth and level:
            level = list(compress(level, expands([tokens[node] for node in level])))
        if depth == plan.depth or not level:
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
        q=_rows(q, vocabulary) if drawn else None,
        log_q=torch.tensor([log_q[node] for node in nodes]),
    )


def same_children(levels: Iterable[Tensor]) -> Step:
    """The step of a draft whose proposals don't depend on one another: each level has one row of log-probabilities
    [V_draft], given in order."""
    rows = iter(levels)
    return lambda _tokens, _parent_rows: next(rows)[None]


class LevelMask:
    """Which of the rows run so far each new row of a growing tree sees: its ancestors and itself."""

    def __init__(self, device: torch.device) -> None:
        self._visible = torch.zeros(1, 0, dtype=torch.bool, device=device)  # row r of the tree lies at r + 1

    def extend(self, parent_rows: Tensor) -> Tensor:
        """Rows with these parents (int64 [M], -1: the root) join the R there are: bool [M, R + M]."""
        count = parent_rows.numel()
        new = torch.cat(
            (self._visible[parent_rows + 1], torch.eye(count, dtype=torch.bool, device=parent_rows.device)), dim=1
        )
        self._visible = torch.cat((F.pad(self._visible, (0, count)), new))
        return new


def _top_k(logp: Tensor, count: int, width: int, vocabulary: DraftVocabulary | None) -> list[_Children]:
    values, ids = logp.topk(min(width, logp.shape[-1]), dim=-1)
    ids = ids if vocabulary is None else vocabulary.ids[ids]
    found = [_Children(tokens, log_q, []) for tokens, log_q in zip(ids.tolist(), values.tolist(), strict=True)]
    return found if len(found) == count else found * count


def _draw(
    logp: Tensor,
    count: int,
    width: int,
    vocabulary: DraftVocabulary | None,
    *,
    rule: str,
    sampling: Sampling,
    generator: torch.Generator | None,
) -> list[_Children]:
    drawn = []
    distributions = probabilities(logp, sampling)
    for node in range(count):
        row, q = logp[node % len(logp)], distributions[node % len(logp)]
        ids, rows = siblings(q, width, rule, partial(sample, generator=generator))
        tokens = ids if vocabulary is None else vocabulary.ids[ids].tolist()
        drawn.append(_Children(tokens, row[ids].tolist(), rows))
    return drawn


def _rows(q: list[Tensor], vocabulary: DraftVocabulary | None) -> Rows:
    return q if vocabulary is None else SpreadRows(q, vocabulary)


def _best(nodes: Iterable[int], score: list[float], count: int) -> list[int]:
    """The `count` nodes of the highest score, best first; the lower index wins ties."""
    return sorted(nodes, key=lambda node: (-score[node], node))[:count]
