"""EAGLE-3 draft (arXiv:2503.01840, section 3), in the layout that SGLang and vLLM read.

    g_t   = fc [low; mid; high]_t               [T, 3H] -> [T, H]    three target states, fused
    a^0_t = layer(e(x_{t+1}), g_t)              the target's features, step 0
    a^k_t = layer(e(x_{t+1+k}), a^{k-1}_t)      the draft's own state, k >= 1
    q^k_t = softmax(lm_head(norm(a^k_t)))       predicts x_{t+2+k}, over the draft vocabulary

Row t sits at position t; its embedded token is the next one. The layer has one attention block whose queries,
keys and values read [norm(e); norm(g)], 2H wide. The embedding is the target's and not stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spec_decode.checkpoint import open_draft, save_draft
from spec_decode.drafter import VocabularyDrafter, check_sizes
from spec_decode.errors import DraftwrightError, check_type
from spec_decode.growth import LevelMask, grow
from spec_decode.layers import GatedMLP, Rope, attend
from spec_decode.sampling import GREEDY, Sampling
from spec_decode.target import Target, TargetOutput, TargetSpec, check_taps, default_taps
from spec_decode.tree import Tree, TreePlan


@dataclass(frozen=True)
class Eagle3Config:
    """Everything that shapes an EAGLE-3 draft. target_layers in Hugging Face numbering (hidden_states[j]).

    fusion: "split" is the released layout; "linear" is the paper's written form, x = fuse([f; e]) followed by an
    ordinary decoder layer. fc_norm and norm_output are EAGLE-3.1's (arXiv:2605.09992).
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_layers: tuple[int, ...]
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_positions: int
    fusion: str = "split"
    fc_norm: bool = False
    norm_output: bool = False
    target: str = ""
    tokenizer: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_layers", tuple(self.target_layers))
        if self.fusion not in ("split", "linear"):
            raise DraftwrightError(f"fusion '{self.fusion}' is unknown; choose split or linear")
        Rope(self.rope_parameters, self.head_dim)  # refuses what drafts can't compute
        if self.draft_vocab_size > self.vocab_size:
            raise DraftwrightError(
                f"draft_vocab_size {self.draft_vocab_size} exceeds the target's vocabulary of {self.vocab_size} tokens"
            )

    @classmethod
    def for_target(
        cls, spec: TargetSpec, *, target_layers: tuple[int, ...] | None = None, **changes: Any
    ) -> Eagle3Config:
        """A draft shaped like one layer of the target; `changes` override single fields."""
        taps = check_taps(tuple(target_layers), spec.num_layers) if target_layers else default_taps(spec.num_layers)
        fields: dict[str, Any] = {
            "hidden_size": spec.hidden_size,
            "intermediate_size": spec.intermediate_size,
            "num_heads": spec.num_heads,
            "num_kv_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            "vocab_size": spec.vocab_size,
            "draft_vocab_size": spec.vocab_size,
            "target_layers": taps,
            "rms_norm_eps": spec.rms_norm_eps,
            "rope_parameters": spec.rope_parameters,
            "max_positions": spec.max_positions,
            "target": spec.name,
        }
        return cls(**(fields | changes))


class Eagle3Attention(nn.Module):
    """Projections only; what attends to what differs between training and decoding."""

    def __init__(self, config: Eagle3Config, input_size: int) -> None:
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


