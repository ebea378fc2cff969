"""Formats of servers: what is written equals lists written by hand, what is read back is the same draft, and what one
side can't hold is refused by name. Consumers: SGLang 0.5.23, vLLM 0.32, speculators 0.9, SafeAILab/EAGLE, Medusa."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from spec_decode.decode import speculative_decode
from spec_decode.drafter import VocabularyDrafter
from spec_decode.drafters.block import BlockConfig, BlockDraft
from spec_decode.drafters.dspark import DSparkConfig, DSparkDraft
from spec_decode.drafters.eagle import EagleConfig, EagleDraft
from spec_decode.drafters.eagle3 import Eagle3Config, Eagle3Draft
from spec_decode.drafters.hydra import HydraConfig, HydraDraft
from spec_decode.drafters.medusa import MedusaConfig, MedusaDraftModel
from spec_decode.drafters.mtp import MtpConfig, MtpDraft
from spec_decode.drafters.p_eagle import PEagleConfig, PEagleDraft
from spec_decode.errors import DraftwrightError
from spec_decode.formats import FORMATS, export_draft, import_draft
from spec_decode.formats.layout import Files, ServedTarget
from spec_decode.target import Target
from spec_decode.tree import StaticTree
from train.settings import Format

V = 64  # the target's vocabulary
LLAMA3 = {
    "rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


@pytest.fixture(scope="module")
def target(exact_target: Callable[..., Target]) -> Target:
    return exact_target(num_layers=8)


@pytest.fixture(scope="module")
def served(target: Target) -> ServedTarget:
    return ServedTarget(target.spec, "org/model", "LlamaForCausalLM", lambda: target.embed(torch.arange(V)))


def _random(draft: VocabularyDrafter) -> Any:
    """No weight, norm or bias at its start, so that a swapped or forgotten one shows."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.2 if parameter.dim() > 1 else 1.0))
    return draft


