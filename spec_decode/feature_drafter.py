"""Drafts that continue the target's states one token at a time: the EAGLE family and MTP.

    a^0_t = layer(e(x_{t+1}), f_t)              f: what the draft makes of the target's states, [T, H]
    a^k_t = layer(e(x_{t+1+k}), a^{k-1}_t)      the draft's own state, k >= 1
    q^k_t = softmax(head(norm(a^k_t)))          predicts x_{t+2+k}, over the draft vocabulary

Row t sits at position t + k; its embedded token is the next one. Keys and values of step k are those of row t alone,
beside step 0 of all rows up to t. The embedding is the target's and not stored.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_decode.drafter import VocabularyDrafter, check_draft_vocabulary, check_sizes
from spec_decode.errors import DraftwrightError, check_positive, check_type
from spec_decode.growth import LevelMask, grow
from spec_decode.layers import FrozenHead, GatedMLP, Rope, attend
from spec_decode.sampling import GREEDY, Sampling
from spec_decode.target import Target, TargetOutput, TargetSpec
from spec_decode.tree import Tree, TreePlan


@dataclass(frozen=True, kw_only=True)
class FeatureDraftConfig:
    """What shapes any draft of one decoder layer over the target's states."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_positions: int
    target: str = ""
    tokenizer: str = ""

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
        check_positive(**{name: getattr(self, name) for name in (*sizes, "draft_vocab_size", "max_positions")})
        check_type("rms_norm_eps", self.rms_norm_eps, int | float, "a number")
        check_type("rope_parameters", self.rope_parameters, dict, "a dict")
        Rope(self.rope_parameters, self.head_dim)  # refuses what drafts can't compute
        if self.rms_norm_eps <= 0:
            raise DraftwrightError(f"rms_norm_eps must be above 0, got {self.rms_norm_eps}")
        if self.num_heads % self.num_kv_heads:
            raise DraftwrightError(
                f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}, which share keys"
            )
        if self.head_dim % 2:
            raise DraftwrightError(f"head_dim {self.head_dim} is odd, but rotary positions turn pairs")
        check_draft_vocabulary(self.draft_vocab_size, self.vocab_size)

    @classmethod
    def for_target(cls, spec: TargetSpec, **changes: Any) -> Self:
        """A draft shaped like one layer of the target; `changes` override single fields."""
        fields: dict[str, Any] = {
            "hidden_size": spec.hidden_size,
            "intermediate_size": spec.intermediate_size,
            "num_heads": spec.num_heads,
            "num_kv_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            "vocab_size": spec.vocab_size,
            "draft_vocab_size": spec.vocab_size,
            "rms_norm_eps": spec.rms_norm_eps,
            "rope_parameters": spec.rope_parameters,
            "max_positions": spec.max_positions,
            "target": spec.name,
        }
        return cls(**(fields | changes))


def check_mask_token(mask_token: int | None, vocab_size: int) -> None:
    """Raise DraftwrightError unless it is a target id, whose embedding masks, or None for a learned mask."""
    check_type("mask_token", mask_token, int | None, "an int or None")
    if mask_token is not None and not 0 <= mask_token < vocab_size:
        raise DraftwrightError(
            f"mask_token {mask_token} is no token of the target: choose one from 0 to {vocab_size - 1}, or leave it "
            "out for a learned mask"
        )


