"""The tiny targets: what they compute, and that every drafter and decoder takes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spec_decode.decode import eagle3_decode, plain_decode
from spec_decode.drafters.eagle3 import Eagle3Config, Eagle3Draft
from spec_decode.target import default_taps
from spec_decode.toy import BigramLM, MultiLayerCausalLM

TABLE = torch.tensor([[0.0, 1.0, 0.0], [0.2, 0.3, 0.5], [0.6, 0.4, 0.0]], dtype=torch.float64)


def test_a_bigrams_logits_are_its_table() -> None:
    output = BigramLM(TABLE).forward(torch.tensor([[0, 1, 2]]), logits=slice(None), last_hidden=True, taps=(2, 3, 4))
    assert output.logits is not None
    assert output.features is not None
    torch.testing.assert_close(output.logits[0].softmax(-1), TABLE, rtol=0, atol=1e-15)
    assert output.features.shape == (1, 3, 9)
    assert torch.equal(output.features[..., :3], output.last_hidden)


def test_a_bigram_decodes_to_its_likeliest_tokens() -> None:
    assert plain_decode(BigramLM(TABLE), [0], max_new_tokens=4).tokens == [1, 2, 0, 1]
    assert plain_decode(BigramLM(TABLE, eos_token_ids=[2]), [0], max_new_tokens=4).tokens == [1, 2]


@pytest.mark.parametrize("target", [BigramLM(TABLE), MultiLayerCausalLM(vocab_size=3)], ids=["bigram", "transformer"])
def test_eagle3_drafts_for_it(target: Any) -> None:
    torch.manual_seed(0)
    draft = Eagle3Draft(Eagle3Config.for_target(target.spec)).double()
    expected = plain_decode(target, [0, 1], max_new_tokens=12).tokens
    assert eagle3_decode(target, draft, [0, 1], tree=[2, 2], max_new_tokens=12).tokens == expected


def test_hidden_states_are_those_of_every_layer() -> None:
    target = MultiLayerCausalLM()
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    states = target.hidden_states(ids)
    assert len(states) == 8
    assert all(state.shape == (1, 5, 16) for state in states)
    taps = default_taps(7)
    features = target.forward(ids, taps=taps).features
    assert features is not None
    assert torch.equal(torch.cat([states[tap] for tap in taps], dim=-1), features)
    last_hidden = target.forward(ids, last_hidden=True).last_hidden
    torch.testing.assert_close(target.model.base_model.norm(states[-1]), last_hidden)


def test_a_seed_fixes_the_transformer() -> None:
    before = torch.random.get_rng_state()
    assert MultiLayerCausalLM(seed=1).identity() == MultiLayerCausalLM(seed=1).identity()
    assert MultiLayerCausalLM(seed=1).identity() != MultiLayerCausalLM(seed=2).identity()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert BigramLM(TABLE).identity() != BigramLM(TABLE.roll(1, 0)).identity()


def test_the_transformer_is_fp64_throughout() -> None:
    target = MultiLayerCausalLM()
    ids = torch.arange(6)[None]
    whole = target.forward(ids, logits=slice(None)).logits
    cache = target.new_cache()
    for place in range(6):
        step = target.forward(ids[:, place : place + 1], cache=cache, logits=slice(None)).logits
        assert whole is not None
        torch.testing.assert_close(step[:, 0], whole[:, place], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: BigramLM([[1.0]]), TypeError, r"table must be a tensor \[V, V\] of probabilities, not list"),  # type: ignore[arg-type]
        (lambda: BigramLM(torch.ones(2, 3)), ValueError, r"table must be \[V, V\] of floats"),
        (lambda: BigramLM(torch.ones(2, 2)), ValueError, "every row sums to 1"),
        (lambda: BigramLM(torch.tensor([[2.0, -1.0], [0.5, 0.5]])), ValueError, "no entry below 0"),
        (lambda: MultiLayerCausalLM(vocab_size=3.0), TypeError, "vocab_size must be an int, not float"),  # type: ignore[arg-type]
        (lambda: MultiLayerCausalLM(num_layers=0), ValueError, "num_layers must be at least 1, got 0"),
        (lambda: MultiLayerCausalLM(hidden_size=6), ValueError, "hidden_size must be a multiple"),
        (lambda: BigramLM(TABLE, eos_token_ids=3), TypeError, "eos_token_ids must be a list of ints, not int"),  # type: ignore[arg-type]
        (lambda: BigramLM(TABLE, max_positions=0), ValueError, "max_positions must be at least 1, got 0"),
        (lambda: MultiLayerCausalLM(std=-1.0), ValueError, "std must be at least 0"),
        (lambda: MultiLayerCausalLM(std=True), TypeError, "std must be a number, not bool"),
        (lambda: MultiLayerCausalLM(seed="x"), TypeError, "seed must be an int, not str"),  # type: ignore[arg-type]
        (lambda: MultiLayerCausalLM().hidden_states([[1]]), TypeError, "ids must be an int64 tensor"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_named(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
