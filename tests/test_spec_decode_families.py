"""Targets of other families: taps, trees and greedy speculation agree with transformers, or one sentence refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen3Config,
)

from spec_decode.decode import eagle3_decode, plain_decode
from spec_decode.drafters.eagle3 import Eagle3Draft
from spec_decode.errors import DraftwrightError
from spec_decode.target_hf import HFTarget, TargetSource, open_target
from spec_decode.tree import Tree
from train.draft import build_draft

SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8, "num_attention_heads": 4,
    "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2}
WORK = {
    "llama": LlamaConfig(**GROUPED),
    "llama_tied": LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**GROUPED),
    "qwen3": Qwen3Config(**GROUPED, head_dim=16),
    "qwen3_tied": Qwen3Config(**GROUPED, head_dim=16, tie_word_embeddings=True),
    "mistral": MistralConfig(**GROUPED, sliding_window=None),
    "gemma": GemmaConfig(**GROUPED, head_dim=8),
    "phi3": Phi3Config(**GROUPED),
}
REFUSED = {
    "gemma2": (Gemma2Config(**GROUPED, head_dim=8), r"scales its logits \(final_logit_softcapping\)"),
    "gemma3": (Gemma3TextConfig(**GROUPED, head_dim=8), "has layers of the kind sliding_attention, whose cache"),
    "phi": (PhiConfig(**GROUPED), "is not Llama-like: its config has no rms_norm_eps; choose another model"),
    "gpt_neox": (GPTNeoXConfig(**SIZES), "is not Llama-like: its config has no num_key_value_heads; choose another"),
}


def _target(config: PreTrainedConfig) -> HFTarget:
    torch.manual_seed(0)
    return HFTarget(AutoModelForCausalLM.from_config(config).double(), config.model_type)


@pytest.fixture(scope="module", params=WORK)
def target(request: pytest.FixtureRequest) -> HFTarget:
    return _target(WORK[request.param])


def test_taps_are_the_hidden_states_of_transformers(target: HFTarget) -> None:
    ids = torch.randint(50, (2, 9))
    wanted = target.model(ids, output_hidden_states=True)
    output = target.forward(ids, taps=(2, 4, 5), logits=slice(None), last_hidden=True)
    torch.testing.assert_close(output.features, torch.cat([wanted.hidden_states[i] for i in (2, 4, 5)], dim=-1))
    torch.testing.assert_close(output.last_hidden, wanted.hidden_states[-1])
    torch.testing.assert_close(output.logits, wanted.logits)
    torch.testing.assert_close(target.embed(ids), wanted.hidden_states[0])


def test_each_path_of_a_tree_gets_the_logits_of_its_sequence(target: HFTarget) -> None:
    prompt = [5, 17, 33, 2]
    tree = Tree(torch.tensor([9, 3, 7, 11]), torch.tensor([-1, 0, 0, 1]))
    paths = {2: [9, 7], 3: [9, 3, 11]}
    cache = target.new_cache()
    target.forward(torch.tensor([prompt]), cache=cache)
    depth = torch.tensor([0, 1, 1, 2])
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool)
    output = target.forward(
        tree.tokens[None], cache=cache, positions=len(prompt) + depth[None], mask=mask, logits=slice(None)
    )
    for node, path in paths.items():
        wanted = target.model(torch.tensor([prompt + path])).logits[0, -1]
        torch.testing.assert_close(output.logits[0, node], wanted)


def test_greedy_speculation_gives_the_tokens_of_plain_decoding(target: HFTarget) -> None:
    draft = build_draft(Eagle3Draft, target, torch.arange(5, 45), "").double()
    expected = plain_decode(target, [5, 17, 33, 2], max_new_tokens=16).tokens
    assert len(expected) == 16
    for tree in ([1, 1, 1], [3, 2]):
        assert eagle3_decode(target, draft, [5, 17, 33, 2], tree=tree, max_new_tokens=16).tokens == expected


@pytest.mark.parametrize("family", REFUSED)
def test_others_are_refused_in_one_sentence(family: str) -> None:
    config, sentence = REFUSED[family]
    with pytest.raises(DraftwrightError, match=sentence):
        _target(config)


@pytest.mark.parametrize("shard", ["1GB", "20KB"])
@pytest.mark.parametrize("family", ["llama", "qwen3_tied"])
def test_weights_in_one_file_and_in_shards_open(
    family: str, shard: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_config(WORK[family])
    model.save_pretrained(tmp_path, max_shard_size=shard)
    tokenizer.save_pretrained(tmp_path)
    assert (len(list(tmp_path.glob("*.safetensors"))) == 1) == (shard == "1GB")
    opened, _ = open_target(TargetSource(path=str(tmp_path), device="cpu"))
    ids = torch.tensor([[5, 17, 33]])
    torch.testing.assert_close(opened.forward(ids, logits=slice(None)).logits, model.eval()(ids).logits)
