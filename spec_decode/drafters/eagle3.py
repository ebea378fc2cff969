"""EAGLE-3 draft (arXiv:2503.01840, section 3), in the layout that SGLang and vLLM read.

    g_t   = fc [low; mid; high]_t               [T, 3H] -> [T, H]    three target states, fused
    a^0_t = layer(e(x_{t+1}), g_t)              the target's features, step 0
    a^k_t = layer(e(x_{t+1+k}), a^{k-1}_t)      the draft's own state, k >= 1
    q^k_t = softmax(lm_head(norm(a^k_t)))       predicts x_{t+2+k}, over the draft vocabulary

The layer has one attention block whose queries, keys and values read [norm(e); norm(g)], 2H wide. How such a draft
decodes is in `spec_decode.feature_drafter`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from spec_decode.errors import DraftwrightError, check_type
from spec_decode.feature_drafter import DraftLayer, FeatureDraftConfig, FeatureDrafter, TargetStates
from spec_decode.target import Target, TargetSpec, check_taps, default_taps


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(FeatureDraftConfig):
    """Everything that shapes an EAGLE-3 draft. target_layers in Hugging Face numbering (hidden_states[j]).

    fusion: "split" is the released layout; "linear" is the paper's written form, x = fuse([f; e]) followed by an
    ordinary decoder layer. fc_norm and norm_output are EAGLE-3.1's (arXiv:2605.09992). norm_before_fc (one norm over
    all target states) and norm_before_residual (the normed state is also the residual) are those of drafts that the
    speculators library trained.
    """

    target_layers: tuple[int, ...]
    fusion: str = "split"
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "target_layers", tuple(self.target_layers))
        if self.fusion not in ("split", "linear"):
            raise DraftwrightError(f"fusion '{self.fusion}' is unknown; choose split or linear")
        if self.norm_before_residual and self.fusion != "split":
            raise DraftwrightError("norm_before_residual needs fusion=split: the linear layer has no norm of the state")

    @classmethod
    def for_target(cls, spec: TargetSpec, *, target_layers: tuple[int, ...] | None = None, **changes: Any) -> Self:
        """A draft shaped like one layer of the target; `changes` override single fields."""
        taps = check_taps(tuple(target_layers), spec.num_layers) if target_layers else default_taps(spec.num_layers)
        return super().for_target(spec, target_layers=taps, **changes)


class Eagle3Layer(DraftLayer):
    """The draft's decoder layer: embedding and state side by side, or fused first."""

    def __init__(self, config: Eagle3Config) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        split = config.fusion == "split"
        super().__init__(config, 2 * size if split else size)
        self.split, self.norm_before_residual = split, config.norm_before_residual
        self.input_layernorm = nn.RMSNorm(size, eps)
        if split:
            self.hidden_norm = nn.RMSNorm(size, eps)
        else:
            self.fuse = nn.Linear(2 * size, size, bias=False)

    def inputs(self, embeds: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        if self.split:
            normed = self.hidden_norm(states)
            residual = normed if self.norm_before_residual else states
            return residual, torch.cat((self.input_layernorm(embeds), normed), dim=-1)
        # Autocast multiplies in 16 bits, but the residual stream keeps its precision.
        fused = self.fuse(torch.cat((states, embeds.to(states.dtype)), dim=-1)).to(states.dtype)
        return fused, self.input_layernorm(fused)


class Eagle3Draft(FeatureDrafter):
    """See the module's docstring. Parameters carry the names that serving engines read."""

    config: Eagle3Config
    needs_last_hidden = False

    def __init__(self, config: Eagle3Config) -> None:
        check_type("config", config, Eagle3Config, "an Eagle3Config")
        super().__init__(config)
        self.taps = config.target_layers
        size, fused = config.hidden_size, len(config.target_layers) * config.hidden_size
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(fused, config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(size, config.rms_norm_eps) for _ in config.target_layers)
        self.fc = nn.Linear(fused, size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = nn.RMSNorm(size, config.rms_norm_eps)

    def bind(self, target: Target) -> None:
        super().bind(target)
        check_taps(self.taps, target.spec.num_layers)

    def target_states(self, source: TargetStates) -> Tensor:
        assert source.features is not None
        return source.features

    def fuse(self, states: Tensor) -> Tensor:
        states = states.to(self.dtype)
        if self.config.norm_before_fc:
            states = self.input_norm(states)
        if self.config.fc_norm:
            chunks = states.chunk(len(self.taps), dim=-1)
            states = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return self.fc(states)

    def readout(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.norm(hidden)
        return (normed if self.config.norm_output else hidden), normed
