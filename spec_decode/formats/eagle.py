"""What the formats of EAGLE-1 share: fc and one layer without an input norm; the head is the target's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from spec_decode.drafters.eagle import EagleConfig
from spec_decode.formats.layout import ServedTarget, whole_vocabulary
from spec_decode.formats.llama import read_llama, write_llama

_LAYER = (
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "post_attention_layernorm.weight",
)


def write_eagle(layout: str, config: EagleConfig, target: ServedTarget, architecture: str) -> dict[str, Any]:
    """config.json; raises DraftwrightError for a draft vocabulary, which has no place there."""
    whole_vocabulary(layout, config)
    written = {"architectures": [architecture], **write_llama(config, target)}
    return {key: value for key, value in written.items() if key != "draft_vocab_size"}


def read_eagle(config: dict[str, Any], tensors: Mapping[str, Tensor], layers: tuple[int, ...] | None) -> EagleConfig:
    """The draft's config; EAGLE-1 reads the target's last state alone, so there are no layers to choose."""
    return EagleConfig(**read_llama({key: value for key, value in config.items() if key != "draft_vocab_size"}))


def stored(config: dict[str, Any], draft: EagleConfig) -> dict[str, str]:
    """Our name and the file's, of each tensor. fc has a bias unless config.json says otherwise (SafeAILab's rule)."""
    fc = ["weight", "bias"] if config.get("bias", True) else ["weight"]
    return {f"midlayer.fc.{name}": f"fc.{name}" for name in fc} | {
        f"midlayer.{name}": f"layers.0.{name}" for name in _LAYER
    }
