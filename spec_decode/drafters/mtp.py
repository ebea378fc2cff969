"""One multi-token-prediction module (DeepSeek-V3, arXiv:2412.19437, section 2.2), used again and again (FastMTP).

    h^0_t = the target's last state, after its final norm                                       [H]
    u     = input_proj [token_layernorm(e(x_{t+1+k})); hidden_layernorm(h^k_t)]                 [2H] -> [H]
    h^{k+1}_t = final_layernorm(layer(u))
    q^k_t = softmax(W h^{k+1}_t)        W: the target's own head, over the draft vocabulary

Depth k runs at position t + k and sees step 0 of the rows up to t and its own earlier depths, in training as in
decoding; FastMTP trains at position t, with every depth seeing the same depth of earlier rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spec_decode.errors import check_type
from spec_decode.feature_drafter import DraftLayer, FeatureDraftConfig, FeatureDrafter


@dataclass(frozen=True, kw_only=True)
class MtpConfig(FeatureDraftConfig):
    """Everything that shapes an MTP module."""


class MtpLayer(DraftLayer):
    """Norms of token and state, their projection, and a decoder layer."""

    def __init__(self, config: MtpConfig) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        super().__init__(config, size)
        self.token_layernorm = nn.RMSNorm(size, eps)
        self.hidden_layernorm = nn.RMSNorm(size, eps)
        self.input_proj = nn.Linear(2 * size, size, bias=False)
        self.input_layernorm = nn.RMSNorm(size, eps)

    def inputs(self, embeds: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat((self.token_layernorm(embeds), self.hidden_layernorm(states)), dim=-1)
        # Autocast multiplies in 16 bits, but the residual stream keeps its precision.
        residual = self.input_proj(both).to(states.dtype)
        return residual, self.input_layernorm(residual)


class MtpDraft(FeatureDrafter):
    """See the module's docstring."""

    config: MtpConfig
    shares_head = True

    def __init__(self, config: MtpConfig) -> None:
        check_type("config", config, MtpConfig, "an MtpConfig")
        super().__init__(config)
        self.midlayer = MtpLayer(config)
        self.final_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def readout(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.final_layernorm(hidden)
        return normed, normed
