"""What a pass of the target over a tree and a step of the draft cost on this machine."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eval.bench import now
from spec_decode.drafter import Drafter
from spec_decode.errors import DraftwrightError
from spec_decode.rounds import run_trees
from spec_decode.target import Target
from spec_decode.tree import FixedTree, Tree, chain

REPEATS = 9  # the median of them counts


@dataclass(frozen=True)
class Costs:
    """Seconds of a step of plain decoding, of a pass of the target over a tree, verify[i], and of drafting the tree of
    d levels that was asked about, draft[d - 1][i], both for sizes[i] nodes, root included."""

    plain: float
    sizes: list[int]
    verify: list[float]
    draft: list[list[float]]

    def verify_at(self, nodes: int) -> float:
        """A pass over this many tokens, interpolated between the sizes that were measured."""
        return float(np.interp(nodes, self.sizes, self.verify))

    def draft_at(self, nodes: int, depth: int) -> float:
        """Drafting a tree of so many nodes and levels, likewise."""
        return float(np.interp(nodes, self.sizes, self.draft[depth - 1]))

    def round(self, nodes: int, depth: int) -> float:
        """Drafting and verifying."""
        return self.draft_at(nodes, depth) + self.verify_at(nodes)


@torch.inference_mode()
def measure_costs(target: Target, draft: Drafter, context: Tensor, trees: Sequence[Sequence[FixedTree]]) -> Costs:
    """Time passes after the prompt `context` [P].

    trees[d - 1][n - 1]: what would be drafted with d levels and n nodes below the root. Sizes are the powers of two up
    to the largest. Raises DraftwrightError where the target or the draft can't hold the context and the tree.
    """
    nodes, past = len(trees[0]) + 1, context.numel()
    if past + nodes > target.spec.max_positions:
        raise DraftwrightError(
            f"context={past} and nodes={nodes} exceed the {target.spec.max_positions} positions of the target: lower "
            "them"
        )
    sizes = [*(2**power for power in range((nodes - 1).bit_length())), nodes]
    draft.to(target.device)
    draft.bind(target)
    cache = target.new_cache()
    wanted: dict[str, Any] = {"cache": cache, "taps": draft.taps, "last_hidden": draft.needs_last_hidden}
    output = target.forward(context[None], **wanted)
    root = int(context[0])

    def plain() -> None:
        target.forward(context[None, :1], cache=cache, logits=slice(None))
        cache.keep([past], past, [torch.empty(0, dtype=torch.int64)])

    def verify(size: int) -> None:
        parent = torch.arange(-1, size - 1).clamp(max=0)  # a root and its children
        run_trees(target, [Tree(torch.full((size,), root), parent)], [past], **wanted)
        cache.keep([past], past, [torch.empty(0, dtype=torch.int64)])

    # A round's draft starts from the few rows that the last round left, not from the whole prompt.
    state = draft.start(output, context)
    tree = draft.propose(state, root, chain(1))
    state = draft.commit(state, tree, torch.tensor([0]), target.forward(context[None, :1], **wanted))
    cache.keep([past], past, [torch.empty(0, dtype=torch.int64)])

    def drafting(plan: FixedTree) -> float:
        # Proposing moves the state on, so each time gets its own.
        return _median(lambda own: draft.propose(own, root, plan), lambda: copy.deepcopy(state))

    return Costs(
        _median(lambda _: plain()),
        sizes,
        [_median(lambda _, size=size: verify(size)) for size in sizes],  # type: ignore[misc]
        [[drafting(of_depth[max(size - 2, 0)]) for size in sizes] for of_depth in trees],
    )


def _median(action: Callable[[Any], object], prepare: Callable[[], Any] = lambda: None) -> float:
    """Median seconds of action(prepare()), the preparation not counted."""
    seconds: list[float] = []
    for _ in range(REPEATS + 1):
        prepared = prepare()
        begin = now()
        action(prepared)
        seconds.append(now() - begin)
    return statistics.median(seconds[1:])  # the first one warms up
