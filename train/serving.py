"""How a server is started with an exported draft, as its model card says it."""

from __future__ import annotations

import json
import shlex
from typing import Any

from spec_decode.drafters.block import BlockDraft
from spec_decode.drafters.dspark import DSparkDraft
from spec_decode.drafters.eagle import EagleDraft
from spec_decode.drafters.eagle3 import Eagle3Draft
from spec_decode.drafters.medusa import MedusaDraftModel
from spec_decode.drafters.p_eagle import PEagleDraft
from spec_decode.errors import DraftwrightError
from spec_decode.formats import find_layout
from spec_decode.formats.layout import SPECULATIVE_TOKENS, ServedTarget

METHODS: dict[type, str] = {
    Eagle3Draft: "eagle3",
    EagleDraft: "eagle",
    MedusaDraftModel: "medusa",
    BlockDraft: "dflash",
    DSparkDraft: "dspark",
    PEagleDraft: "p_eagle",
}
# The one who reads each format.
CONSUMERS = {"vllm": "vLLM", "sglang": "SGLang", "speculators": "vLLM", "safeailab": "EAGLE", "medusa": "Medusa"}
_IN_VLLM = {PEagleDraft: {"method": "eagle3", "parallel_drafting": True}}  # others go by their method


def speculative_config(draft: Any) -> dict[str, Any]:
    """What vLLM is to be told of a draft whose files lie in FOLDER."""
    kind, k = type(draft), getattr(draft.config, "num_drafts", SPECULATIVE_TOKENS)
    if kind is MedusaDraftModel:
        k = min(k, draft.config.num_heads)
    return {"method": METHODS[kind], "model": "FOLDER", **_IN_VLLM.get(kind, {}), "num_speculative_tokens": k}


def serving(draft: Any, name: str, target: ServedTarget) -> str:
    """How the format `name` is loaded; below it, for a server that reads another one, what to export and to run."""
    own = CONSUMERS[name]
    where = "" if name in ("vllm", "sglang", "speculators") else "In Python, with the code of "
    sections = [f"{where}{own}:\n\n{_command(draft, name, target)}"]
    for other in ("vllm", "sglang"):
        if CONSUMERS[other] != own and _holds(other, draft, target):
            sections.append(
                f"{CONSUMERS[other]}, after an export with `format={other}` to a FOLDER of its own:\n\n"
                + _command(draft, other, target)
            )
    return "\n\n".join(sections)


def _holds(name: str, draft: Any, target: ServedTarget) -> bool:
    """Whether the format has a place for all of the draft."""
    try:
        find_layout(type(draft), name).write(draft.config, draft.state_dict(), target)
    except DraftwrightError:
        return False
    return True


def _command(draft: Any, name: str, target: ServedTarget) -> str:
    method, place = METHODS[type(draft)], shlex.quote(target.location)
    speculative = speculative_config(draft)
    k = speculative["num_speculative_tokens"]
    return {
        "vllm": f"    vllm serve {place} --speculative-config '{json.dumps(speculative)}'",
        "speculators": "    vllm serve FOLDER",
        "sglang": f"    python -m sglang.launch_server --model-path {place} --dtype bfloat16 \\\n"
        f"      --speculative-algorithm {method.upper()} --speculative-draft-model-path FOLDER \\\n"
        f"      --speculative-num-steps {k} --speculative-eagle-topk 1 --speculative-num-draft-tokens {k + 1}",
        "safeailab": f"    EaModel.from_pretrained(use_eagle3={method == 'eagle3'}, "
        f"base_model_path={target.location!r}, ea_model_path=FOLDER)",
        "medusa": "    MedusaModel.from_pretrained(FOLDER)",
    }[name]