class Eagle3Layer(nn.Module):
    """The draft's decoder layer, split where training and decoding differ: inputs -> (attention) -> outputs."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.split = config.fusion == "split"
        self.input_layernorm = nn.RMSNorm(size, eps)
        if self.split:
            self.hidden_norm = nn.RMSNorm(size, eps)
        else:
            self.fuse = nn.Linear(2 * size, size, bias=False)
        self.self_attn = Eagle3Attention(config, 2 * size if self.split else size)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)
        self.mlp = GatedMLP(size, config.intermediate_size)

    def inputs(self, embeds: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """embeds, states [M, H] -> (residual [M, H], attention input [M, 2H] or [M, H])."""
        if self.split:
            return states, torch.cat((self.input_layernorm(embeds), self.hidden_norm(states)), dim=-1)
        # Autocast multiplies in 16 bits, but the residual stream keeps its precision.
        fused = self.fuse(torch.cat((states, embeds.to(states.dtype)), dim=-1)).to(states.dtype)
        return fused, self.input_layernorm(fused)

    def outputs(self, residual: Tensor, attended: Tensor) -> Tensor:
        """residual [M, H], attended [M, heads * d] -> [M, H]."""
        hidden = residual + self.self_attn.o_proj(attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


@dataclass
class Eagle3State:
    """Keys and values of committed rows, [kv_heads, T, d], and rows whose next token wasn't known yet:
    features [M, 3H] and the tokens that follow all of them but the last, [M - 1]."""

    keys: Tensor
    values: Tensor
    features: Tensor
    tokens: Tensor


class Eagle3Draft(VocabularyDrafter):
    """See the module's docstring. Parameters carry the names that serving engines read."""

    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        check_type("config", config, Eagle3Config, "an Eagle3Config")
        super().__init__(config)
        self.taps = config.target_layers
        size, fused = config.hidden_size, len(config.target_layers) * config.hidden_size
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(size, config.rms_norm_eps) for _ in config.target_layers)
        self.fc = nn.Linear(fused, size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self._embed: Callable[[Tensor], Tensor] | None = None

    def bind(self, target: Target) -> None:
        check_sizes(self.config, target.spec)
        check_taps(self.taps, target.spec.num_layers)
        self._embed = target.embed

    # --- computing -------------------------------------------------------------------------------------------------

    def fuse(self, features: Tensor) -> Tensor:
        """features [..., 3H] in the target's dtype -> g [..., H]."""
        features = features.to(self.fc.weight.dtype)
        if self.config.fc_norm:
            chunks = features.chunk(len(self.taps), dim=-1)
            features = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return self.fc(features)

    def readout(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Layer output [..., H] -> (state fed to the next step, normed state that lm_head reads)."""
        normed = self.norm(hidden)
        return (normed if self.config.norm_output else hidden), normed

    # --- decoding --------------------------------------------------------------------------------------------------

    def start(self, output: TargetOutput, ids: Tensor) -> Eagle3State:
        assert output.features is not None
        weight = self.fc.weight
        empty = weight.new_empty(self.config.num_kv_heads, 0, self.config.head_dim)
        return Eagle3State(empty, empty, output.features[0], ids[1:])

    def propose(
        self,
        state: Eagle3State,
        root: int,
        plan: TreePlan,
        sampling: Sampling = GREEDY,
        generator: torch.Generator | None = None,
    ) -> Tree:
        last, logp = self._advance(state, root)
        step = _TreeStep(self, state, last)
        return grow(logp, step, plan, root, self.draft_vocabulary(), sampling=sampling, generator=generator)

    def commit(self, state: Eagle3State, tree: Tree, path: Tensor, output: TargetOutput) -> Eagle3State:
        assert output.features is not None
        state.features = output.features[0, path]
        state.tokens = tree.tokens[path[1:]].to(state.keys.device)
        return state

    def _advance(self, state: Eagle3State, root: int) -> tuple[Tensor, Tensor]:
        """Run the rows the target has verified. Returns the last row's (state [1, H], log-probabilities [V_draft]).

        With one layer only the last row's output is read; the others leave nothing but keys and values.
        """
        assert self._embed is not None, "bind the draft to its target first"
        tokens = torch.cat((state.tokens, state.tokens.new_tensor([root])))
        past = state.keys.shape[1]
        positions = torch.arange(past, past + tokens.numel(), device=tokens.device)
        layer = self.midlayer
        residual, x = layer.inputs(self._embed(tokens).to(self.fc.weight.dtype), self.fuse(state.features))
        key, value = layer.self_attn.key_value(x, positions)
        state.keys = torch.cat((state.keys, key.transpose(0, 1)), dim=1)
        state.values = torch.cat((state.values, value.transpose(0, 1)), dim=1)
        query = layer.self_attn.query(x[-1:], positions[-1:])
        hidden = layer.outputs(residual[-1:], attend(query, state.keys, state.values))
        fed, normed = self.readout(hidden)
        return fed, self.lm_head(normed)[0].float().log_softmax(-1)

    # --- files -----------------------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | Path, readme: str = "") -> None:
        save_draft(self, Path(folder), readme)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Eagle3Draft:
        """Load a folder written by `save_pretrained`.

        Raises DraftwrightError that names the missing, unexpected or wrongly shaped tensor or config key.
        """
        return open_draft(cls, Path(folder))


class _TreeStep:
    """Runs tree nodes through the draft, one call per level; each node sees the committed rows, its ancestors and
    itself. Rows are numbered in the order they were run."""

    def __init__(self, draft: Eagle3Draft, state: Eagle3State, last: Tensor) -> None:
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
        seen = nn.functional.pad(self.mask.extend(parent_rows), (self.committed, 0), value=True)
        query = layer.self_attn.query(x, positions)
        fed, normed = draft.readout(layer.outputs(residual, attend(query, self.keys, self.values, seen)))
        self.states = torch.cat((self.states, fed))
        self.depth += 1
        return draft.lm_head(normed).float().log_softmax(-1)
