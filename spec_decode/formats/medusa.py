"""FasterDecoding's Medusa (medusa/model/medusa_model.py): a ModuleList of Sequential(block, ..., Linear).

Its loader takes the tensors from medusa_lm_head.pt and ignores what doesn't fit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from spec_decode.drafters.medusa import MedusaConfig, MedusaDraftModel
from spec_decode.errors import DraftwrightError
from spec_decode.formats.layout import Layout, ServedTarget, note, whole_vocabulary


def write_medusa(config: MedusaConfig, tensors: Mapping[str, Tensor], target: ServedTarget) -> dict[str, Any]:
    """config.json of Medusa's heads."""
    whole_vocabulary("medusa", config)
    return {
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "base_model_name_or_path": target.location,
        "version": "2",
    }


def read_medusa(config: dict[str, Any], tensors: Mapping[str, Tensor], layers: tuple[int, ...] | None) -> MedusaConfig:
    """The draft's config, from the tensors: published config.json files name fewer heads than they have."""
    heads = {int(name.partition(".")[0]) for name in tensors if re.match(r"\d+\.", name)}
    blocks = {int(match[1]) for name in tensors if (match := re.match(r"0\.(\d+)\.linear\.weight$", name))}
    head = f"0.{len(blocks)}.weight"
    if head not in tensors or tensors[head].dim() != 2:
        raise DraftwrightError(
            f"the heads lack the tensor '{head}' [V, H]: older Medusa heads go through the target's own head, which "
            "a draft of Draftwright can't hold"
        )
    vocab_size, hidden_size = tensors[head].shape
    return MedusaConfig(
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        num_heads=len(heads),
        num_layers=len(blocks),
        target=note(config, "target") or config.get("base_model_name_or_path") or "",
        tokenizer=note(config, "tokenizer"),
    )


def stored(config: dict[str, Any], draft: MedusaConfig) -> dict[str, str]:
    """Our name and the file's, of each tensor."""
    blocks = {
        f"medusa.{head}.blocks.{layer}.linear.{part}": f"{head}.{layer}.linear.{part}"
        for head in range(draft.num_heads)
        for layer in range(draft.num_layers)
        for part in ("weight", "bias")
    }
    last = {f"medusa.{head}.lm_head.weight": f"{head}.{draft.num_layers}.weight" for head in range(draft.num_heads)}
    return blocks | last


LAYOUTS = (Layout("medusa", MedusaDraftModel, write_medusa, read_medusa, stored, weights="medusa_lm_head.pt"),)
