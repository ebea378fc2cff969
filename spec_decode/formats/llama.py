"""The keys of a Llama's config.json that all EAGLE formats share, to a draft's config and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spec_decode.errors import DraftwrightError
from spec_decode.feature_drafter import FeatureDraftConfig
from spec_decode.formats.layout import ServedTarget, note

# Our field -> key of config.json, and what transformers' LlamaConfig takes where the key is missing.
_KEYS: dict[str, tuple[str, Any]] = {
    "hidden_size": ("hidden_size", 4096),
    "intermediate_size": ("intermediate_size", 11008),
    "num_heads": ("num_attention_heads", 32),
    "vocab_size": ("vocab_size", 32000),
    "rms_norm_eps": ("rms_norm_eps", 1e-6),
    "max_positions": ("max_position_embeddings", 2048),
}
# What a draft of ours has no choice in.
_FIXED: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}


def write_llama(config: FeatureDraftConfig, target: ServedTarget) -> dict[str, Any]:
    """Sizes, rotary positions in the form that every version of transformers reads, and the target's positions."""
    eos = list(target.spec.eos_token_ids)
    return {
        **_FIXED,
        **{key: getattr(config, field) for field, (key, _) in _KEYS.items()},
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        **write_rope(config.rope_parameters),
        "max_position_embeddings": target.spec.max_positions,
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
    }


def read_llama(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a `FeatureDraftConfig`; raises DraftwrightError naming a key whose value our drafts can't have."""
    refuse_others(config, _FIXED | {"target_hidden_size": config.get("hidden_size", 4096)})
    if "sliding_attention" in (config.get("layer_types") or []):
        raise DraftwrightError("config.json has sliding_attention in layer_types, which no draft of Draftwright has")
    fields = {field: config.get(key, default) for field, (key, default) in _KEYS.items()}
    heads = fields["num_heads"]
    return {
        **fields,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or fields["hidden_size"] // heads,
        "draft_vocab_size": config.get("draft_vocab_size") or fields["vocab_size"],
        "rope_parameters": read_rope(config),
        "target": note(config, "target"),
        "tokenizer": note(config, "tokenizer"),
    }


def refuse_others(config: Mapping[str, Any], allowed: Mapping[str, Any]) -> None:
    """Raise DraftwrightError naming the first key that is there, isn't null and has another value than allowed."""
    for key, value in allowed.items():
        if config.get(key) not in (None, value):
            raise DraftwrightError(
                f"config.json has {key}={config[key]}, which a draft of Draftwright can't hold (only {value})"
            )


def write_rope(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """transformers' `rope_parameters` as the older pair of keys, which version 5 reads as well."""
    scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
    scaled = scaling.get("rope_type", "default") != "default"
    return {"rope_theta": parameters["rope_theta"], "rope_scaling": scaling if scaled else None}


def read_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Either form as `rope_parameters`."""
    given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
    theta = given.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    return {"rope_theta": theta, "rope_type": kind, **given}
