"""Formats of servers: what is written equals lists written by hand, what is read back is the same draft, and what one
side can't hold is refused by name. Consumers: SGLang 0.5.23, vLLM 0.32, speculators 0.9, SafeAILab/EAGLE, Medusa."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from drafts_to_serve import IDS, LLAMA3, V, dflash, dspark, eagle, eagle3, medusa, no_bias, p_eagle
from transformers import LlamaConfig

from spec_decode.decode import speculative_decode
from spec_decode.drafters.hydra import HydraConfig, HydraDraft
from spec_decode.drafters.mtp import MtpConfig, MtpDraft
from spec_decode.errors import DraftwrightError
from spec_decode.formats import FORMATS, export_draft, import_draft
from spec_decode.formats.layout import Files, ServedTarget
from spec_decode.target import Target
from spec_decode.tree import StaticTree
from train.settings import Format


@pytest.fixture(scope="module")
def target(exact_target: Callable[..., Target]) -> Target:
    return exact_target(num_layers=8)


@pytest.fixture(scope="module")
def served(target: Target) -> ServedTarget:
    return ServedTarget(target.spec, "org/model", "LlamaForCausalLM", lambda: target.embed(torch.arange(V)))


DRAFTS: dict[str, tuple[str, Callable[[Target], Any]]] = {
    "vllm eagle3": ("vllm", eagle3),
    "vllm eagle3, four layers": ("vllm", lambda target: eagle3(target, target_layers=(1, 2, 3, 6))),
    "vllm eagle3.1": ("vllm", lambda target: eagle3(target, fc_norm=True, norm_output=True)),
    "vllm eagle3, all norms": (
        "vllm",
        lambda target: eagle3(target, fc_norm=True, norm_before_fc=True, norm_before_residual=True),
    ),
    "vllm eagle3, whole vocabulary": ("vllm", lambda target: eagle3(target, draft_vocab_size=V)),
    "vllm eagle3, llama3": ("vllm", lambda target: eagle3(target, rope_parameters=LLAMA3)),
    "vllm eagle without bias": ("vllm", lambda target: no_bias(eagle(target))),
    "vllm medusa": ("vllm", medusa),
    "vllm medusa without bias": ("vllm", lambda target: no_bias(medusa(target))),
    "vllm dflash": ("vllm", dflash),
    "vllm dflash, four causal layers": (
        "vllm",
        lambda target: dflash(target, causal=True, num_layers=4, target_layers=(1, 6), rope_parameters=LLAMA3),
    ),
    "vllm dspark": ("vllm", dspark),
    "vllm dspark, its anchor's slot unused": (
        "vllm",
        lambda target: dspark(target, shifted=False, causal=True, target_layers=(1, 6), rope_parameters=LLAMA3),
    ),
    "vllm dspark, a confidence with a bias": ("vllm", lambda target: dspark(target, confidence_bias=-0.5)),
    "vllm p_eagle": ("vllm", p_eagle),
    "vllm p_eagle, one layer, whole vocabulary": (
        "vllm",
        lambda target: p_eagle(target, num_layers=1, draft_vocab_size=V),
    ),
    "vllm p_eagle, all norms": (
        "vllm",
        lambda target: p_eagle(
            target, fc_norm=True, norm_before_fc=True, norm_before_residual=True, target_layers=(1, 2, 3, 6)
        ),
    ),
    "sglang eagle3": ("sglang", eagle3),
    "sglang eagle3, two layers": ("sglang", lambda target: eagle3(target, target_layers=(1, 7))),
    "sglang eagle3.1": ("sglang", lambda target: eagle3(target, fc_norm=True, norm_output=True)),
    "sglang eagle3, one norm before fc": ("sglang", lambda target: eagle3(target, norm_before_fc=True)),
    "sglang eagle3, llama3": ("sglang", lambda target: eagle3(target, rope_parameters=LLAMA3)),
    "sglang eagle": ("sglang", eagle),
    "speculators eagle3": ("speculators", eagle3),
    "speculators eagle3.1": ("speculators", lambda target: eagle3(target, fc_norm=True, norm_output=True)),
    "speculators eagle3, as speculators trains": (
        "speculators",
        lambda target: eagle3(target, norm_before_fc=True, norm_before_residual=True, norm_output=True),
    ),
    "speculators eagle3, whole vocabulary": ("speculators", lambda target: eagle3(target, draft_vocab_size=V)),
    "speculators eagle3, llama3": ("speculators", lambda target: eagle3(target, rope_parameters=LLAMA3)),
    "safeailab eagle3": ("safeailab", eagle3),
    "safeailab eagle3, whole vocabulary": ("safeailab", lambda target: eagle3(target, draft_vocab_size=V)),
    "safeailab eagle": ("safeailab", eagle),
    "medusa": ("medusa", medusa),
    "medusa without blocks": ("medusa", lambda target: medusa(target, num_layers=0)),
}


@pytest.mark.parametrize("case", DRAFTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_draft_comes_back_as_it_went(case: str, dtype: torch.dtype, target: Target, served: ServedTarget) -> None:
    name, make = DRAFTS[case]
    draft = make(target).to(dtype)
    files = export_draft(draft, name, served)
    assert files.config["torch_dtype"] == str(dtype).removeprefix("torch.")
    back, recognised = import_draft(files.config, files.tensors)
    assert (recognised, back.config) == (name, draft.config)
    assert type(back) is type(draft)
    ours, theirs = draft.state_dict(), back.state_dict()
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        assert torch.equal(tensor, theirs[key]), key
        assert tensor.dtype == theirs[key].dtype, key


@pytest.mark.parametrize("case", DRAFTS)
def test_a_draft_that_came_back_drafts_the_same(case: str, target: Target, served: ServedTarget) -> None:
    name, make = DRAFTS[case]
    draft = make(target)
    files = export_draft(draft, name, served)
    back, _ = import_draft(files.config, files.tensors)
    results = [
        speculative_decode(target, _bound(one, target), [5, 17, 33, 2], tree=StaticTree((3, 2, 1)), max_new_tokens=16)
        for one in (draft, back)
    ]
    assert results[0].tokens == results[1].tokens
    assert results[0].tau == results[1].tau


def _bound(draft: Any, target: Target) -> Any:
    draft = draft.double().eval()
    draft.bind(target)
    return draft


def _shapes(files: Files) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in files.tensors.items()}


def _layer(prefix: str, wide: int, kv: int = 16) -> dict[str, list[int]]:
    return {
        f"{prefix}.self_attn.q_proj.weight": [32, wide],
        f"{prefix}.self_attn.k_proj.weight": [kv, wide],
        f"{prefix}.self_attn.v_proj.weight": [kv, wide],
        f"{prefix}.self_attn.o_proj.weight": [32, 32],
        f"{prefix}.mlp.gate_proj.weight": [48, 32],
        f"{prefix}.mlp.up_proj.weight": [48, 32],
        f"{prefix}.mlp.down_proj.weight": [32, 48],
        f"{prefix}.post_attention_layernorm.weight": [32],
    }


def _eagle3_shapes(prefix: str) -> dict[str, list[int]]:
    return {
        "fc.weight": [32, 96],
        **_layer(prefix, 64),
        f"{prefix}.hidden_norm.weight": [32],
        f"{prefix}.input_layernorm.weight": [32],
        "norm.weight": [32],
        "lm_head.weight": [40, 32],
        "d2t": [40],
        "t2d": [64],
    }


@pytest.mark.parametrize("name", ["vllm", "sglang", "safeailab"])
def test_tensors_of_eagle3(name: str, target: Target, served: ServedTarget) -> None:
    files = export_draft(eagle3(target), name, served)
    assert files.weights == "model.safetensors"
    assert _shapes(files) == _eagle3_shapes("midlayer")
    assert (files.tensors["d2t"].dtype, files.tensors["t2d"].dtype) == (torch.int64, torch.bool)


def test_tensors_of_speculators(target: Target, served: ServedTarget) -> None:
    files = export_draft(eagle3(target), "speculators", served)
    assert _shapes(files) == _eagle3_shapes("layers.0") | {"embed_tokens.weight": [64, 32]}
    assert torch.equal(files.tensors["embed_tokens.weight"], served.embeddings().float())


@pytest.mark.parametrize("name", ["vllm", "sglang", "speculators"])
def test_tensors_of_eagle3_1(name: str, target: Target, served: ServedTarget) -> None:
    files = export_draft(eagle3(target, fc_norm=True, norm_output=True), name, served)
    more = {f"fc_norm.{i}.weight": [32] for i in range(3)}
    if name == "speculators":
        more |= {"embed_tokens.weight": [64, 32]}
    assert _shapes(files) == _eagle3_shapes("layers.0" if name == "speculators" else "midlayer") | more
    assert (files.config["fc_norm"], files.config["norm_output"]) == (True, True)


@pytest.mark.parametrize("name", ["vllm", "sglang", "speculators", "safeailab"])
def test_a_whole_vocabulary_has_no_map(name: str, target: Target, served: ServedTarget) -> None:
    """vLLM 0.32 refuses d2t where the vocabularies are of one size."""
    files = export_draft(eagle3(target, draft_vocab_size=V), name, served)
    assert not {"d2t", "t2d"} & files.tensors.keys()
    assert files.config["draft_vocab_size"] == V


def test_tensors_of_eagle(target: Target, served: ServedTarget) -> None:
    bare = {"fc.weight": [32, 64], **_layer("layers.0", 32, 8)}
    assert _shapes(export_draft(no_bias(eagle(target)), "vllm", served)) == bare
    assert _shapes(export_draft(eagle(target), "sglang", served)) == bare | {"fc.bias": [32]}
    files = export_draft(eagle(target), "safeailab", served)
    assert _shapes(files) == bare | {"fc.bias": [32], "embed_tokens.weight": [64, 32]}
    assert torch.equal(files.tensors["embed_tokens.weight"], served.embeddings().float())


def test_tensors_of_medusa(target: Target, served: ServedTarget) -> None:
    files = export_draft(medusa(target, num_heads=2), "medusa", served)
    assert files.weights == "medusa_lm_head.pt"
    assert _shapes(files) == {
        "0.0.linear.weight": [32, 32], "0.0.linear.bias": [32], "0.1.linear.weight": [32, 32], "0.1.linear.bias": [32],
        "0.2.weight": [64, 32],
        "1.0.linear.weight": [32, 32], "1.0.linear.bias": [32], "1.1.linear.weight": [32, 32], "1.1.linear.bias": [32],
        "1.2.weight": [64, 32],
    }  # fmt: skip
    own = {"medusa_num_heads": 2, "medusa_num_layers": 2, "base_model_name_or_path": "org/model", "version": "2"}
    assert own.items() <= files.config.items()

    files = export_draft(medusa(target, num_heads=2), "vllm", served)
    assert _shapes(files) == {
        "blocks.0.layers.0.weight": [32, 32], "blocks.0.layers.0.bias": [32], "blocks.0.layers.1.weight": [32, 32],
        "blocks.0.layers.1.bias": [32], "lm_heads.0.weight": [64, 32],
        "blocks.1.layers.0.weight": [32, 32], "blocks.1.layers.0.bias": [32], "blocks.1.layers.1.weight": [32, 32],
        "blocks.1.layers.1.bias": [32], "lm_heads.1.weight": [64, 32],
    }  # fmt: skip
    own = {
        "model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": 32, "vocab_size": 64, "num_heads": 2,
        "num_hidden_layers": 2, "max_paths": 64, "topk": 10, "truncated_vocab_size": 64, "medusa_fc_bias": True,
        "original_lm_head": False,
    }  # fmt: skip
    assert own.items() <= files.config.items()
    plain = export_draft(no_bias(medusa(target)), "vllm", served)
    assert plain.config["medusa_fc_bias"] is False
    assert not any("bias" in name for name in plain.tensors)


def _block_shapes() -> dict[str, list[int]]:
    layers: dict[str, list[int]] = {}
    for index in (0, 1):
        prefix = f"layers.{index}"
        norms = {f"{prefix}.self_attn.{name}_norm.weight": [8] for name in "qk"}
        layers |= _layer(prefix, 32) | norms | {f"{prefix}.input_layernorm.weight": [32]}
    return layers | {"fc.weight": [32, 96], "hidden_norm.weight": [32], "norm.weight": [32]}


def test_tensors_of_dflash(target: Target, served: ServedTarget) -> None:
    files = export_draft(dflash(target), "vllm", served)
    assert _shapes(files) == _block_shapes()
    assert {key: files.config[key] for key in SIZES} == SIZES | {"model_type": "qwen3", "num_hidden_layers": 2}
    assert files.config["architectures"] == ["DFlashDraftModel"]
    assert (files.config["block_size"], files.config["num_target_layers"]) == (5, 8)
    # hidden_states[2], [4] and [5] are the outputs of layers 1, 3 and 4.
    assert files.config["dflash_config"] == {"mask_token_id": 7, "target_layer_ids": [1, 3, 4], "causal": False}


def test_tensors_of_dspark(target: Target, served: ServedTarget) -> None:
    draft = dspark(target, confidence_bias=0.25)
    files = export_draft(draft, "vllm", served)
    heads = {
        "markov_head.markov_w1.weight": [64, 6], "markov_head.markov_w2.weight": [64, 6],
        "confidence_head.proj.weight": [1, 38], "confidence_head.proj.bias": [1],
    }  # fmt: skip
    assert _shapes(files) == _block_shapes() | heads
    assert torch.equal(files.tensors["markov_head.markov_w1.weight"], draft.markov_head.embed_tokens.weight)
    assert files.tensors["confidence_head.proj.bias"].item() == 0.25
    own = {
        "architectures": ["Qwen3DSparkModel"], "num_target_layers": 8, "block_size": 4, "sample_from_anchor": True,
        "markov_rank": 6, "markov_head_type": "vanilla", "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 3, 4], "causal": False},
    }  # fmt: skip
    assert files.config | SIZES | own | {"model_type": "qwen3", "num_hidden_layers": 2} == files.config
    bonus = export_draft(dspark(target, shifted=False), "vllm", served).config
    assert (bonus["block_size"], bonus["sample_from_anchor"]) == (5, False)


def test_tensors_of_p_eagle(target: Target, served: ServedTarget) -> None:
    """Layers behind the first are ordinary ones: vLLM never uses their hidden_norm."""
    files = export_draft(p_eagle(target), "vllm", served)
    later = [_layer(f"layers.{i}", 32) | {f"layers.{i}.input_layernorm.weight": [32]} for i in (1, 2)]
    assert _shapes(files) == _eagle3_shapes("layers.0") | later[0] | later[1] | {"mask_hidden": [96]}
    own = {
        "architectures": ["Eagle3LlamaForCausalLM"], "num_hidden_layers": 3, "pard_token": 7, "draft_vocab_size": 40,
        IDS: [2, 4, 5], "eagle_config": {"use_aux_hidden_state": True, IDS: [2, 4, 5]},
        "norm_before_residual": False,
    }  # fmt: skip
    assert files.config | SIZES | own == files.config
    assert files.config["draftwright"]["num_drafts"] == 6


SIZES = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "num_hidden_layers": 1, "hidden_act": "silu", "max_position_embeddings": 96,
    "vocab_size": 64, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip


def test_config_of_each_consumer(target: Target, served: ServedTarget) -> None:
    """hidden_states[2], [4] and [5] in each one's numbering; positions are the target's 96, not the draft's 7."""
    draft = eagle3(target, max_positions=7)
    configs = {name: export_draft(draft, name, served).config for name in ("vllm", "sglang", "safeailab")}
    for config in configs.values():
        assert SIZES.items() <= config.items()
        assert config["draft_vocab_size"] == 40
    assert configs["vllm"]["architectures"] == ["Eagle3LlamaForCausalLM"]
    assert configs["vllm"]["eagle_config"] == {"use_aux_hidden_state": True, IDS: [2, 4, 5]}
    assert configs["vllm"][IDS] == [2, 4, 5]  # the only place where vLLM's V2 runner looks
    assert configs["sglang"]["architectures"] == ["LlamaForCausalLMEagle3"]
    assert configs["sglang"]["eagle_config"] == {"use_aux_hidden_state": True, IDS: [1, 3, 4]}
    assert configs["safeailab"]["architectures"] == ["LlamaForCausalLM"]
    assert not {"eagle_config", "fc_norm", "norm_output", "norm_before_fc"} & configs["safeailab"].keys()

    config = export_draft(draft, "speculators", served).config
    assert SIZES.items() <= config["transformer_layer_config"].items()
    assert config[IDS] == [2, 4, 5]
    assert config["tie_word_embeddings"] is config["norm_before_residual"] is config["norm_before_fc"] is False
    assert config["speculators_config"] == {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"proposal_type": "greedy", "speculative_tokens": 4, "verifier_accept_k": 1, "accept_tolerance": 0.0}
        ],
        "verifier": {"name_or_path": "org/model", "architectures": ["LlamaForCausalLM"]},
    }
    for name, architecture in (("vllm", "EagleLlamaForCausalLM"), ("sglang", "LlamaForCausalLMEagle")):
        assert export_draft(no_bias(eagle(target)), name, served).config["architectures"] == [architecture]
    assert export_draft(no_bias(eagle(target)), "vllm", served).config["bias"] is False
    # In SGLang the key would give attention a bias; SafeAILab takes a missing one for true.
    assert all("bias" not in export_draft(eagle(target), name, served).config for name in ("sglang", "safeailab"))


