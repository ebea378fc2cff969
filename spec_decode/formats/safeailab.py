"""EAGLE's own code (SafeAILab/EAGLE, eagle/model/cnets.py and cnets1.py), as yuhuili/EAGLE3-* and EAGLE-* are stored.

It captures hidden states 2, n//2 and n-3 whatever config.json says, knows no norms but EAGLE-3's, and of rotary
scalings none with its own base.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from spec_decode.drafters.eagle import EagleConfig, EagleDraft
from spec_decode.drafters.eagle3 import Eagle3Config, Eagle3Draft
from spec_decode.feature_drafter import FeatureDraftConfig
from spec_decode.formats import eagle, eagle3
from spec_decode.formats.layout import Layout, ServedTarget, refuse

_ARCHITECTURE = "LlamaForCausalLM"
_INSTEAD = "use format=vllm or format=sglang"


def write_eagle3(config: Eagle3Config, tensors: Mapping[str, Tensor], target: ServedTarget) -> dict[str, Any]:
    """config.json of an EAGLE-3 draft that EAGLE's code computes right."""
    for norm in eagle3.NORMS:
        if getattr(config, norm):
            raise refuse("safeailab", f"{norm}=true", _INSTEAD)
    layers = target.spec.num_layers
    if config.target_layers != (2, layers // 2, layers - 3):
        raise refuse("safeailab", f"target_layers={list(config.target_layers)}, not 2, n//2 and n-3", _INSTEAD)
    _refuse_scaling(config)
    written = eagle3.write_eagle3("safeailab", config, target, _ARCHITECTURE)
    return {key: value for key, value in written.items() if key not in eagle3.NORMS} | {"pad_token_id": 0}


def read_eagle3(config: dict[str, Any], tensors: Mapping[str, Tensor], layers: tuple[int, ...] | None) -> Eagle3Config:
    """The draft's config."""
    if chosen := eagle3.target_layers(config, layers):
        return eagle3.read_eagle3(Eagle3Config, config, chosen)
    raise eagle3.no_layers()


def write_eagle(config: EagleConfig, tensors: Mapping[str, Tensor], target: ServedTarget) -> dict[str, Any]:
    """config.json of an EAGLE-1 draft that EAGLE's code computes right."""
    if config.num_heads * config.head_dim != config.hidden_size:
        raise refuse("safeailab", f"{config.num_heads} heads of {config.head_dim}", "use format=sglang")
    _refuse_scaling(config)
    return eagle.write_eagle("safeailab", config, target, _ARCHITECTURE) | {"pad_token_id": 0}


def _refuse_scaling(config: FeatureDraftConfig) -> None:
    kind = config.rope_parameters.get("rope_type", "default")
    if kind != "default":
        raise refuse("safeailab", f"rotary positions of type {kind}", _INSTEAD)


LAYOUTS = (
    Layout(
        "safeailab",
        Eagle3Draft,
        write_eagle3,
        read_eagle3,
        eagle3.stored,
        embeddings=eagle3.EMBEDDINGS,
        renamed=eagle3.OTHER_NAMES,
    ),
    Layout(
        "safeailab",
        EagleDraft,
        write_eagle,
        eagle.read_eagle,
        eagle.stored,
        embeddings=eagle3.EMBEDDINGS,
        stores_embeddings=True,
    ),
)
