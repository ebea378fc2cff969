"""Block draft (DFlash, arXiv:2602.06036): all tokens of a block in one pass.

    c   = hidden_norm(fc [f_1; ... f_m])                 [T, mH] -> [T, H]    m target states, fused once
    x   = [e(anchor), mask, ..., mask]                   [B, H]               anchor: the last committed token
    x  <- layer(x)     queries: x; keys and values: c and x                   in every layer, c the same
    q^k = softmax(W norm(x)_{k+1})                       [V]                  predicts x_{anchor+1+k}, k = 0 ... K - 1

Context row t sits at position t, the anchor at position T, slot j at T + j. The block sees the target's states before
its anchor alone, since the target has not run the anchor yet, and itself: in both directions, or causally
(`causal`). Slot 0 repeats the anchor and predicts nothing, unless labels are shifted (`shifted`): then slot k
predicts x_{anchor+1+k}, as in DSpark (`spec_decode.drafters.dspark`).

Like Medusa's heads, no slot sees what another proposes, so every node of a level has the same children.

Published drafts mask with a reserved row of the target's embedding. SmolLM2 has none that is known to be unused, so by
default the draft learns a mask of its own; `mask_token` names a row of the target instead. Embedding and head are the
target's and not stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from spec_decode.drafter import VocabularyDrafter, check_sizes
from spec_decode.errors import check_positive, check_type, type_error
from spec_decode.feature_drafter import DraftAttention, FeatureDraftConfig, check_mask_token
from spec_decode.growth import grow, same_children
from spec_decode.layers import FrozenHead, GatedMLP, attend
from spec_decode.sampling import GREEDY, Sampling
from spec_decode.target import Target, TargetOutput, TargetSpec, check_taps, default_taps
from spec_decode.tree import Tree, TreePlan


@dataclass(frozen=True, kw_only=True)
class BlockConfig(FeatureDraftConfig):
    """Everything that shapes a block draft. target_layers in Hugging Face numbering; num_drafts: tokens that a block
    proposes; mask_token: target id whose embedding masks, None for a learned one."""

    target_layers: tuple[int, ...]
    num_layers: int = 3
    num_drafts: int = 7
    causal: bool = False
    shifted: bool = False
    mask_token: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(num_layers=self.num_layers, num_drafts=self.num_drafts)
        check_type("target_layers", self.target_layers, list | tuple, "a list of ints")
        object.__setattr__(self, "target_layers", tuple(self.target_layers))
        for name in ("causal", "shifted"):
            if type(getattr(self, name)) is not bool:
                raise type_error(name, getattr(self, name), "true or false")
        check_mask_token(self.mask_token, self.vocab_size)

    @property
    def block_size(self) -> int:
        """Slots of a block, the anchor's included."""
        return self.num_drafts + (not self.shifted)

    @classmethod
    def for_target(cls, spec: TargetSpec, *, target_layers: tuple[int, ...] | None = None, **changes: Any) -> Self:
        """Layers shaped like the target's; `changes` override single fields."""
        taps = check_taps(tuple(target_layers), spec.num_layers) if target_layers else default_taps(spec.num_layers)
        return super().for_target(spec, target_layers=taps, **changes)


