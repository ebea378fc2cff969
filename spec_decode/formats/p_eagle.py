"""P-EAGLE as vLLM serves it: EAGLE-3's files with more layers (vllm/model_executor/models/llama_eagle3.py and
vllm/v1/spec_decode/llm_base_proposer.py, read in 0.32), with `parallel_drafting` in its speculative config.

A masked row reads the embedding of `pard_token`, which is the target's unless the file has embeddings of its own, and
mask_hidden [m * H], fused as target states are. Others train those embeddings, which a draft of ours can't hold, so
that such files are refused on import. How many tokens a pass proposes is up to the serving command.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from spec_decode.drafters.p_eagle import PEagleConfig, PEagleDraft
from spec_decode.errors import DraftwrightError
from spec_decode.formats import eagle3, vllm
from spec_decode.formats.layout import MASK_ADVICE, NOTE, Layout, ServedTarget, note, refuse


def write(config: PEagleConfig, tensors: Mapping[str, Tensor], target: ServedTarget) -> dict[str, Any]:
    """config.json; raises DraftwrightError for a learned mask, which has no place there."""
    if config.mask_token is None:
        raise refuse("vllm", "a mask of its own", MASK_ADVICE)
    return {
        **vllm.write_eagle3(config, tensors, target),
        "num_hidden_layers": config.num_layers,
        "pard_token": config.mask_token,
        NOTE: {"num_drafts": config.num_drafts},
    }


def read(config: dict[str, Any], tensors: Mapping[str, Tensor], layers: tuple[int, ...] | None) -> PEagleConfig:
    """The draft's config."""
    tokens = [config[key] for key in ("mask_token_id", "pard_token", "ptd_token_id") if config.get(key) is not None]
    if not tokens:
        raise DraftwrightError("config.json lacks pard_token, without which a P-EAGLE draft can't be read")
    chosen = eagle3.target_layers(config, layers) or eagle3.layer_ids(config)
    if not chosen:
        raise eagle3.no_layers()
    return eagle3.read_eagle3(
        PEagleConfig,
        config | {"num_hidden_layers": 1},
        chosen,
        num_layers=config.get("num_hidden_layers", 1),
        num_drafts=note(config, "num_drafts", PEagleConfig.num_drafts),
        mask_token=tokens[0],
    )


def stored(config: dict[str, Any], draft: PEagleConfig) -> dict[str, str]:
    """Our name and the file's, of each tensor: layers.0 is the midlayer, and those behind it have no hidden_norm."""
    names = eagle3.stored(config, draft)
    inner = [name.removeprefix("midlayer.") for name in names if name.startswith("midlayer.")]
    later = {
        f"layers.{index}.{name}": f"layers.{index + 1}.{name}"
        for index in range(draft.num_layers - 1)
        for name in inner
        if name != "hidden_norm.weight"
    }
    first = {ours: ours.replace("midlayer.", "layers.0.") for ours in names}
    return first | later | {"mask_hidden": "mask_hidden"}


def unpack(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """mask_hidden is [1, 1, m * H] in files of others."""
    return {name: tensor.flatten() if name == "mask_hidden" else tensor for name, tensor in tensors.items()}


LAYOUT = Layout("vllm", PEagleDraft, write, read, stored, renamed={"midlayer.": "layers.0."}, unpack=unpack)
