"""`leviathan_decode`: any causal LM or drafter proposes a chain, and the output stays the target's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from spec_decode.decode import leviathan_decode, plain_decode, speculative_decode
from spec_decode.drafters.eagle3 import Eagle3Config, Eagle3Draft
from spec_decode.drafters.leviathan import LanguageModelDraft
from spec_decode.drafters.medusa import MedusaConfig, MedusaDraftModel
from spec_decode.sampling import Sampling
from spec_decode.target import Target
from spec_decode.toy import BigramLM, MultiLayerCausalLM
from spec_decode.tree import DynamicTree, StaticTree, TreePlan

PROMPT = [5, 17, 3, 2, 28, 9]
VOCAB = 32


def bigram(seed: int, vocab: int = VOCAB, sharpness: float = 2.0) -> BigramLM:
    generator = torch.Generator().manual_seed(seed)
    return BigramLM((sharpness * torch.randn(vocab, vocab, dtype=torch.float64, generator=generator)).softmax(-1))


@pytest.fixture(scope="module")
def target() -> MultiLayerCausalLM:
    return MultiLayerCausalLM(vocab_size=VOCAB, max_positions=48)


def drafts(target: Target) -> dict[str, Any]:
    torch.manual_seed(0)
    eagle = Eagle3Draft(Eagle3Config.for_target(target.spec)).double()
    return {
        "itself": target,
        "another": MultiLayerCausalLM(vocab_size=VOCAB, num_layers=2, max_positions=48, seed=1),
        "shorter context": MultiLayerCausalLM(vocab_size=VOCAB, num_layers=2, max_positions=12, seed=1),
        "bigram": bigram(0),
        "eagle3": eagle,
        "medusa": MedusaDraftModel(MedusaConfig(16, VOCAB)).double(),
    }


@pytest.mark.parametrize("gamma", [1, 3, 6])
@pytest.mark.parametrize("name", ["itself", "another", "shorter context", "bigram", "eagle3", "medusa"])
def test_greedy_output_is_that_of_plain_decoding(target: MultiLayerCausalLM, name: str, gamma: int) -> None:
    for prompt in (PROMPT, [3], [9] * 44, [1] * 48):
        expected = plain_decode(target, prompt, max_new_tokens=20).tokens
        got = leviathan_decode(target, drafts(target)[name], prompt, gamma=gamma, max_new_tokens=20)
        assert got.tokens == expected
        assert max(got.offered, default=0) <= gamma


def test_a_draft_that_is_the_target_is_always_accepted(target: MultiLayerCausalLM) -> None:
    for sampling in (Sampling(), Sampling(1.0)):
        got = leviathan_decode(target, target, PROMPT, gamma=4, max_new_tokens=21, sampling=sampling)
        assert got.accepted == [4] * 4
        assert got.tau == 5.0


def test_a_round_of_the_draft_runs_what_was_committed_then_the_chain(target: MultiLayerCausalLM) -> None:
    draft = MultiLayerCausalLM(vocab_size=VOCAB, num_layers=2, max_positions=48)
    forward, widths = draft.forward, []

    def spying(ids: torch.Tensor, **options: Any) -> Any:
        widths.append(ids.shape[1])
        return forward(ids, **options)

    draft.forward = spying  # type: ignore[method-assign]
    got = leviathan_decode(target, draft, PROMPT, gamma=3, max_new_tokens=16)
    assert widths[0] == len(PROMPT)
    rounds = [widths[1 + 3 * i : 4 + 3 * i] for i in range(got.rounds)]
    assert [first for first, *_ in rounds] == [1, *(accepted + 1 for accepted in got.accepted[:-1])]
    assert all(rest == [1, 1] for _, *rest in rounds)


@pytest.mark.parametrize("plan", [StaticTree((3, 2, 2)), DynamicTree(3, 3, 9)], ids=str)
def test_a_language_model_also_grows_trees(target: MultiLayerCausalLM, plan: TreePlan) -> None:
    draft = LanguageModelDraft(drafts(target)["another"])
    expected = plain_decode(target, PROMPT, max_new_tokens=20).tokens
    assert speculative_decode(target, draft, PROMPT, tree=plan, max_new_tokens=20).tokens == expected
    itself = speculative_decode(target, LanguageModelDraft(target), PROMPT, tree=plan, max_new_tokens=20)
    # a dynamic tree leaves out even the likeliest path where its probability is small
    assert min(itself.accepted[:-1]) >= (3 if isinstance(plan, StaticTree) else 2)


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.8, top_k=4), Sampling(1.0, top_p=0.8)], ids=str)
@pytest.mark.parametrize("rule", ["top_k", "without_replacement", "independent"])
def test_sampled_output_passes_a_chi_square_test(rule: str, sampling: Sampling, chi_square: Any) -> None:
    """The second to fourth token of 2,500 answers against their exact probabilities: a child of the root, one of a
    child, and what follows a whole accepted path. A right decoder fails once in 10,000 seeds (a false alarm)."""
    target, draft = bigram(0, 5, 1.0), LanguageModelDraft(bigram(1, 5, 1.0))
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(5, 5, 5, dtype=torch.float64)
    for _ in range(2500):
        result = speculative_decode(
            target,
            draft,
            [0],
            tree=StaticTree((2, 1), siblings=rule),
            max_new_tokens=4,
            sampling=sampling,
            generator=generator,
        )
        counts[tuple(result.tokens[1:])] += 1
    p = torch.stack([bigram_row(target, token, sampling) for token in range(5)])
    expected = 2500 * (p[0] @ p)[:, None, None] * p[:, :, None] * p
    assert counts[expected == 0].sum() == 0
    chi_square(counts, expected)


def bigram_row(target: BigramLM, token: int, sampling: Sampling) -> torch.Tensor:
    """By hand: temperature, then top-k, then top-p."""
    p = target.head(target.embed(torch.tensor(token))).div(sampling.temperature).softmax(-1)
    order = p.argsort(descending=True)
    if sampling.top_k:
        p[order[sampling.top_k :]] = 0
        p = p / p.sum()
    mass = 0.0
    for place in order.tolist():
        if mass >= sampling.top_p:
            p[place] = 0
        mass += float(p[place])
    return p / p.sum()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"target": 3}, TypeError, "target must be a target such as HFTarget.*, not int"),
        ({"draft": nn.Linear(1, 1)}, TypeError, "draft must be a Drafter, or a target such as HFTarget.*, not Linear"),
        ({"gamma": 2.0}, TypeError, "gamma must be an int, not float"),
        ({"gamma": True}, TypeError, "gamma must be an int, not bool"),
        ({"gamma": 0}, ValueError, "gamma must be at least 1, got 0"),
        ({"input_ids": "hello"}, TypeError, "input_ids must be .*, not str"),
        ({"max_new_tokens": None}, TypeError, "max_new_tokens must be an int, not NoneType"),
        ({"sampling": 1.0}, TypeError, "sampling must be a Sampling, not float"),
        ({"draft": bigram(0, 5)}, ValueError, "'bigram' has a vocabulary of 5 tokens, but target 'toy' has 32"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(
    target: MultiLayerCausalLM, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments = {"target": target, "draft": target, "input_ids": PROMPT, "gamma": 2, "max_new_tokens": 4} | change
    with pytest.raises(error, match=message):
        leviathan_decode(**arguments)


def test_a_language_model_draft_needs_a_target() -> None:
    with pytest.raises(TypeError, match="model must be a target such as HFTarget"):
        LanguageModelDraft(nn.Linear(1, 1))  # type: ignore[arg-type]
