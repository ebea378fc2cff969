"""Medusa heads: what they compute at first, what they propose, and that the output stays the target's."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from spec_decode.decode import plain_decode, speculative_decode
from spec_decode.drafters import load_draft
from spec_decode.drafters.medusa import MedusaConfig, MedusaDraftModel, MedusaHead
from spec_decode.sampling import Sampling
from spec_decode.toy import MultiLayerCausalLM
from spec_decode.tree import DynamicTree, StaticTree, TreePlan

PROMPT = [5, 17, 3, 2, 28, 9]
VOCAB = 32


@pytest.fixture(scope="module")
def target() -> MultiLayerCausalLM:
    return MultiLayerCausalLM(vocab_size=VOCAB, max_positions=48)


@pytest.fixture
def medusa() -> MedusaDraftModel:
    torch.manual_seed(0)
    return MedusaDraftModel(MedusaConfig(16, VOCAB, num_heads=3, num_layers=2)).double()


def test_a_head_is_its_linear_layer_at_first() -> None:
    head = MedusaHead(16, VOCAB, num_layers=3)
    hidden = torch.randn(2, 5, 16)
    assert len(head.blocks) == 3
    assert all(float(block.linear.weight.detach().abs().sum()) == 0 for block in head.blocks)  # type: ignore[union-attr,operator]
    torch.testing.assert_close(head(hidden), hidden @ head.lm_head.weight.T)


def test_a_block_adds_silu_of_its_linear_layer() -> None:
    head = MedusaHead(4, 7, num_layers=1)
    linear = head.blocks[0].linear
    torch.nn.init.normal_(linear.weight)  # type: ignore[union-attr,arg-type]
    hidden = torch.randn(3, 4)
    expected = (hidden + F.silu(linear(hidden))) @ head.lm_head.weight.T  # type: ignore[operator]
    torch.testing.assert_close(head(hidden), expected)


def test_heads_started_from_the_target_give_its_logits(target: MultiLayerCausalLM, medusa: MedusaDraftModel) -> None:
    medusa.init_head(target.head_weight())
    hidden = torch.randn(5, 16, dtype=torch.float64)
    for logits in medusa(hidden):
        torch.testing.assert_close(logits, target.head(hidden))


def test_a_static_tree_is_the_product_of_the_heads_best(medusa: MedusaDraftModel) -> None:
    state = torch.randn(16, dtype=torch.float64)
    tree = medusa.propose(state, 7, StaticTree((3, 2, 2)))
    best = [logits.topk(width).indices.tolist() for logits, width in zip(medusa(state), (3, 2, 2), strict=True)]
    mask = tree.ancestor_mask()
    found = {tuple(tree.tokens[mask[node]].tolist()[1:]) for node in range(len(tree)) if tree.depth()[node] == 3}
    assert found == set(product(*best))
    assert len(tree) == 1 + 3 + 6 + 12


def test_plans_deeper_than_the_heads_are_cut(medusa: MedusaDraftModel) -> None:
    state = torch.randn(16, dtype=torch.float64)
    assert medusa.propose(state, 7, StaticTree((1,) * 9)).depth().max() == 3
    assert medusa.propose(state, 7, DynamicTree(9, 4, 30)).depth().max() == 3


@pytest.mark.parametrize("plan", [StaticTree((1, 1, 1)), StaticTree((3, 2, 2)), DynamicTree(3, 4, 12)], ids=str)
def test_greedy_output_is_that_of_plain_decoding(
    target: MultiLayerCausalLM, medusa: MedusaDraftModel, plan: TreePlan
) -> None:
    for prompt in (PROMPT, [3], [9] * 45):
        expected = plain_decode(target, prompt, max_new_tokens=20).tokens
        assert speculative_decode(target, medusa, prompt, tree=plan, max_new_tokens=20).tokens == expected


def test_right_heads_are_accepted(target: MultiLayerCausalLM, medusa: MedusaDraftModel) -> None:
    """Heads made to know the greedy continuation at one place are accepted there: head i predicts x[t+2+i]."""
    tokens = plain_decode(target, PROMPT, max_new_tokens=5).tokens
    hidden = target.forward(torch.tensor([PROMPT]), last_hidden=True).last_hidden
    assert hidden is not None
    with torch.no_grad():
        for index, head in enumerate(medusa.medusa):
            head.lm_head.weight.zero_()  # type: ignore[union-attr,operator]
            head.lm_head.weight[tokens[1 + index]] = hidden[0, -1]  # type: ignore[union-attr,index]
    got = speculative_decode(target, medusa, PROMPT, tree=StaticTree((1, 1, 1)), max_new_tokens=5)
    assert got.accepted[0] == 3
    assert got.tokens == tokens


def test_a_folder_gives_the_same_heads_back(tmp_path: Path, medusa: MedusaDraftModel) -> None:
    medusa.save_pretrained(tmp_path / "draft", readme="three heads\n")
    loaded = load_draft(tmp_path / "draft").double()
    hidden = torch.randn(16, dtype=torch.float64)
    assert isinstance(loaded, MedusaDraftModel)
    assert loaded.config == medusa.config
    assert torch.equal(loaded(hidden), medusa(hidden))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("16", VOCAB, 1), TypeError, "hidden_size must be an int, not str"),
        ((16, 32.0, 1), TypeError, "vocab_size must be an int, not float"),
        ((16, VOCAB, None), TypeError, "num_layers must be an int, not NoneType"),
        ((16, VOCAB, True), TypeError, "num_layers must be an int, not bool"),
        ((0, VOCAB, 1), ValueError, "hidden_size must be at least 1, got 0"),
        ((16, VOCAB, -1), ValueError, "num_layers must be at least 0, got -1"),
    ],
)
def test_wrong_arguments_of_a_head_are_named(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MedusaHead(*arguments)


def test_wrong_arguments_of_the_model_are_named(target: MultiLayerCausalLM, medusa: MedusaDraftModel) -> None:
    with pytest.raises(TypeError, match="config must be a MedusaConfig, not dict"):
        MedusaDraftModel({"hidden_size": 16})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="num_heads must be an int, not float"):
        MedusaConfig(16, VOCAB, num_heads=2.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="hidden must be a tensor"):
        medusa([1.0] * 16)
    with pytest.raises(TypeError, match="hidden must be a tensor"):
        MedusaHead(16, VOCAB)([1.0] * 16)
    other = MedusaDraftModel(MedusaConfig(8, VOCAB, target="other"))
    with pytest.raises(ValueError, match="trained for target 'other' with hidden size 8, but target 'toy' has 16"):
        speculative_decode(target, other, PROMPT, tree=[1], max_new_tokens=2)


def test_sampled_siblings_of_heads_keep_the_distribution(chi_square: Any) -> None:
    """The second and third token of 2,500 answers on five tokens, against exact probabilities."""
    target = MultiLayerCausalLM(vocab_size=5, num_layers=2, std=0.2)
    torch.manual_seed(0)
    medusa = MedusaDraftModel(MedusaConfig(16, 5, num_heads=2)).double()
    pairs = torch.tensor([[1, 2, first, second] for first in range(5) for second in range(5)])
    logits = target.forward(pairs, logits=slice(1, None)).logits
    assert logits is not None
    p = logits.softmax(-1).view(5, 5, 3, 5)  # [first, second, place, token]
    joint = p[0, 0, 0][:, None, None] * p[:, 0, 1][:, :, None] * p[:, :, 2]
    expected = 2500 * joint.sum(0)
    counts = torch.zeros(5, 5, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2500):
        tree = StaticTree((3, 2), siblings="without_replacement")
        result = speculative_decode(
            target, medusa, [1, 2], tree=tree, max_new_tokens=3, sampling=Sampling(1.0), generator=generator
        )
        counts[tuple(result.tokens[1:])] += 1
    chi_square(counts, expected)