def eagle3(target: Target, **changes: Any) -> Eagle3Draft:
    options = {"draft_vocab_size": 40, "tokenizer": "abc", "intermediate_size": 48, "num_kv_heads": 2} | changes
    draft = Eagle3Draft(Eagle3Config.for_target(target.spec, **options))
    draft.set_vocabulary(torch.arange(draft.config.draft_vocab_size) + (V - draft.config.draft_vocab_size) // 2)
    return _random(draft)


def eagle(target: Target, **changes: Any) -> EagleDraft:
    return _random(
        EagleDraft(EagleConfig.for_target(target.spec, **{"intermediate_size": 48, "tokenizer": "abc"} | changes))
    )


def medusa(target: Target, **changes: Any) -> MedusaDraftModel:
    options = {"num_heads": 3, "num_layers": 2, "tokenizer": "abc"} | changes
    return _random(MedusaDraftModel(MedusaConfig.for_target(target.spec, **options)))


def dflash(target: Target, **changes: Any) -> BlockDraft:
    options = {"num_layers": 2, "num_drafts": 4, "mask_token": 7, "intermediate_size": 48, "num_kv_heads": 2}
    return _random(BlockDraft(BlockConfig.for_target(target.spec, **options | {"tokenizer": "abc"} | changes)))


def dspark(target: Target, **changes: Any) -> DSparkDraft:
    options = {"num_layers": 2, "num_drafts": 4, "mask_token": 7, "intermediate_size": 48, "num_kv_heads": 2}
    options |= {"markov_rank": 6, "tokenizer": "abc"}
    return _random(DSparkDraft(DSparkConfig.for_target(target.spec, **options | changes)))


def p_eagle(target: Target, **changes: Any) -> PEagleDraft:
    options = {"num_layers": 3, "num_drafts": 6, "mask_token": 7, "intermediate_size": 48, "num_kv_heads": 2}
    options |= {"draft_vocab_size": 40, "tokenizer": "abc"}
    draft = PEagleDraft(PEagleConfig.for_target(target.spec, **options | changes))
    draft.set_vocabulary(torch.arange(draft.config.draft_vocab_size) + (V - draft.config.draft_vocab_size) // 2)
    return _random(draft)


def no_bias(draft: VocabularyDrafter) -> Any:
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if name.endswith(".bias"):
                parameter.zero_()
    return draft


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


def test_bad_dflash_files_are_named(target: Target, served: ServedTarget) -> None:
    files = export_draft(dflash(target), "vllm", served)
    own = files.config["dflash_config"]
    for config, sentence in (
        ({"dflash_config": own | {"use_swa": True}}, "use_swa=True"),
        ({"dflash_config": own | {"sample_from_anchor": True}}, "sample_from_anchor=True"),
        ({"dflash_config": {"target_layer_ids": [1]}}, "lacks mask_token_id"),
        ({"block_size": None}, "lacks block_size"),
        ({"dflash_config": {"mask_token_id": 7}}, "names no target layers"),
        ({"model_type": "llama"}, "model_type=llama"),
        ({"layer_types": ["sliding_attention"]}, "sliding_attention"),
        ({"dflash_config": own | {"attention_value_scale": 0.5}}, "attention_value_scale=0.5"),
        ({"is_neox_style": False}, "is_neox_style=False"),
        ({"num_hidden_layers": 3}, "lacks the tensor 'layers.2."),
        ({"architectures": ["DFlash2DraftModel"]}, r"architectures=\[DFlash2DraftModel\]"),
    ):
        with pytest.raises(DraftwrightError, match=sentence):
            import_draft(files.config | config, files.tensors)
    with pytest.raises(DraftwrightError, match="'mask', which vllm's BlockDraft has no place for"):
        import_draft(files.config, files.tensors | {"mask": torch.zeros(32)})


def test_layers_and_mask_are_found_where_vllm_looks_first(target: Target, served: ServedTarget) -> None:
    """get_eagle3_aux_layers_from_config, get_parallel_drafting_token_id and _dflash_layer_causal of vLLM 0.32."""
    for draft in (dflash(target), dspark(target)):
        files = export_draft(draft, "vllm", served)
        own = files.config["dflash_config"]
        at_the_top = {"dflash_config": None, "mask_token_id": 9, "target_layer_ids": [0, 1, 2], "is_causal": True}
        for config, expected in (
            (at_the_top, ((1, 2, 3), 9, True)),
            (at_the_top | {"dflash_config": own}, ((2, 4, 5), 7, True)),
            ({IDS: [1, 2, 6]}, ((1, 2, 6), 7, False)),
            ({"is_causal": False, "dflash_config": own | {"causal": True}}, ((2, 4, 5), 7, False)),
        ):
            read: Any = import_draft(files.config | config, files.tensors)[0].config
            assert (read.target_layers, read.mask_token, read.causal) == expected


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


def test_dspark_files_of_others(target: Target, served: ServedTarget) -> None:
    draft = dspark(target).to(torch.bfloat16)
    files = export_draft(draft, "vllm", served)
    without = {name: tensor for name, tensor in files.tensors.items() if "confidence" not in name}
    read: Any = import_draft(files.config | {"enable_confidence_head": False}, without)[0]
    assert torch.equal(read.confidence, torch.zeros(38, dtype=torch.bfloat16))
    del files.config["sample_from_anchor"]
    assert import_draft(files.config, files.tensors)[0].config == draft.config
    for config, sentence in (
        ({"markov_head_type": "rnn"}, "markov_head_type=rnn"),
        ({"markov_rank": None}, "lacks markov_rank"),
        ({"dspark_draft_topk": 8}, "dspark_draft_topk=8"),
        ({"confidence_head_with_markov": None}, "confidence_head_with_markov=False"),
        ({"markov_rank": 5}, r"'markov_head.markov_w1.weight' has shape \[64, 6\].* \[64, 5\]"),
        ({"enable_confidence_head": False}, "'confidence_head.proj.weight', which vllm's DSparkDraft has no place for"),
    ):
        with pytest.raises(DraftwrightError, match=sentence):
            import_draft(files.config | config, files.tensors)
    with pytest.raises(DraftwrightError, match=r"lacks the tensor 'confidence_head.proj.bias'"):
        import_draft(files.config, without)
    with pytest.raises(DraftwrightError, match=r"'confidence_head.proj.bias' has shape \[2\], and a bias has \[1\]"):
        import_draft(files.config, files.tensors | {"confidence_head.proj.bias": torch.zeros(2)})
    with pytest.raises(DraftwrightError, match=r"'lm_head.weight', which vllm's DSparkDraft has no place for"):
        import_draft(files.config, files.tensors | {"lm_head.weight": torch.zeros(64, 32)})


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


def test_p_eagle_files_of_others(target: Target, served: ServedTarget) -> None:
    """speculators' mask_hidden has three dimensions, SGLang's name of the architecture is also vLLM's."""
    draft = p_eagle(target)
    files = export_draft(draft, "vllm", served)
    config = files.config | {"architectures": ["LlamaForCausalLMEagle3"], "draftwright": None}
    tensors = files.tensors | {"mask_hidden": files.tensors["mask_hidden"].view(1, 1, 96)}
    tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    back, name = import_draft(config, tensors)
    assert name == "vllm"
    assert back.config == replace(draft.config, num_drafts=4, target="", tokenizer="")
    for key, tensor in draft.state_dict().items():
        assert torch.equal(tensor, back.state_dict()[key]), key
    read: Any = import_draft(config | {"mask_token_id": 9}, tensors)[0].config
    assert read.mask_token == 9  # vLLM takes it before pard_token
    for change, sentence in (
        ({"pard_token": None}, "lacks pard_token"),
        ({"pard_token": V}, "mask_token 64 is no token of the target"),
        ({"eagle_config": None, IDS: None}, "names no target layers"),
        ({"num_hidden_layers": 2}, "'layers.2.* which vllm's PEagleDraft has no place for"),
    ):
        with pytest.raises(DraftwrightError, match=sentence):
            import_draft(config | change, tensors)
    with pytest.raises(DraftwrightError, match=r"'embed_tokens.weight', which vllm's PEagleDraft has no place for"):
        import_draft(config, tensors | {"embed_tokens.weight": served.embeddings()})
    with pytest.raises(DraftwrightError, match=r"'mask_hidden' has shape \[64\].* \[96\]"):
        import_draft(config, tensors | {"mask_hidden": torch.zeros(1, 1, 64)})


SIZES = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "num_hidden_layers": 1, "hidden_act": "silu", "max_position_embeddings": 96,
    "vocab_size": 64, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
IDS = "eagle_aux_hidden_state_layer_ids"


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


Change = Callable[[dict[str, Any], dict[str, Tensor]], Any]
BAD_FILES: dict[str, tuple[str, Change, str]] = {
    "an unknown tensor": ("vllm", lambda c, t: t.update(x=torch.zeros(1)), "'x', which vllm's Eagle3Draft"),
    "a bias": (
        "sglang",
        lambda c, t: t.update({"midlayer.self_attn.q_proj.bias": torch.zeros(32)}),
        "'midlayer.self_attn.q_proj.bias', which sglang's Eagle3Draft has no place for",
    ),
    "a missing tensor": ("vllm", lambda c, t: t.pop("norm.weight"), "lacks the tensor 'norm.weight'"),
    "a missing map": ("vllm", lambda c, t: t.pop("d2t"), "lacks the tensor 'd2t'"),
    "no fc": ("vllm", lambda c, t: t.pop("fc.weight"), "lacks the tensor 'fc.weight'"),
    "a wrong shape": (
        "sglang",
        lambda c, t: t.update({"norm.weight": torch.zeros(31)}),
        r"'norm.weight' has shape \[31\].* \[32\]",
    ),
    "two layers": ("sglang", lambda c, t: c.update(num_hidden_layers=2), "num_hidden_layers=2"),
    "another activation": ("vllm", lambda c, t: c.update(hidden_act="gelu"), "hidden_act=gelu"),
    "a Qwen layer": ("vllm", lambda c, t: c.update(model_type="qwen3"), "model_type=qwen3"),
    "a norm that isn't there": (
        "vllm", lambda c, t: c.update(norm_before_fc=True), "lacks the tensor 'input_norm.weight'",
    ),
    "a wider target": ("vllm", lambda c, t: c.update(target_hidden_size=64), "target_hidden_size=64"),
    "a window": ("vllm", lambda c, t: c.update(layer_types=["sliding_attention"]), "sliding_attention"),
    "trained embeddings": ("speculators", lambda c, t: c.update(embed_requires_grad=True), "embed_requires_grad=True"),
    "a rotary type": ("vllm", lambda c, t: c.update(rope_scaling={"type": "yarn", "factor": 2}), "rope type 'yarn'"),
    "no heads": ("vllm", lambda c, t: c.update(num_attention_heads=0, head_dim=None), "can't be right"),
    "a word for a size": ("vllm", lambda c, t: c.update(intermediate_size="big"), "can't be right"),
    "another drafter of speculators": (
        "speculators", lambda c, t: c.update(speculators_model_type="dflash"), "speculators_model_type=dflash",
    ),
    "an unknown architecture": ("vllm", lambda c, t: c.update(architectures=["Bert"]), r"architectures=\[Bert\]"),
    "a draft of ours": ("vllm", lambda c, t: c.update(drafter="eagle3.Eagle3Draft"), "a draft of Draftwright already"),
    "ids for offsets": ("vllm", lambda c, t: t["d2t"].add_(torch.arange(40)), "'d2t' doesn't name distinct tokens"),
    "another t2d": ("vllm", lambda c, t: t["t2d"].logical_not_(), "'d2t' and 't2d' name different tokens"),
    "SGLang's layers": (
        "sglang",
        lambda c, t: c.pop("draftwright"),
        r"ids=\[1, 3, 4\], which SGLang and SpecForge mean as hidden states \[2, 4, 5\] and vLLM as \[1, 3, 4\]",
    ),
    "no layers": ("safeailab", lambda c, t: c.pop("draftwright"), r"names no target layers.* target_layers=\[…\]"),
    "no layers in vllm": (
        "vllm", lambda c, t: [c.pop(key) for key in ("draftwright", "eagle_config", IDS)], "names no target layers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_named(case: str, target: Target, served: ServedTarget) -> None:
    name, change, sentence = BAD_FILES[case]
    files = export_draft(eagle3(target), name, served)
    tensors = {key: tensor.clone() for key, tensor in files.tensors.items()}
    change(files.config, tensors)
    with pytest.raises(DraftwrightError, match=sentence) as refused:
        import_draft(files.config, tensors)
    assert "\n" not in str(refused.value)


def test_layers_can_be_chosen(target: Target, served: ServedTarget) -> None:
    for name in ("vllm", "sglang", "speculators", "safeailab"):
        files = export_draft(eagle3(target), name, served)
        del files.config["draftwright"]
        draft: Any = import_draft(files.config, files.tensors, (1, 2, 3))[0]
        assert draft.taps == (1, 2, 3)
        with pytest.raises(DraftwrightError, match=r"'fc.weight' has shape \[32, 96\].* \[32, 64\]"):
            import_draft(files.config, files.tensors, (1, 2))
    for name in ("vllm", "speculators"):  # these two say it beyond doubt
        files = export_draft(eagle3(target), name, served)
        del files.config["draftwright"]
        draft = import_draft(files.config, files.tensors)[0]
        assert (draft.taps, draft.config.tokenizer) == ((2, 4, 5), "")
    assert draft.config.target == "org/model"


def test_files_as_others_write_them(target: Target, served: ServedTarget) -> None:
    """ModelOpt's: layers.0, tokens by frequency and no t2d. SpecForge's: with the target's embeddings."""
    draft = eagle3(target)
    files = export_draft(draft, "sglang", served)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    tensors = {
        name.replace("midlayer.", "layers.0."): tensor for name, tensor in files.tensors.items() if name != "t2d"
    }
    tensors["d2t"] = draft.vocabulary()[order] - torch.arange(40)
    tensors["lm_head.weight"] = draft.lm_head.weight.detach()[order]
    tensors["embed_tokens.weight"] = served.embeddings()
    back, _ = import_draft(files.config, tensors)
    for key, tensor in draft.state_dict().items():
        assert torch.equal(tensor, back.state_dict()[key]), key


def test_a_reordered_whole_vocabulary_is_not_taken_for_the_identity(target: Target, served: ServedTarget) -> None:
    draft = eagle3(target, draft_vocab_size=V)
    files = export_draft(draft, "sglang", served)
    order = torch.arange(V).flip(0)
    tensors = files.tensors | {"d2t": order - torch.arange(V), "lm_head.weight": draft.lm_head.weight.detach()[order]}
    back, _ = import_draft(files.config, tensors)
    assert torch.equal(back.state_dict()["lm_head.weight"], draft.lm_head.weight)


def test_a_missing_norm_is_read_as_the_consumer_does(target: Target, served: ServedTarget) -> None:
    """vLLM takes a missing norm_before_residual for true in speculators' files and for false elsewhere."""
    for name, normed in (("speculators", True), ("vllm", False), ("sglang", False)):
        files = export_draft(eagle3(target), name, served)
        files.config.pop("norm_before_residual", None)
        draft: Any = import_draft(files.config, files.tensors)[0]
        assert draft.config.norm_before_residual is normed


def test_eagle_heads_with_and_without_bias(target: Target, served: ServedTarget) -> None:
    files = export_draft(eagle(target), "safeailab", served)
    bias = files.tensors.pop("fc.bias")
    with pytest.raises(DraftwrightError, match=r"lacks the tensor 'fc.bias'"):
        import_draft(files.config, files.tensors)
    without, _ = import_draft(files.config | {"bias": False}, files.tensors)
    assert not without.state_dict()["midlayer.fc.bias"].any()
    with pytest.raises(DraftwrightError, match=r"has the tensor 'fc.bias'"):
        import_draft(files.config | {"bias": False}, files.tensors | {"fc.bias": bias})


def test_medusa_heads_as_published(target: Target, served: ServedTarget) -> None:
    files = export_draft(medusa(target), "medusa", served)
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
    draft: Any = import_draft(config, files.tensors)[0]  # fewer heads than there are, as in FasterDecoding's files
    assert (draft.config.num_heads, draft.config.num_layers, draft.config.target) == (3, 2, "lmsys/vicuna-7b-v1.3")
    legacy = {name: tensor for name, tensor in files.tensors.items() if not name.endswith(".2.weight")}
    with pytest.raises(DraftwrightError, match=r"lack the tensor '0.2.weight'.*target's own head"):
        import_draft(config, legacy)
    files = export_draft(medusa(target), "vllm", served)
    prefixed = {f"medusa_heads.{name}": tensor for name, tensor in files.tensors.items()}
    assert import_draft(files.config, prefixed)[1] == "vllm"
    with pytest.raises(DraftwrightError, match="original_lm_head=True"):
        import_draft(files.config | {"original_lm_head": True}, files.tensors)
    with pytest.raises(DraftwrightError, match="'token_map'"):
        import_draft(files.config, files.tensors | {"token_map": torch.arange(3)})


def test_settings_know_every_format() -> None:
    assert get_args(Format) == tuple(FORMATS)
