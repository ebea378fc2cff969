"""What the formats of EAGLE-3 share: SGLang, vLLM and SafeAILab differ in little more than layer numbers.

Ours are Hugging Face's (hidden_states[j], the output of layer j - 1), which are vLLM's and speculators' too. SGLang
and SpecForge count layer outputs from 0, so theirs are lower by one under the same key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from spec_decode.drafters.eagle3 import Eagle3Config
from spec_decode.errors import DraftwrightError
from spec_decode.formats.layout import VOCABULARY, ServedTarget, note, refuse
from spec_decode.formats.llama import read_llama, refuse_others, write_llama

Config = TypeVar("Config", bound=Eagle3Config)

IDS = "eagle_aux_hidden_state_layer_ids"
EMBEDDINGS = "embed_tokens.weight"
OTHER_NAMES = {"layers.0.": "midlayer."}  # ModelOpt's and newer SGLang's

NORMS = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")  # false where a key is missing
_LAYER = (
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    *(f"{name}.weight" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")),
)


def write_eagle3(layout: str, config: Eagle3Config, target: ServedTarget, architecture: str) -> dict[str, Any]:
    """Everything but the layer ids. Raises DraftwrightError for the paper's written fusion, which nobody reads."""
    if config.fusion != "split":
        raise refuse(layout, f"fusion={config.fusion}", "train it with draft.fusion=split")
    norms = {norm: getattr(config, norm) for norm in NORMS}
    return {"architectures": [architecture], **write_llama(config, target), **norms}


def read_eagle3(kind: type[Config], config: Mapping[str, Any], layers: Sequence[int], **more: Any) -> Config:
    """The draft's config, once its target layers are known. more: fields of those that build on EAGLE-3."""
    refuse_others(config, {"embed_requires_grad": False})
    eagle_config = config.get("eagle_config") or {}
    refuse_others(eagle_config, {"use_aux_hidden_state": True})
    norms: dict[str, Any] = {norm: bool(config.get(norm)) for norm in NORMS}
    norms["fc_norm"] |= bool(config.get("use_aux_norm"))  # SGLang's older name
    norms["norm_before_fc"] |= bool(eagle_config.get("norm_before_fc"))
    return kind(**read_llama(config), target_layers=tuple(layers), **norms, **more)


def layer_ids(config: Mapping[str, Any]) -> list[int] | None:
    """The ids that a config.json names, in whatever numbering."""
    return config.get(IDS) or (config.get("eagle_config") or {}).get(IDS)


def target_layers(config: Mapping[str, Any], chosen: Sequence[int] | None) -> Sequence[int] | None:
    """The layers that are beyond doubt: those that the user chose, or those that an export of ours noted."""
    return chosen or note(config, "target_layers", None)


def no_layers() -> DraftwrightError:
    """The error for a file without ids, whose consumer guesses them from the target's depth."""
    return DraftwrightError(
        "config.json names no target layers; who reads it takes hidden states 2, n//2 and n-3 of a target of n "
        "layers: if the draft was trained so, pass these as target_layers=[…]"
    )


def stored(config: dict[str, Any], draft: Eagle3Config) -> dict[str, str]:
    """Our name and the file's, of each tensor; a whole vocabulary needs no map, and vLLM refuses one."""
    names = ["fc.weight", "norm.weight", "lm_head.weight"]
    names += [f"midlayer.{name}" for name in _LAYER]
    names += ["input_norm.weight"] if draft.norm_before_fc else []
    names += [f"fc_norm.{i}.weight" for i in range(len(draft.target_layers))] if draft.fc_norm else []
    names += VOCABULARY if draft.draft_vocab_size != draft.vocab_size else []
    return {name: name for name in names}