class BlockAttention(DraftAttention):
    """Each head's queries and keys are normed before they are rotated, as in Qwen3."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config, config.hidden_size)
        self.q_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)

    def query(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.rope.rotate(_normed(self.q_norm, self.q_proj(x)), positions)

    def key_value(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        key = self.rope.rotate(_normed(self.k_norm, self.k_proj(x)), positions)
        return key, self.v_proj(x).unflatten(-1, (-1, self.head_dim))


def _normed(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """[M, heads * d] -> [M, heads, d], normed in the weights' precision, in x's dtype."""
    return norm(x.unflatten(-1, (-1, norm.weight.numel())).to(norm.weight.dtype)).to(x.dtype)


class BlockLayer(nn.Module):
    """A decoder layer over the block, whose attention also has the context's keys and values."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = BlockAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    def outputs(self, x: Tensor, attended: Tensor) -> Tensor:
        """x [M, H], attended [M, heads * d] -> [M, H]."""
        hidden = x + self.self_attn.o_proj(attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


@dataclass
class BlockState:
    """Keys and values of the context in each layer, [kv_heads, T, d], and target states that aren't in them yet,
    [M, mH]."""

    keys: list[Tensor]
    values: list[Tensor]
    features: Tensor


class BlockDraft(VocabularyDrafter):
    """See the module's docstring."""

    config: BlockConfig
    layers: Any  # an nn.ModuleList of BlockLayer

    def __init__(self, config: BlockConfig) -> None:
        check_type("config", config, BlockConfig, "a BlockConfig")
        super().__init__(config)
        self.taps = config.target_layers
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(self.taps) * size, size, bias=False)
        self.hidden_norm = nn.RMSNorm(size, eps)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(size, eps)
        if config.mask_token is None:
            self.mask = nn.Parameter(0.02 * torch.randn(size))
        self.lm_head = FrozenHead(size, config.draft_vocab_size)
        self._embed: Callable[[Tensor], Tensor] | None = None

    def bind(self, target: Target) -> None:
        check_sizes(self.config, target.spec)
        check_taps(self.taps, target.spec.num_layers)
        self._embed = target.embed
        self.init_head(target.head_weight())

    def init_head(self, head_weight: Tensor) -> None:
        self.lm_head.weight.copy_(head_weight.detach()[self.vocabulary().to(head_weight.device)])

    def heads(self) -> list[Tensor]:
        return [self.lm_head.weight]

    # --- computing -------------------------------------------------------------------------------------------------

    def fuse(self, features: Tensor) -> Tensor:
        """Target states [..., mH], in the target's dtype -> c [..., H]."""
        # Autocast multiplies in 16 bits, but the norm keeps its precision.
        return self.hidden_norm(self.fc(features.to(self.dtype)).to(self.dtype))

    def inputs(self, anchors: Tensor) -> Tensor:
        """Target ids [R] -> the inputs of their blocks [R, B, H]."""
        assert self._embed is not None, "bind the draft to its target first"
        first = self._embed(anchors).to(self.dtype)[:, None]
        mask = self.mask if self.config.mask_token is None else self._embed(anchors.new_tensor(self.config.mask_token))
        return torch.cat((first, mask.to(self.dtype).expand(len(anchors), self.config.block_size - 1, -1)), dim=1)

    def outputs(self, x: Tensor) -> Tensor:
        """The last layer's output [R, B, H] -> what the head reads of every slot that predicts, [R, K, H]."""
        return self.norm(x[:, self.config.block_size - self.config.num_drafts :])

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    # --- decoding --------------------------------------------------------------------------------------------------

    def start(self, output: TargetOutput, ids: Tensor) -> BlockState:
        assert output.features is not None
        empty = self.lm_head.weight.new_empty(self.config.num_kv_heads, 0, self.config.head_dim)
        return BlockState([empty] * len(self.layers), [empty] * len(self.layers), output.features[0])

    def propose(
        self,
        state: BlockState,
        root: int,
        plan: TreePlan,
        sampling: Sampling = GREEDY,
        generator: torch.Generator | None = None,
    ) -> Tree:
        plan = plan.cut(self.config.num_drafts)
        logits = self.lm_head(self.run_block(state, root)[: plan.depth])
        logp = logits.float().log_softmax(-1)
        step, vocabulary = same_children(logp[1:]), self.draft_vocabulary()
        return grow(logp[0], step, plan, root, vocabulary, sampling=sampling, generator=generator)

    def commit(self, state: BlockState, tree: Tree, path: Tensor, output: TargetOutput) -> BlockState:
        assert output.features is not None
        state.features = output.features[0, path]
        return state

    def run_block(self, state: BlockState, root: int) -> Tensor:
        """What the head reads of every slot that predicts, [K, H], behind the token `root`.

        The state takes in the rows that the target has verified; what the block itself adds to keys and values is
        dropped.
        """
        past, new = state.keys[0].shape[1], len(state.features)
        context, state.features = self.fuse(state.features), state.features[:0]
        positions = torch.arange(past, past + new + self.config.block_size, device=context.device)
        slots = positions[new:]
        visible = _causal(past + new, len(slots), context.device) if self.config.causal else None
        x = self.inputs(torch.tensor([root], device=context.device))[0]
        for index, layer in enumerate(self.layers):
            attention = layer.self_attn
            normed = layer.input_layernorm(x)
            key, value = attention.key_value(torch.cat((context, normed)), positions)
            keys = torch.cat((state.keys[index], key.transpose(0, 1)), dim=1)
            values = torch.cat((state.values[index], value.transpose(0, 1)), dim=1)
            state.keys[index], state.values[index] = keys[:, : past + new], values[:, : past + new]
            attended = attend(attention.query(normed, slots), keys, values, visible)
            x = layer.outputs(x, attended)
        return self.outputs(x[None])[0]


def _causal(context: int, slots: int, device: torch.device) -> Tensor:
    """bool [slots, context + slots]: a slot sees all of the context and the slots up to itself."""
    return torch.ones(slots, context + slots, dtype=torch.bool, device=device).tril(context)
