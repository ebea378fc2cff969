"""vLLM (vllm/model_executor/models/llama_eagle3.py, llama_eagle.py and medusa.py, read in 0.32).

For DFlash, DSpark and P-EAGLE see dflash.py, dspark.py and p_eagle.py.

Layer ids are hidden states as Hugging Face numbers them, which are ours. Unknown tensors are an error there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from spec_decode.drafters.eagle import EagleConfig, EagleDraft
from spec_decode.drafters.eagle3 import Eagle3Config, Eagle3Draft
from spec_decode.drafters.medusa import MedusaConfig, MedusaDraftModel
from spec_decode.formats import eagle, eagle3
from spec_decode.formats.layout import Layout, ServedTarget, note, refuse, whole_vocabulary
from spec_decode.formats.llama import refuse_others


def write_eagle3(config: Eagle3Config, tensors: Mapping[str, Tensor], target: ServedTarget) -> dict[str, Any]:
    """config.json of an EAGLE-3 draft; the architecture's name is vLLM's own, so that nobody else reads the ids."""
    written = eagle3.write_eagle3("vllm", config, target, "Eagle3LlamaForCausalLM")
    ids = list(config.target_layers)  # vLLM's newer runner reads them at the top alone, and guesses where they miss
    return {**written, eagle3.IDS: ids, "eagle_config": {"use_aux_hidden_state": True, eagle3.IDS: ids}}


def read_eagle3(config: dict[str, Any], tensors: Mapping[str, Tensor], layers: tuple[int, ...] | None) -> Eagle3Config:
    """The draft's config."""
    if chosen := eagle3.target_layers(config, layers) or eagle3.layer_ids(config):
        return eagle3.read_eagle3(Eagle3Config, config, chosen)
    raise eagle3.no_layers()


def write_eagle(config: EagleConfig, tensors: Mapping[str, Tensor], target: ServedTarget) -> dict[str, Any]:
    """config.json of an EAGLE-1 draft; vLLM's fc has no bias."""
    if tensors["midlayer.fc.bias"].any():
        raise refuse("vllm", "the tensor midlayer.fc.bias", "use format=sglang or format=safeailab")
    return eagle.write_eagle("vllm", config, target, "EagleLlamaForCausalLM") | {"bias": False}


def write_medusa(config: MedusaConfig, tensors: Mapping[str, Tensor], target: ServedTarget) -> dict[str, Any]:
    """config.json of Medusa's heads. vLLM 0.32 gives each head the whole vocabulary, whatever truncated_vocab_size."""
    whole_vocabulary("vllm", config)
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.vocab_size,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "max_paths": 64,
        "topk": 10,
        "medusa_fc_bias": any(bool(tensor.any()) for name, tensor in tensors.items() if name.endswith(".bias")),
        "original_lm_head": False,
    }


def read_medusa(config: dict[str, Any], tensors: Mapping[str, Tensor], layers: tuple[int, ...] | None) -> MedusaConfig:
    """The draft's config."""
    refuse_others(config, {"original_lm_head": False, "truncated_vocab_size": config.get("vocab_size")})
    return MedusaConfig(
        hidden_size=config.get("hidden_size", 4096),
        vocab_size=config.get("vocab_size", 32001),
        num_heads=config.get("num_heads", 5),
        num_layers=config.get("num_hidden_layers", 1),
        target=note(config, "target"),
        tokenizer=note(config, "tokenizer"),
    )


def medusa_names(config: dict[str, Any], draft: MedusaConfig) -> dict[str, str]:
    """Our name and the file's, of each tensor."""
    parts = ["weight", "bias"] if config.get("medusa_fc_bias") else ["weight"]
    blocks = {
        f"medusa.{head}.blocks.{layer}.linear.{part}": f"blocks.{head}.layers.{layer}.{part}"
        for head in range(draft.num_heads)
        for layer in range(draft.num_layers)
        for part in parts
    }
    return blocks | {f"medusa.{head}.lm_head.weight": f"lm_heads.{head}.weight" for head in range(draft.num_heads)}


LAYOUTS = (
    Layout(
        "vllm",
        Eagle3Draft,
        write_eagle3,
        read_eagle3,
        eagle3.stored,
        embeddings=eagle3.EMBEDDINGS,
        renamed=eagle3.OTHER_NAMES,
    ),
    Layout("vllm", EagleDraft, write_eagle, eagle.read_eagle, eagle.stored, embeddings=eagle3.EMBEDDINGS),
    Layout("vllm", MedusaDraftModel, write_medusa, read_medusa, medusa_names, renamed={"medusa_heads.": ""}),
)
