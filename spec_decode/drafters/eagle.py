"""EAGLE draft (arXiv:2401.15077), decoded with static trees (EAGLE-1) or dynamic ones (EAGLE-2); HASS trains the same.

    f_t                                          the target's last state, after its final norm    [H]
    f^_{t+1} = layer(fc [e(x_{t+1}); f_t])       predicts the target's next state
    q_t = softmax(W f^_{t+1})                    W: the target's own head, over the draft vocabulary

The layer has no input norm, as in the released code: fc's output goes into attention as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spec_decode.errors import check_type
from spec_decode.feature_drafter import DraftLayer, FeatureDraftConfig, FeatureDrafter


@dataclass(frozen=True, kw_only=True)
class EagleConfig(FeatureDraftConfig):
    """Everything that shapes an EAGLE draft."""


class EagleLayer(DraftLayer):
    """fc, then a decoder layer without an input norm."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config, config.hidden_size)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        with torch.no_grad():  # at first the target's state passes through
            self.fc.weight[:, : config.hidden_size] = 0
            self.fc.weight[:, config.hidden_size :] = torch.eye(config.hidden_size)
            self.fc.bias.zero_()

    def inputs(self, embeds: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        fused = self.fc(torch.cat((embeds, states), dim=-1)).to(states.dtype)
        return fused, fused


class EagleDraft(FeatureDrafter):
    """See the module's docstring."""

    config: EagleConfig
    shares_head = True

    def __init__(self, config: EagleConfig) -> None:
        check_type("config", config, EagleConfig, "an EagleConfig")
        super().__init__(config)
        self.midlayer = EagleLayer(config)
