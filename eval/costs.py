"""What a pass of the target over a tree and a step of the draft cost on this machine."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eval.bench import now
from spec_decode.drafter import Drafter
from spec_decode.target import Target
from spec_decode.tree import StaticTree, Tree, chain

REPEATS = 9  # the median of them counts


@dataclass(frozen=True)
class Costs:
    """Seconds. verify[i]: a pass of the target over sizes[i] tokens, mask and cache bookkeeping included;
    draft[d - 1]: proposing a tree of d levels."""

    sizes: list[int]
    verify: list[float]
    draft: list[float]

    def round(self, nodes: int, depth: int) -> float:
        """One round with a tree of `nodes` nodes, root included; passes of other sizes are interpolated."""
        return self.draft[depth - 1] + self.verify_at(nodes)

    def verify_at(self, nodes: int) -> float:
        """A pass over this many tokens."""
        above = next(i for i, size in enumerate(self.sizes) if size >= nodes)
        if self.sizes[above] == nodes:
            return self.verify[above]
        share = (nodes - self.sizes[above - 1]) / (self.sizes[above] - self.sizes[above - 1])
        return self.verify[above - 1] + share * (self.verify[above] - self.verify[above - 1])


@torch.inference_mode()
def measure_costs(target: Target, draft: Drafter, context: Tensor, nodes: int, depth: int, width: int) -> Costs:
    """Time passes after the prompt `context` [P]. width: children per level of the trees that the draft is timed on."""
    sizes = [2**power for power in range((nodes - 1).bit_length() + 1)]
    draft.bind(target)
    cache = target.new_cache()
    options: dict[str, Any] = {"cache": cache, "taps": draft.taps, "last_hidden": draft.needs_last_hidden}
    output = target.forward(context[None], logits=slice(-1, None), **options)
    past = context.numel()

    def verify(size: int) -> None:
        tree = Tree(context[:1].repeat(size).cpu(), torch.arange(-1, size - 1).clamp(max=0))  # a root and its children
        mask = tree.ancestor_mask().to(context.device) if size > 1 else None
        target.forward(
            tree.tokens[None].to(context.device),
            positions=(past + tree.depth())[None].to(context.device),
            mask=mask,
            logits=slice(None),
            **options,
        )
        cache.keep([past], past, [torch.empty(0, dtype=torch.int64)])

    # A round's draft starts from the few rows that the last round left, not from the whole prompt.
    state = draft.start(output, context)
    root = int(context[0])
    tree = draft.propose(state, root, chain(1))
    step = target.forward(context[None, :1], **options)
    state = draft.commit(state, tree, torch.tensor([0]), step)
    plans = [StaticTree((width, *(1,) * (levels - 1))) for levels in range(1, depth + 1)]
    return Costs(
        sizes,
        [_median(partial(verify, size)) for size in sizes],
        [_median(partial(draft.propose, state, root, plan)) for plan in plans],
    )


def _median(action: Callable[[], object]) -> float:
    seconds: list[float] = []
    for _ in range(REPEATS + 1):
        begin = now()
        action()
        seconds.append(now() - begin)
    return statistics.median(seconds[1:])  # the first one warms up
