"""`eagle3_decode`: the tokens of plain decoding, and arguments that can't be right, on a tiny random Llama in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from spec_decode.decode import eagle3_decode, plain_decode
from spec_decode.drafters.eagle3 import Eagle3Config, Eagle3Draft
from spec_decode.target_hf import HFTarget
from spec_decode.tree import DynamicTree, StaticTree, TreePlan

CONTEXT = 96
PROMPT = [5, 17, 33, 2, 48, 9]


@pytest.fixture(scope="module")
def target(exact_target: Callable[..., HFTarget]) -> HFTarget:
    return exact_target()


@pytest.fixture(scope="module")
def eagle(target: HFTarget) -> Eagle3Draft:
    torch.manual_seed(0)
    config = Eagle3Config.for_target(target.spec, target_layers=(1, 2, 3), draft_vocab_size=40)
    draft = Eagle3Draft(config).double()
    draft.set_vocabulary(torch.arange(40) + 12)
    return draft


@pytest.mark.parametrize("tree", [[1, 1, 1], [4, 3, 2], DynamicTree(4, 4, 12), StaticTree((2,))], ids=str)
def test_eagle3_greedy_output_is_that_of_plain_decoding(
    target: HFTarget, eagle: Eagle3Draft, tree: TreePlan | list[int]
) -> None:
    for prompt in (PROMPT, [3], [9] * (CONTEXT - 6)):
        expected = plain_decode(target, prompt, max_new_tokens=24).tokens
        assert eagle3_decode(target, eagle, prompt, tree=tree, max_new_tokens=24).tokens == expected


def test_prompts_may_be_tensors(target: HFTarget, eagle: Eagle3Draft) -> None:
    options: dict[str, Any] = {"tree": [2, 1], "max_new_tokens": 5}
    expected = eagle3_decode(target, eagle, PROMPT, **options).tokens
    assert eagle3_decode(target, eagle, torch.tensor(PROMPT), **options).tokens == expected
    assert eagle3_decode(target, eagle, torch.tensor([PROMPT]), **options).tokens == expected


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"target": nn.Linear(1, 1)}, TypeError, "target must be .*HFTarget.*, not Linear"),
        ({"draft": nn.Linear(1, 1)}, TypeError, "draft must be an Eagle3Draft, not Linear"),
        ({"input_ids": "hello"}, TypeError, "input_ids must be .*, not str"),
        ({"input_ids": [1.0, 2.0]}, TypeError, "input_ids must be .*, not list"),
        ({"input_ids": torch.tensor([1.0])}, TypeError, "input_ids .* torch.float32 tensor of shape"),
        ({"input_ids": torch.ones(2, 3, dtype=torch.int64)}, TypeError, r"input_ids .* shape \[2, 3\]"),
        ({"tree": 4}, TypeError, "tree must be .*, not int"),
        ({"tree": [2.0]}, TypeError, "tree must be .*, not list"),
        ({"tree": [2, 0]}, ValueError, "static tree needs"),
        ({"sampling": 0.7}, TypeError, "sampling must be a Sampling, not float"),
        ({"eos_token_ids": 2}, TypeError, "eos_token_ids must be .*, not int"),
        ({"max_new_tokens": 4.0}, TypeError, "max_new_tokens must be an int, not float"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be at least 1, got 0"),
        ({"input_ids": []}, ValueError, "input_ids must hold 1 to 96 tokens .*, got 0"),
        ({"input_ids": [1] * 97}, ValueError, "input_ids must hold 1 to 96 tokens .*, got 97"),
        ({"input_ids": [1, 64]}, ValueError, "input_ids must lie in 0 to 63"),
        ({"input_ids": [-1]}, ValueError, "input_ids must lie in 0 to 63"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(
    target: HFTarget, eagle: Eagle3Draft, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments = {"target": target, "draft": eagle, "input_ids": PROMPT, "tree": [2, 1], "max_new_tokens": 4} | change
    with pytest.raises(error, match=message):
        eagle3_decode(**arguments)
