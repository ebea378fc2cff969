"""Drafts with random weights, one of each kind that a server reads, for the tests of spec_decode/formats."""

from __future__ import annotations

from typing import Any

import torch

from spec_decode.drafter import VocabularyDrafter
from spec_decode.drafters.block import BlockConfig, BlockDraft
from spec_decode.drafters.dspark import DSparkConfig, DSparkDraft
from spec_decode.drafters.eagle import EagleConfig, EagleDraft
from spec_decode.drafters.eagle3 import Eagle3Config, Eagle3Draft
from spec_decode.drafters.medusa import MedusaConfig, MedusaDraftModel
from spec_decode.drafters.p_eagle import PEagleConfig, PEagleDraft
from spec_decode.target import Target

V = 64  # the target's vocabulary

LLAMA3 = {
    "rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


def _random(draft: VocabularyDrafter) -> Any:
    """No weight, norm or bias at its start, so that a swapped or forgotten one shows."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.2 if parameter.dim() > 1 else 1.0))
    return draft


def eagle3(target: Target, **changes: Any) -> Eagle3Draft:
    options = {"draft_vocab_size": 40, "tokenizer": "abc", "intermediate_size": 48, "num_kv_heads": 2} | changes
    draft = Eagle3Draft(Eagle3Config.for_target(target.spec, **options))
    draft.set_vocabulary(torch.arange(draft.config.draft_vocab_size) + (V - draft.config.draft_vocab_size) // 2)
    return _random(draft)


def eagle(target: Target, **changes: Any) -> EagleDraft:
    return _random(
        EagleDraft(EagleConfig.for_target(target.spec, **{"intermediate_size": 48, "tokenizer": "abc"} | changes))
    )


def medusa(target: Target, **changes: Any) -> MedusaDraftModel:
    options = {"num_heads": 3, "num_layers": 2, "tokenizer": "abc"} | changes
    return _random(MedusaDraftModel(MedusaConfig.for_target(target.spec, **options)))


def dflash(target: Target, **changes: Any) -> BlockDraft:
    options = {"num_layers": 2, "num_drafts": 4, "mask_token": 7, "intermediate_size": 48, "num_kv_heads": 2}
    return _random(BlockDraft(BlockConfig.for_target(target.spec, **options | {"tokenizer": "abc"} | changes)))


def dspark(target: Target, **changes: Any) -> DSparkDraft:
    options = {"num_layers": 2, "num_drafts": 4, "mask_token": 7, "intermediate_size": 48, "num_kv_heads": 2}
    options |= {"markov_rank": 6, "tokenizer": "abc"}
    return _random(DSparkDraft(DSparkConfig.for_target(target.spec, **options | changes)))


def p_eagle(target: Target, **changes: Any) -> PEagleDraft:
    options = {"num_layers": 3, "num_drafts": 6, "mask_token": 7, "intermediate_size": 48, "num_kv_heads": 2}
    options |= {"draft_vocab_size": 40, "tokenizer": "abc"}
    draft = PEagleDraft(PEagleConfig.for_target(target.spec, **options | changes))
    draft.set_vocabulary(torch.arange(draft.config.draft_vocab_size) + (V - draft.config.draft_vocab_size) // 2)
    return _random(draft)


def no_bias(draft: VocabularyDrafter) -> Any:
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if name.endswith(".bias"):
                parameter.zero_()
    return draft


IDS = "eagle_aux_hidden_state_layer_ids"