class DraftAttention(nn.Module):
    """Projections only; what attends to what differs between training and decoding."""

    def __init__(self, config: FeatureDraftConfig, input_size: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.rope = Rope(config.rope_parameters, config.head_dim)
        self.q_proj = nn.Linear(input_size, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)

    def query(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [M, in], positions [M] -> [M, heads, d]."""
        return self.rope.rotate(self.q_proj(x).unflatten(-1, (-1, self.head_dim)), positions)

    def key_value(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """x [M, in], positions [M] -> two of [M, kv_heads, d]."""
        key = self.rope.rotate(self.k_proj(x).unflatten(-1, (-1, self.head_dim)), positions)
        return key, self.v_proj(x).unflatten(-1, (-1, self.head_dim))


class DraftLayer(nn.Module):
    """A decoder layer, split where training and decoding differ: inputs -> (attention) -> outputs."""

    def __init__(self, config: FeatureDraftConfig, input_size: int) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config, input_size)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    @abstractmethod
    def inputs(self, embeds: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """embeds, states [M, H] -> (residual [M, H], attention input [M, in])."""

    def outputs(self, residual: Tensor, attended: Tensor) -> Tensor:
        """residual [M, H], attended [M, heads * d] -> [M, H]."""
        hidden = residual + self.self_attn.o_proj(attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class TargetStates(Protocol):
    """The target's states of some rows: the output of a pass, or a training batch."""

    @property
    def features(self) -> Tensor | None: ...

    @property
    def last_hidden(self) -> Tensor | None: ...


@dataclass
class FeatureState:
    """Keys and values of committed rows, [kv_heads, T, d], and rows whose next token wasn't known yet:
    target states [M, in] and the tokens that follow all of them but the last, [M - 1]."""

    keys: Tensor
    values: Tensor
    states: Tensor
    tokens: Tensor


class FeatureDrafter(VocabularyDrafter):
    """See the module's docstring. A draft adds its layer, what it reads of the target, and what it feeds back.

    shares_head: logits come from the target's own rows of the draft vocabulary, which are not stored.
    """

    config: FeatureDraftConfig
    midlayer: DraftLayer
    needs_last_hidden = True
    shares_head = False

    def __init__(self, config: FeatureDraftConfig) -> None:
        super().__init__(config)
        self._embed: Callable[[Tensor], Tensor] | None = None
        sizes = config.hidden_size, config.draft_vocab_size
        self.lm_head: nn.Linear | FrozenHead = FrozenHead(*sizes) if self.shares_head else nn.Linear(*sizes, bias=False)

    def bind(self, target: Target) -> None:
        check_sizes(self.config, target.spec)
        self._embed = target.embed
        if self.shares_head:
            self.init_head(target.head_weight())

    def heads(self) -> list[Tensor]:
        return [self.lm_head.weight]

    # --- computing -------------------------------------------------------------------------------------------------

    def target_states(self, source: TargetStates) -> Tensor:
        """What the draft reads of the target's states, [..., in]."""
        assert source.last_hidden is not None
        return source.last_hidden

    def fuse(self, states: Tensor) -> Tensor:
        """Target states [..., in], in the target's dtype -> f [..., H]."""
        return states.to(self.dtype)

    def readout(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Layer output [..., H] -> (state fed to the next step, state that the head reads)."""
        return hidden, hidden

    @property
    def dtype(self) -> torch.dtype:
        return self.midlayer.self_attn.q_proj.weight.dtype

    # --- decoding --------------------------------------------------------------------------------------------------

    def start(self, output: TargetOutput, ids: Tensor) -> FeatureState:
        states = self.target_states(output)[0]
        empty = self.heads()[0].new_empty(self.config.num_kv_heads, 0, self.config.head_dim)
        return FeatureState(empty, empty, states, ids[1:])

    def propose(
        self,
        state: FeatureState,
        root: int,
        plan: TreePlan,
        sampling: Sampling = GREEDY,
        generator: torch.Generator | None = None,
    ) -> Tree:
        last, logp = self._advance(state, root)
        step = TreeStep(self, state, last)
        return grow(logp, step, plan, root, self.draft_vocabulary(), sampling=sampling, generator=generator)

    def commit(self, state: FeatureState, tree: Tree, path: Tensor, output: TargetOutput) -> FeatureState:
        state.states = self.target_states(output)[0, path]
        state.tokens = tree.tokens[path[1:]].to(state.keys.device)
        return state

    def _advance(self, state: FeatureState, root: int) -> tuple[Tensor, Tensor]:
        """Run the rows the target has verified. Returns the last row's (state [1, H], log-probabilities [V_draft]).

        With one layer only the last row's output is read; the others leave nothing but keys and values.
        """
        assert self._embed is not None, "bind the draft to its target first"
        tokens = torch.cat((state.tokens, state.tokens.new_tensor([root])))
        past = state.keys.shape[1]
        positions = torch.arange(past, past + tokens.numel(), device=tokens.device)
        layer = self.midlayer
        residual, x = layer.inputs(self._embed(tokens).to(self.dtype), self.fuse(state.states))
        key, value = layer.self_attn.key_value(x, positions)
        state.keys = torch.cat((state.keys, key.transpose(0, 1)), dim=1)
        state.values = torch.cat((state.values, value.transpose(0, 1)), dim=1)
        query = layer.self_attn.query(x[-1:], positions[-1:])
        fed, read = self.readout(layer.outputs(residual[-1:], attend(query, state.keys, state.values)))
        return fed, self._log_q(read)[0]

    def _log_q(self, read: Tensor) -> Tensor:
        """[M, H] -> log-probabilities [M, V_draft]."""
        return self.lm_head(read).float().log_softmax(-1)


class TreeStep:
    """Runs tree nodes through the draft, one call per level; each node sees the committed rows, its ancestors and
    itself. Rows are numbered in the order they were run."""

    def __init__(self, draft: FeatureDrafter, state: FeatureState, last: Tensor) -> None:
        self.draft, self.keys, self.values = draft, state.keys, state.values
        self.committed = state.keys.shape[1]
        self.states = last  # row 0 is the last committed row, so tree row r lies at r + 1
        self.mask = LevelMask(last.device)
        self.depth = 0

    def __call__(self, tokens: Tensor, parent_rows: Tensor) -> Tensor:
        """Target ids [M] and their parents' row numbers [M] (-1: the root) -> log-probabilities [M, V_draft]."""
        draft, layer = self.draft, self.draft.midlayer
        assert draft._embed is not None
        embeds = draft._embed(tokens).to(self.states.dtype)
        residual, x = layer.inputs(embeds, self.states[parent_rows + 1])
        positions = torch.full_like(tokens, self.committed + self.depth)
        key, value = layer.self_attn.key_value(x, positions)
        self.keys = torch.cat((self.keys, key.transpose(0, 1)), dim=1)
        self.values = torch.cat((self.values, value.transpose(0, 1)), dim=1)
        seen = F.pad(self.mask.extend(parent_rows), (self.committed, 0), value=True)
        query = layer.self_attn.query(x, positions)
        fed, read = draft.readout(layer.outputs(residual, attend(query, self.keys, self.values, seen)))
        self.states = torch.cat((self.states, fed))
        self.depth += 1
        return draft._log_q(read)
