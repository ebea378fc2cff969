"""DFlash as z-lab publishes it and vLLM serves it (vllm/model_executor/models/qwen3_dflash.py, read in 0.32).

Layers are Qwen3's; layer ids count layer outputs from 0, so they are lower by one than ours. The mask is a row of the
target's embeddings, and embeddings and head are the target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from spec_decode.drafters.block import BlockConfig, BlockDraft
from spec_decode.errors import DraftwrightError
from spec_decode.formats import eagle3
from spec_decode.formats.layout import MASK_ADVICE, Layout, ServedTarget, refuse, whole_vocabulary
from spec_decode.formats.llama import read_llama, refuse_others, write_llama

ARCHITECTURE = "DFlashDraftModel"
_LAYER = (
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"self_attn.{name}_norm.weight" for name in "qk"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    *(f"{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")),
)


def write(config: BlockConfig, tensors: Mapping[str, Tensor], target: ServedTarget) -> dict[str, Any]:
    """config.json; raises DraftwrightError for what has no place there: a learned mask, shifted labels, a part of the
    vocabulary."""
    if config.shifted:
        raise refuse("vllm", "shifted=true", "train it with draft.shifted=false")
    return write_block(config, target, ARCHITECTURE)


def write_block(config: BlockConfig, target: ServedTarget, architecture: str) -> dict[str, Any]:
    """What DFlash and DSpark share."""
    whole_vocabulary("vllm", config)
    if config.mask_token is None:
        raise refuse("vllm", "a mask of its own", MASK_ADVICE)
    return {
        "architectures": [architecture],
        **write_llama(config, target),
        "model_type": "qwen3",
        "num_hidden_layers": config.num_layers,
        "num_target_layers": target.spec.num_layers,
        "block_size": config.block_size,
        "dflash_config": {
            "mask_token_id": config.mask_token,
            "target_layer_ids": [layer - 1 for layer in config.target_layers],
            "causal": config.causal,
        },
    }


def read(config: dict[str, Any], tensors: Mapping[str, Tensor], layers: tuple[int, ...] | None) -> BlockConfig:
    """The draft's config."""
    return BlockConfig(**read_block(config, layers), num_drafts=config["block_size"] - 1)


def read_block(config: dict[str, Any], layers: tuple[int, ...] | None) -> dict[str, Any]:
    """The fields that DFlash and DSpark share; num_drafts isn't among them."""
    refuse_others(config, {"model_type": "qwen3", "is_neox_style": True, "logit_scale": 1})
    own = config.get("dflash_config") or {}
    plain = {"use_swa": False, "attention_sink_bias": False, "attention_value_scale": 1}
    refuse_others(own, plain | {"sample_from_anchor": False, "use_aux_hidden_state": True})
    whole = config | own  # published DSpark drafts have the keys of dflash_config at the top
    for key in ("mask_token_id", "block_size"):
        if whole.get(key) is None:
            raise DraftwrightError(f"config.json lacks {key}, without which a block draft can't be read")
    causal = own.get("causal") if config.get("is_causal") is None else config["is_causal"]
    # Ids under EAGLE-3's key, which vLLM looks for first, are hidden states already.
    ids = config.get(eagle3.IDS) or [layer + 1 for layer in whole.get("target_layer_ids") or []]
    if not (layers or ids):
        raise DraftwrightError("config.json names no target layers: pass those it was trained with, target_layers=[…]")
    return {
        **read_llama(config | {"model_type": "llama", "num_hidden_layers": 1}),
        "target_layers": tuple(layers or ids),
        "num_layers": config.get("num_hidden_layers", 1),
        "causal": bool(causal),
        "mask_token": whole["mask_token_id"],
    }


def stored(config: dict[str, Any], draft: BlockConfig) -> dict[str, str]:
    """Our name and the file's, of each tensor: the same."""
    names = ["fc.weight", "hidden_norm.weight", "norm.weight"]
    names += [f"layers.{index}.{name}" for index in range(draft.num_layers) for name in _LAYER]
    return {name: name for name in names}


LAYOUT = Layout("vllm", BlockDraft, write, read, stored, embeddings=eagle3.EMBEDDINGS)