@pytest.mark.parametrize(
    "rope", [LLAMA3, {"rope_theta": 1e5, "rope_type": "linear", "factor": 2.0}, {"rope_theta": 1e5}]
)
def test_transformers_reads_the_rotary_parameters(rope: dict[str, Any], target: Target, served: ServedTarget) -> None:
    draft = eagle3(target, rope_parameters=rope)
    for name in ("vllm", "sglang", "speculators"):
        config = export_draft(draft, name, served).config
        layer = config.get("transformer_layer_config", config)
        assert LlamaConfig(**layer).rope_parameters == {"rope_type": "default", **rope}
        newer = {key: value for key, value in layer.items() if not key.startswith("rope_")}
        for form in (layer, newer | {"rope_parameters": rope}):
            read, _ = import_draft(
                config | ({"transformer_layer_config": form} if layer is not config else form),
                export_draft(draft, name, served).tensors,
            )
            assert read.config.rope_parameters == {"rope_type": "default", **rope}


REFUSED: dict[str, tuple[str, Callable[[Target], Any], str]] = {
    "linear fusion in vllm": ("vllm", lambda t: eagle3(t, fusion="linear"), "vllm can't hold .* fusion=linear"),
    "linear fusion in sglang": ("sglang", lambda t: eagle3(t, fusion="linear"), "fusion=linear"),
    "linear fusion in speculators": ("speculators", lambda t: eagle3(t, fusion="linear"), "fusion=linear"),
    "linear fusion in safeailab": ("safeailab", lambda t: eagle3(t, fusion="linear"), "fusion=linear"),
    "fc_norm in safeailab": ("safeailab", lambda t: eagle3(t, fc_norm=True), "fc_norm=true"),
    "norm_output in safeailab": ("safeailab", lambda t: eagle3(t, norm_output=True), "norm_output=true"),
    "a normed residual in safeailab": (
        "safeailab", lambda t: eagle3(t, norm_before_residual=True), "norm_before_residual=true",
    ),
    "a normed residual in sglang": (
        "sglang", lambda t: eagle3(t, norm_before_residual=True), "norm_before_residual=true: use format=vllm",
    ),
    "two norms before fc in speculators": (
        "speculators", lambda t: eagle3(t, fc_norm=True, norm_before_fc=True), "both fc_norm and norm_before_fc",
    ),
    "other layers in safeailab": (
        "safeailab", lambda t: eagle3(t, target_layers=(1, 2, 3)), r"target_layers=\[1, 2, 3\]",
    ),
    "llama3 in safeailab": ("safeailab", lambda t: eagle3(t, rope_parameters=LLAMA3), "positions of type llama3"),
    "llama3 in safeailab's eagle": ("safeailab", lambda t: eagle(t, rope_parameters=LLAMA3), "of type llama3"),
    "wide heads in safeailab's eagle": ("safeailab", lambda t: eagle(t, head_dim=16), "4 heads of 16"),
    "a bias in vllm's eagle": ("vllm", eagle, "the tensor midlayer.fc.bias"),
    "a draft vocabulary in eagle": ("sglang", lambda t: eagle(t, draft_vocab_size=40), "draft vocabulary of 40 tokens"),
    "a draft vocabulary in vllm's medusa": ("vllm", lambda t: medusa(t, draft_vocab_size=40), "vocabulary of 40"),
    "a draft vocabulary in medusa": ("medusa", lambda t: medusa(t, draft_vocab_size=40), "vocabulary of 40"),
    "medusa in sglang": ("sglang", medusa, "format=sglang has no place for .* MedusaDraftModel: choose format=vllm"),
    "eagle in speculators": ("speculators", eagle, "choose format=vllm or format=sglang or format=safeailab"),
    "hydra": (
        "vllm",
        lambda t: HydraDraft(HydraConfig.for_target(t.spec)),
        "format=vllm has no place for drafts of the class HydraDraft: Draftwright writes no server's format",
    ),
    "mtp": ("vllm", lambda t: MtpDraft(MtpConfig.for_target(t.spec)), "MtpDraft: Draftwright .* train eagle3"),
    "p-eagle's own mask": ("vllm", lambda t: p_eagle(t, mask_token=None), "a mask of its own: .* draft.mask_token=ID"),
    "p-eagle with linear fusion": ("vllm", lambda t: p_eagle(t, fusion="linear"), "fusion=linear"),
    "p-eagle in speculators": ("speculators", p_eagle, "class PEagleDraft: choose format=vllm"),
    "dspark's own mask": ("vllm", lambda t: dspark(t, mask_token=None), "a mask of its own: .* draft.mask_token=ID"),
    "dspark that drafts now and then": (
        "vllm", lambda t: dspark(t, confidence_threshold=0.5), "confidence_threshold=0.5: set it to 0 in .* config",
    ),
    "a draft vocabulary in dspark": ("vllm", lambda t: dspark(t, draft_vocab_size=40), "draft vocabulary of 40"),
    "dspark in sglang": ("sglang", dspark, "class DSparkDraft: choose format=vllm"),
    "dflash's own mask": ("vllm", lambda t: dflash(t, mask_token=None), "a mask of its own: .* draft.mask_token=ID"),
    "dflash with shifted labels": ("vllm", lambda t: dflash(t, shifted=True), "draft.shifted=false"),
    "a draft vocabulary in dflash": ("vllm", lambda t: dflash(t, draft_vocab_size=40), "draft vocabulary of 40"),
    "dflash in sglang": ("sglang", dflash, "class BlockDraft: choose format=vllm"),
    "another target's draft": ("vllm", lambda t: eagle3(t, hidden_size=16), "hidden size 16"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_consumer_cannot_hold_is_refused_by_name(case: str, target: Target, served: ServedTarget) -> None:
    name, make, sentence = REFUSED[case]
    with pytest.raises(DraftwrightError, match=sentence) as refused:
        export_draft(make(target), name, served)
    assert "\n" not in str(refused.value)


def test_settings_know_every_format() -> None:
    assert get_args(Format) == tuple(FORMATS)
