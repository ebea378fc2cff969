"""A batch gives every prompt the result that it has alone, and stops paying for sequences that have ended."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spec_decode.decode import batch_decode, plain_decode, speculative_decode
from spec_decode.drafter import Drafter
from spec_decode.drafters.eagle3 import Eagle3Config, Eagle3Draft
from spec_decode.drafters.leviathan import LanguageModelDraft
from spec_decode.drafters.medusa import MedusaConfig, MedusaDraftModel
from spec_decode.sampling import Sampling
from spec_decode.target import TargetOutput
from spec_decode.toy import BigramLM, MultiLayerCausalLM
from spec_decode.tree import DynamicTree, SparseTree, StaticTree, TreePlan

VOCAB, CONTEXT = 32, 48
PROMPTS = [[5, 17, 3, 2, 28, 9], [3], [9] * 44, list(range(20)), [1, 2], [7] * CONTEXT]
PLANS = [
    StaticTree((1, 1, 1)),
    StaticTree((3, 2)),
    DynamicTree(3, 3, 8),
    SparseTree(((0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 0))),
]


@pytest.fixture(scope="module")
def target() -> MultiLayerCausalLM:
    return MultiLayerCausalLM(vocab_size=VOCAB, max_positions=CONTEXT)


def drafter(name: str, target: MultiLayerCausalLM) -> Drafter:
    torch.manual_seed(0)
    if name == "eagle3":
        return Eagle3Draft(Eagle3Config.for_target(target.spec)).double()
    if name == "medusa":
        return MedusaDraftModel(MedusaConfig(16, VOCAB)).double()
    noisy = MultiLayerCausalLM(vocab_size=VOCAB, max_positions=CONTEXT)
    weight = noisy.head_weight()
    weight.add_(0.1 * torch.randn(weight.shape, dtype=weight.dtype))
    return LanguageModelDraft(noisy)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("name", ["eagle3", "medusa", "leviathan"])
def test_greedy_results_are_those_of_single_prompts(target: MultiLayerCausalLM, name: str, plan: TreePlan) -> None:
    draft = drafter(name, target)
    together = batch_decode(target, draft, PROMPTS, tree=plan, max_new_tokens=18)
    for prompt, got in zip(PROMPTS, together, strict=True):
        alone = speculative_decode(target, draft, prompt, tree=plan, max_new_tokens=18)
        assert (got.tokens, got.accepted, got.offered) == (alone.tokens, alone.accepted, alone.offered)
        assert got.tokens == plain_decode(target, prompt, max_new_tokens=18).tokens
    if name == "leviathan":
        assert len({tuple(result.accepted) for result in together}) > 3  # they do grow at their own pace


@pytest.mark.parametrize("rule", ["top_k", "without_replacement", "independent"])
@pytest.mark.parametrize("sparse", [False, True])
def test_sampled_results_are_those_of_single_prompts(target: MultiLayerCausalLM, rule: str, sparse: bool) -> None:
    draft, sampling = drafter("leviathan", target), Sampling(1.0, top_k=8)
    plan = SparseTree(((0,), (1,), (1, 0), (1, 1)), rule) if sparse else StaticTree((2, 2), rule)

    def generators() -> list[torch.Generator | None]:
        return [torch.Generator().manual_seed(seed) for seed in range(len(PROMPTS))]

    together = batch_decode(
        target, draft, PROMPTS, tree=plan, max_new_tokens=18, sampling=sampling, generators=generators()
    )
    for prompt, generator, got in zip(PROMPTS, generators(), together, strict=True):
        alone = speculative_decode(
            target, draft, prompt, tree=plan, max_new_tokens=18, sampling=sampling, generator=generator
        )
        assert (got.tokens, got.accepted) == (alone.tokens, alone.accepted)


def test_plain_results_are_those_of_single_prompts(target: MultiLayerCausalLM) -> None:
    together = batch_decode(target, None, PROMPTS, tree=[1], max_new_tokens=18)
    assert [got.tokens for got in together] == [
        plain_decode(target, prompt, max_new_tokens=18).tokens for prompt in PROMPTS
    ]
    assert all(set(got.accepted) <= {0} and got.draft_seconds == 0 for got in together)


def test_sequences_that_ended_leave_the_batch(target: MultiLayerCausalLM) -> None:
    free = [plain_decode(target, prompt, max_new_tokens=12).tokens for prompt in PROMPTS[:3]]
    eos = free[0][2]
    rows: list[int] = []
    forward = target.forward

    def spying(ids: Tensor, **options: Any) -> TargetOutput:
        rows.append(ids.shape[0])
        return forward(ids, **options)

    target.forward = spying  # type: ignore[method-assign]
    try:
        got = batch_decode(target, None, PROMPTS[:3], tree=[1], max_new_tokens=12, eos_token_ids=[eos])
    finally:
        del target.forward  # type: ignore[method-assign]
    lengths = [tokens.index(eos) + 1 if eos in tokens else len(tokens) for tokens in free]
    assert [len(result.tokens) for result in got] == lengths
    assert len(set(lengths)) > 1
    assert rows == [sum(length > done for length in lengths) for done in range(max(lengths))]


def test_a_batch_of_a_bigram_target() -> None:
    generator = torch.Generator().manual_seed(0)
    table = (2 * torch.randn(8, 8, dtype=torch.float64, generator=generator)).softmax(-1)
    target, draft = BigramLM(table), LanguageModelDraft(BigramLM(table.roll(1, 0)))
    prompts = [[1], [2, 3, 4], [5, 6]]
    together = batch_decode(target, draft, prompts, tree=[2, 2], max_new_tokens=9)
    assert [got.tokens for got in together] == [
        plain_decode(target, prompt, max_new_tokens=9).tokens for prompt in prompts
    ]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"target": nn.Linear(1, 1)}, TypeError, "target must be a target such as HFTarget"),
        ({"draft": nn.Linear(1, 1)}, TypeError, "draft must be a Drafter or None, not Linear"),
        ({"prompts": "hello"}, TypeError, "prompts must be a list of prompts, not str"),
        ({"prompts": [[1], "hello"]}, TypeError, r"prompts\[1\] must be .*, not str"),
        ({"prompts": [[1], []]}, ValueError, r"prompts\[1\] must hold 1 to 48 tokens"),
        ({"generators": [None]}, ValueError, "generators must be one for each of the 2 prompts, got 1"),
        ({"tree": 4}, TypeError, "tree must be .* or a tree file, not int"),
        ({"tree": "chain"}, ValueError, "the tree file chain can't be read"),
        ({"generators": 7}, TypeError, "generators must be a list of torch.Generators or None, not int"),
        ({"generators": [1, 2]}, TypeError, "generators must hold torch.Generators or None, not int"),
        ({"eos_token_ids": "</s>"}, TypeError, "eos_token_ids must be .*, not str"),
        ({"eos_token_ids": [2.0]}, TypeError, "eos_token_ids must hold ints, not float"),
        ({"prompts": [], "max_new_tokens": 0}, ValueError, "max_new_tokens must be at least 1"),
        ({"lossy": 0.3}, TypeError, "lossy must be a LossyTypicalAcceptance or None, not float"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(
    target: MultiLayerCausalLM, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments = {"target": target, "draft": None, "prompts": [[1], [2]], "tree": [1], "max_new_tokens": 3} | change
    with pytest.raises(error, match=message):
        batch_decode(**arguments)


def test_end_of_turn_may_be_a_tensor(target: MultiLayerCausalLM) -> None:
    free = plain_decode(target, [1, 2], max_new_tokens=9).tokens
    got = plain_decode(target, [1, 2], max_new_tokens=9, eos_token_ids=torch.tensor([free[3]]))
    assert got.tokens == free[: free.index(free[3]) + 1]


def test_no_prompts_no_results(target: MultiLayerCausalLM) -> None:
    assert batch_decode(target, None, [], tree=[1], max_new_tokens=3) == []
