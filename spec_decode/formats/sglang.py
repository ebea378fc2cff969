"""SGLang (python/sglang/srt/models/llama_eagle3.py and llama_eagle.py).

It skips tensors of unknown names without a word, so a wrong name there means random weights: names and shapes are
what matters. Layer ids count layer outputs from 0. Embeddings, and EAGLE-1's head, come from the target.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from spec_decode.drafters.eagle import EagleConfig, EagleDraft
from spec_decode.drafters.eagle3 import Eagle3Config, Eagle3Draft
from spec_decode.errors import DraftwrightError
from spec_decode.formats import eagle, eagle3
from spec_decode.formats.layout import Layout, ServedTarget, refuse


def write_eagle3(config: Eagle3Config, tensors: Mapping[str, Tensor], target: ServedTarget) -> dict[str, Any]:
    """config.json of an EAGLE-3 draft; SGLang's residual is always the state itself."""
    if config.norm_before_residual:
        raise refuse("sglang", "norm_before_residual=true", "use format=vllm or format=speculators")
    ids = [layer - 1 for layer in config.target_layers]
    written = eagle3.write_eagle3("sglang", config, target, "LlamaForCausalLMEagle3")
    return {**written, "eagle_config": {"use_aux_hidden_state": True, eagle3.IDS: ids}}


def read_eagle3(config: dict[str, Any], tensors: Mapping[str, Tensor], layers: tuple[int, ...] | None) -> Eagle3Config:
    """The draft's config. vLLM serves the same files with its own numbering, so ids from elsewhere are ambiguous."""
    if chosen := eagle3.target_layers(config, layers):
        return eagle3.read_eagle3(Eagle3Config, config, chosen)
    if not (ids := eagle3.layer_ids(config)):
        raise eagle3.no_layers()
    raise DraftwrightError(
        f"config.json has {eagle3.IDS}={ids}, which SGLang and SpecForge mean as hidden states "
        f"{[i + 1 for i in ids]} and vLLM as {ids}: pass those that the draft was trained with as target_layers=[…]"
    )


def write_eagle(config: EagleConfig, tensors: Mapping[str, Tensor], target: ServedTarget) -> dict[str, Any]:
    """config.json of an EAGLE-1 draft. SGLang's fc always has a bias; the key `bias` would mean the attention's."""
    return eagle.write_eagle("sglang", config, target, "LlamaForCausalLMEagle")


LAYOUTS = (
    Layout(
        "sglang",
        Eagle3Draft,
        write_eagle3,
        read_eagle3,
        eagle3.stored,
        embeddings=eagle3.EMBEDDINGS,
        renamed=eagle3.OTHER_NAMES,
    ),
    Layout("sglang", EagleDraft, write_eagle, eagle.read_eagle, eagle.stored, embeddings=eagle3.EMBEDDINGS),
)
