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
from spec_decode.formats.layout import Layout, ServedTarget, refuse, whole_vocabulary
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
    whole_vocabulary("vllm", config)
    if config.mask_token is None:
        advice = "train it with draft.mask_token=ID, a token of the target that chats don't hold"
        raise refuse("vllm", "a mask of its own", advice)
    if config.shifted:
        raise refuse("vllm", "shifted=true", "train it with draft.shifted=false")
    return {
        "architectures": [ARCHITECTURE],
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
    refuse_others(config, {"model_type": "qwen3", "is_causal": False})
    own = config.get("dflash_config") or {}
    refuse_others(own, {"use_swa": False, "attention_sink_bias": False, "sample_from_anchor": False})
    for key, value in (("mask_token_id", own.get("mask_token_id")), ("block_size", config.get("block_size"))):
        if value is None:
            raise DraftwrightError(f"config.json lacks {key}, without which a DFlash draft can't be read")
    ids = [layer + 1 for layer in own.get("target_layer_ids") or []]
    if not (layers or ids):
        raise DraftwrightError("config.json names no target layers: pass those it was trained with, target_layers=[…]")
    return BlockConfig(
        **read_llama(config | {"model_type": "llama", "num_hidden_layers": 1}),
        target_layers=tuple(layers or ids),
        num_layers=config.get("num_hidden_layers", 1),
        num_drafts=config["block_size"] - 1,
        causal=bool(own.get("causal")),
        mask_token=own["mask_token_id"],
    )


def stored(config: dict[str, Any], draft: BlockConfig) -> dict[str, str]:
    """Our name and the file's, of each tensor: the same."""
    names = ["fc.weight", "hidden_norm.weight", "norm.weight"]
    names += [f"layers.{index}.{name}" for index in range(draft.num_layers) for name in _LAYER]
    return {name: name for name in names}


LAYOUT = Layout("vllm", BlockDraft, write, read, stored, embeddings=eagle3.EMBEDDINGS)
