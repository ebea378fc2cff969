"""Which consumer's files these are, from config.json and the names of the tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from spec_decode.drafter import VocabularyDrafter
from spec_decode.drafters.block import BlockDraft
from spec_decode.drafters.dspark import DSparkDraft
from spec_decode.drafters.eagle import EagleDraft
from spec_decode.drafters.eagle3 import Eagle3Draft
from spec_decode.drafters.medusa import MedusaDraftModel
from spec_decode.drafters.p_eagle import PEagleDraft
from spec_decode.errors import DraftwrightError
from spec_decode.formats import dflash, dspark
from spec_decode.formats.layout import Layout

_ARCHITECTURES: dict[str, str] = {
    "Eagle3LlamaForCausalLM": "vllm",
    "EagleLlamaForCausalLM": "vllm",
    "LlamaForCausalLMEagle3": "sglang",
    "LlamaForCausalLMEagle": "sglang",
    "LlamaForCausalLM": "safeailab",
}


def recognise(config: Mapping[str, Any], names: Iterable[str], formats: Mapping[str, Iterable[Layout]]) -> Layout:
    """The layout of the files; raises DraftwrightError that says what isn't known about them."""
    name, kind = _format(config, names)
    return next(layout for layout in formats[name] if layout.draft is kind)


def _format(config: Mapping[str, Any], names: Iterable[str]) -> tuple[str, type[VocabularyDrafter]]:
    if "drafter" in config:
        raise DraftwrightError("this folder holds a draft of Draftwright already: use it as checkpoint=FOLDER")
    if "speculators_model_type" in config:
        return "speculators", Eagle3Draft
    if "medusa_num_heads" in config:
        return "medusa", MedusaDraftModel
    if config.get("model_type") == "medusa":
        return "vllm", MedusaDraftModel
    architecture = next(iter(config.get("architectures") or []), None)
    if architecture == dflash.ARCHITECTURE:
        return "vllm", BlockDraft
    if architecture == dspark.ARCHITECTURE:
        return "vllm", DSparkDraft
    if architecture not in _ARCHITECTURES:
        raise DraftwrightError(
            f"config.json has architectures=[{architecture or ''}], which no known format of drafts has: known are "
            f"{', '.join(_ARCHITECTURES)}, {dflash.ARCHITECTURE}, {dspark.ARCHITECTURE}, speculators' eagle3 and Medusa"
        )
    if "mask_hidden" in names:  # EAGLE-3's architecture, whichever name it goes by; vLLM alone serves it
        return "vllm", PEagleDraft
    return _ARCHITECTURES[architecture], _eagle(set(names))


def _eagle(names: set[str]) -> type[VocabularyDrafter]:
    """EAGLE-3 has a norm of the state, EAGLE-1 doesn't; both have fc."""
    if "fc.weight" not in names:
        raise DraftwrightError("the file lacks the tensor 'fc.weight', which every EAGLE draft has")
    return Eagle3Draft if any(name.endswith(".hidden_norm.weight") for name in names) else EagleDraft
