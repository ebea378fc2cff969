"""P-EAGLE draft (arXiv:2602.01469): EAGLE-3's inputs, all tokens in one pass.

    row t         a_t = [e(x_{t+1}); fc [low; mid; high]_t]      at position t          predicts x_{t+2}
    depth d >= 1  a   = [mask; fc mask_hidden]                   at position t + d      predicts x_{t+2+d}
    q^d_t = softmax(lm_head(norm(layers(a))))                    [V], over the draft vocabulary

The first layer is EAGLE-3's, 2H wide; ordinary layers follow. Depth d of row t sees rows up to t and its own depths up
to d. In decoding t is the last row, so a draft is one causal pass over the new rows and the masked ones.

Like Medusa's heads, no depth sees what another proposes, so every node of a level has the same children. The mask's
embedding is by default the draft's own, since SmolLM2 has no row that is known to be unused; `mask_token` names a row
of the target instead, as servers have it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spec_decode.drafters.eagle3 import Eagle3Config, Eagle3Draft
from spec_decode.errors import DraftwrightError, check_positive, check_type
from spec_decode.feature_drafter import DraftLayer, FeatureState, check_mask_token
from spec_decode.growth import grow, same_children
from spec_decode.layers import attend
from spec_decode.sampling import GREEDY, Sampling
from spec_decode.target import TargetOutput
from spec_decode.tree import Tree, TreePlan


@dataclass(frozen=True, kw_only=True)
class PEagleConfig(Eagle3Config):
    """Everything that shapes a P-EAGLE draft. num_drafts: tokens that one pass proposes; mask_token: target id
    whose embedding masks, None for a learned one."""

    num_layers: int = 4
    num_drafts: int = 4
    mask_token: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(num_layers=self.num_layers, num_drafts=self.num_drafts)
        check_mask_token(self.mask_token, self.vocab_size)
        if self.norm_output:
            raise DraftwrightError("norm_output is for drafts that feed their output back, which P-EAGLE doesn't")


class OrdinaryLayer(DraftLayer):
    """A decoder layer that reads the states alone."""

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config, config.hidden_size)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def inputs(self, embeds: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        return states, self.input_layernorm(states)


class PEagleDraft(Eagle3Draft):
    """See the module's docstring."""

    config: PEagleConfig
    layers: Any  # an nn.ModuleList of OrdinaryLayer

    def __init__(self, config: PEagleConfig) -> None:
        check_type("config", config, PEagleConfig, "a PEagleConfig")
        super().__init__(config)
        self.layers = nn.ModuleList(OrdinaryLayer(config) for _ in range(config.num_layers - 1))
        if config.mask_token is None:
            self.mask = nn.Parameter(0.02 * torch.randn(config.hidden_size))
        self.mask_hidden = nn.Parameter(0.02 * torch.randn(len(self.taps) * config.hidden_size))

    def all_layers(self) -> list[DraftLayer]:
        return [self.midlayer, *self.layers]

    def mask_embedding(self) -> Tensor:
        """What masked rows read in place of a token's embedding, [H]."""
        if self.config.mask_token is None:
            return self.mask
        assert self._embed is not None, "bind the draft to its target first"
        return self._embed(self.d2t.new_tensor(self.config.mask_token)).to(self.dtype)

    # --- decoding --------------------------------------------------------------------------------------------------

    def start(self, output: TargetOutput, ids: Tensor) -> FeatureState:
        """Keys and values of the state are those of every layer, [L, kv_heads, T, d]."""
        config = self.config
        empty = self.mask_hidden.new_empty(config.num_layers, config.num_kv_heads, 0, config.head_dim)
        return FeatureState(empty, empty, self.target_states(output)[0], ids[1:])

    def propose(
        self,
        state: FeatureState,
        root: int,
        plan: TreePlan,
        sampling: Sampling = GREEDY,
        generator: torch.Generator | None = None,
    ) -> Tree:
        plan = plan.cut(self.config.num_drafts)
        logp = self._log_q(self.run_depths(state, root)[: plan.depth])
        step, vocabulary = same_children(logp[1:]), self.draft_vocabulary()
        return grow(logp[0], step, plan, root, vocabulary, sampling=sampling, generator=generator)

    def run_depths(self, state: FeatureState, root: int) -> Tensor:
        """What the head reads of every depth of the last row, [K, H].

        The state takes in the rows that the target has verified; keys and values of the masked ones are dropped.
        """
        assert self._embed is not None, "bind the draft to its target first"
        past, new, masked = state.keys.shape[2], len(state.states), self.config.num_drafts - 1
        tokens = torch.cat((state.tokens, state.tokens.new_tensor([root])))
        embeds = torch.cat((self._embed(tokens).to(self.dtype), self.mask_embedding().expand(masked, -1)))
        hidden = torch.cat((self.fuse(state.states), self.fuse(self.mask_hidden).expand(masked, -1)))
        positions = torch.arange(past, past + new + masked, device=hidden.device)
        visible = positions[:, None] >= torch.arange(past + new + masked, device=hidden.device)
        all_keys, all_values = [], []
        for layer, past_keys, past_values in zip(self.all_layers(), state.keys, state.values, strict=True):
            residual, x = layer.inputs(embeds, hidden)
            key, value = layer.self_attn.key_value(x, positions)
            keys = torch.cat((past_keys, key.transpose(0, 1)), dim=1)
            values = torch.cat((past_values, value.transpose(0, 1)), dim=1)
            all_keys.append(keys[:, : past + new])
            all_values.append(values[:, : past + new])
            hidden = layer.outputs(residual, attend(layer.self_attn.query(x, positions), keys, values, visible))
        state.keys, state.values = torch.stack(all_keys), torch.stack(all_values)
        return self.norm(hidden[new - 1 :])
