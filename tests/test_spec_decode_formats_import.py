"""Files of servers as others write them: what is read from them, and what is wrong with them named in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from drafts_to_serve import IDS, V, dflash, dspark, eagle, eagle3, medusa, p_eagle
from torch import Tensor

from spec_decode.errors import DraftwrightError
from spec_decode.formats import export_draft, import_draft
from spec_decode.formats.layout import ServedTarget
from spec_decode.target import Target


@pytest.fixture(scope="module")
def target(exact_target: Callable[..., Target]) -> Target:
    return exact_target(num_layers=8)


@pytest.fixture(scope="module")
def served(target: Target) -> ServedTarget:
    return ServedTarget(target.spec, "org/model", "LlamaForCausalLM", lambda: target.embed(torch.arange(V)))


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
