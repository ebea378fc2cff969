"""DSpark as vLLM serves it (vllm/model_executor/models/qwen3_dspark.py, read in 0.32): DFlash's files and two heads.

    markov_head.markov_w1.weight  [V, r]           markov_head.markov_w2.weight  [V, r]
    confidence_head.proj.weight   [1, H + r]       confidence_head.proj.bias     [1]

vLLM samples from the anchor's slot, which is our `shifted`, unless config.json says otherwise. It always drafts the
whole block: its confidences only choose how many of them are verified. A part of the vocabulary would need a head of
the draft's own there, and ours is the target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from spec_decode.drafters.dspark import DSparkConfig, DSparkDraft
from spec_decode.errors import DraftwrightError
from spec_decode.formats import dflash, eagle3
from spec_decode.formats.layout import Layout, ServedTarget, refuse
from spec_decode.formats.llama import refuse_others

ARCHITECTURE = "Qwen3DSparkModel"
_WEIGHT, _BIAS = "confidence_head.proj.weight", "confidence_head.proj.bias"


def write(config: DSparkConfig, tensors: Mapping[str, Tensor], target: ServedTarget) -> dict[str, Any]:
    """config.json; raises DraftwrightError for what has no place there: a learned mask, a part of the vocabulary, a
    threshold."""
    written = dflash.write_block(config, target, ARCHITECTURE)
    if config.confidence_threshold:
        what = f"confidence_threshold={config.confidence_threshold}"
        raise refuse("vllm", what, "set it to 0 in the draft's config.json")
    return {
        **written,
        "sample_from_anchor": config.shifted,
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }


def read(config: dict[str, Any], tensors: Mapping[str, Tensor], layers: tuple[int, ...] | None) -> DSparkConfig:
    """The draft's config."""
    refuse_others(config, {"markov_head_type": "vanilla", "dspark_draft_topk": None})
    if config.get("enable_confidence_head") and not config.get("confidence_head_with_markov"):
        # A missing key means false in vLLM.
        raise DraftwrightError(
            "config.json has confidence_head_with_markov=False, which a draft of Draftwright can't hold (only True)"
        )
    if config.get("markov_rank") is None:
        raise DraftwrightError("config.json lacks markov_rank, without which a DSpark draft can't be read")
    shifted = config.get("sample_from_anchor", True)
    return DSparkConfig(
        **dflash.read_block(config, layers),
        shifted=shifted,
        num_drafts=config["block_size"] - (not shifted),
        markov_rank=config["markov_rank"],
        confidence_bias=_read_bias(tensors) if config.get("enable_confidence_head") else 0.0,
    )


def _read_bias(tensors: Mapping[str, Tensor]) -> float:
    if _BIAS not in tensors:
        raise DraftwrightError(f"the file lacks the tensor '{_BIAS}', which config.json says that it has")
    if tensors[_BIAS].numel() != 1:
        raise DraftwrightError(f"the tensor '{_BIAS}' has shape {list(tensors[_BIAS].shape)}, and a bias has [1]")
    return tensors[_BIAS].item()


def stored(config: dict[str, Any], draft: DSparkConfig) -> dict[str, str]:
    """Our name and the file's, of each tensor. Without a confidence head, every confidence is one half."""
    return dflash.stored(config, draft) | {
        "markov_head.embed_tokens.weight": "markov_head.markov_w1.weight",
        "markov_head.lm_head.weight": "markov_head.markov_w2.weight",
        **({"confidence": _WEIGHT} if config.get("enable_confidence_head") else {}),
    }


def pack(tensors: dict[str, Tensor], draft: DSparkConfig) -> dict[str, Tensor]:
    """The confidence [H + r] as a linear layer, whose bias is a key of our config."""
    return tensors | {_WEIGHT: tensors[_WEIGHT][None], _BIAS: torch.tensor([draft.confidence_bias])}


def unpack(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Undoes `pack`."""
    rest = {name: tensor for name, tensor in tensors.items() if name != _BIAS}
    return {name: tensor.flatten() if name == _WEIGHT else tensor for name, tensor in rest.items()}


LAYOUT = Layout("vllm", DSparkDraft, write, read, stored, embeddings=eagle3.EMBEDDINGS, pack=pack, unpack=unpack)
