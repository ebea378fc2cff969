"""The speculators library (vllm-project/speculators 0.9), whose folders vLLM serves without further options.

The layer's own config is nested, and tensors of the layer are called layers.0.*; layer ids are ours. Embeddings are in
the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from spec_decode.drafters.eagle3 import Eagle3Config, Eagle3Draft
from spec_decode.errors import DraftwrightError
from spec_decode.formats import eagle3
from spec_decode.formats.layout import NOTE, SPECULATIVE_TOKENS, Layout, ServedTarget, refuse
from spec_decode.formats.llama import write_llama

_VERSION = "0.9.0"  # of the library whose format this is


def write_eagle3(config: Eagle3Config, tensors: Mapping[str, Tensor], target: ServedTarget) -> dict[str, Any]:
    """config.json of an EAGLE-3 draft; what vLLM would otherwise take for true is written as false."""
    if config.fc_norm and config.norm_before_fc:
        raise refuse("speculators", "both fc_norm and norm_before_fc", "train it with one of them, or use format=vllm")
    written = eagle3.write_eagle3("speculators", config, target, "Eagle3Speculator")
    proposal = {"proposal_type": "greedy", "speculative_tokens": SPECULATIVE_TOKENS}
    layer = {key: value for key, value in write_llama(config, target).items() if key != "draft_vocab_size"}
    return {
        "architectures": written["architectures"],
        "speculators_model_type": "eagle3",
        "speculators_version": _VERSION,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": None,
        eagle3.IDS: list(config.target_layers),
        **{norm: written[norm] for norm in eagle3.NORMS},
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        # vLLM looks for the number of states here, and takes 3 where it finds none.
        "transformer_layer_config": {**layer, "num_aux_hidden_states": len(config.target_layers)},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": target.location, "architectures": [target.architecture]},
        },
    }


def read_eagle3(config: dict[str, Any], tensors: Mapping[str, Tensor], layers: tuple[int, ...] | None) -> Eagle3Config:
    """The draft's config."""
    if config["speculators_model_type"] != "eagle3":
        raise DraftwrightError(
            f"config.json has speculators_model_type={config['speculators_model_type']}, which Draftwright can't "
            "import (only eagle3)"
        )
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    known = {"target": verifier.get("name_or_path") or "", **(config.get(NOTE) or {})}
    whole = {
        "norm_before_residual": True,  # vLLM's reading of a missing key
        **(config.get("transformer_layer_config") or {}),
        **{key: value for key, value in config.items() if key not in ("transformer_layer_config", "vocab_size")},
        NOTE: known,
    }
    if chosen := eagle3.target_layers(whole, layers) or eagle3.layer_ids(whole):
        return eagle3.read_eagle3(Eagle3Config, whole, chosen)
    raise eagle3.no_layers()


def stored(config: dict[str, Any], draft: Eagle3Config) -> dict[str, str]:
    """Our name and the file's, of each tensor."""
    return {ours: ours.replace("midlayer.", "layers.0.") for ours in eagle3.stored(config, draft)}


# The library fills embeddings that a file lacks with zeros, silently; only nan would make it read the target's.
LAYOUTS = (
    Layout(
        "speculators",
        Eagle3Draft,
        write_eagle3,
        read_eagle3,
        stored,
        embeddings=eagle3.EMBEDDINGS,
        stores_embeddings=True,
    ),
)
