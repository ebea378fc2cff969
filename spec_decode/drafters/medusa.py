"""Medusa draft (arXiv:2401.10774, section 2.1): parallel heads on the target's last hidden state.

    h_t                                    [H]   after the target's final norm; the target's own head predicts x[t+1]
    q^i = softmax(head_i(h_t))             [V]   predicts x[t+2+i], i = 0 ... heads - 1
    head_i(h) = W_i block_n(... block_1(h))      block(h) = h + SiLU(W h + b), W and b zero at first

No head sees what another proposes, so every node of a level has the same children: a static tree is the Cartesian
product of the heads' best tokens (section 2.1.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_decode.drafter import check_draft_vocabulary, check_sizes
from spec_decode.errors import DraftwrightError, check_positive, check_type
from spec_decode.growth import grow, same_children
from spec_decode.heads_drafter import HeadsDrafter
from spec_decode.sampling import GREEDY, Sampling
from spec_decode.target import Target, TargetSpec
from spec_decode.tree import Tree, TreePlan


@dataclass(frozen=True)
class MedusaConfig:
    """num_heads: tokens proposed beyond the target's own; num_layers: residual blocks in each head;
    draft_vocab_size: tokens that the heads score, 0 for all of the target's."""

    hidden_size: int
    vocab_size: int
    num_heads: int = 4
    num_layers: int = 1
    draft_vocab_size: int = 0
    target: str = ""
    tokenizer: str = ""

    def __post_init__(self) -> None:
        check_positive(hidden_size=self.hidden_size, vocab_size=self.vocab_size, num_heads=self.num_heads)
        check_type("num_layers", self.num_layers, int, "an int")
        check_type("draft_vocab_size", self.draft_vocab_size, int, "an int")
        if self.num_layers < 0:
            raise DraftwrightError(f"num_layers must be at least 0, got {self.num_layers}")
        check_draft_vocabulary(self.draft_vocab_size, self.vocab_size)
        object.__setattr__(self, "draft_vocab_size", self.draft_vocab_size or self.vocab_size)

    @classmethod
    def for_target(cls, spec: TargetSpec, **changes: Any) -> Self:
        """Heads shaped for the target; `changes` override single fields."""
        fields: dict[str, Any] = {"hidden_size": spec.hidden_size, "vocab_size": spec.vocab_size, "target": spec.name}
        return cls(**(fields | changes))


class MedusaBlock(nn.Module):
    """h + SiLU(linear(h)), the identity at first: [..., H] -> [..., H]."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + F.silu(self.linear(hidden))


class MedusaHead(nn.Module):
    """num_layers residual blocks, then a linear layer to the vocabulary: [..., H] -> logits [..., V].

    Raises TypeError and ValueError that name the argument.
    """

    def __init__(self, hidden_size: int, vocab_size: int, num_layers: int = 1) -> None:
        super().__init__()
        check_positive(hidden_size=hidden_size, vocab_size=vocab_size)
        check_type("num_layers", num_layers, int, "an int")
        if num_layers < 0:
            raise DraftwrightError(f"num_layers must be at least 0, got {num_layers}")
        self.blocks = nn.Sequential(*(MedusaBlock(hidden_size) for _ in range(num_layers)))
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        check_type("hidden", hidden, Tensor, "a tensor [..., H]")
        return self.lm_head(self.blocks(hidden))


class MedusaDraftModel(HeadsDrafter):
    """See the module's docstring. Decode with `speculative_decode`."""

    config: MedusaConfig

    def __init__(self, config: MedusaConfig) -> None:
        check_type("config", config, MedusaConfig, "a MedusaConfig")
        super().__init__(config)
        self.medusa = nn.ModuleList(
            MedusaHead(config.hidden_size, config.draft_vocab_size, config.num_layers) for _ in range(config.num_heads)
        )

    def bind(self, target: Target) -> None:
        check_sizes(self.config, target.spec)

    def forward(self, hidden: Tensor) -> Tensor:
        """Target states [..., H] -> logits of every head [heads, ..., V]."""
        check_type("hidden", hidden, Tensor, "a tensor [..., H]")
        return torch.stack([head(hidden) for head in self.medusa])

    def heads(self) -> list[Tensor]:
        return [head.lm_head.weight for head in self.medusa]  # type: ignore[union-attr,misc]

    # --- decoding --------------------------------------------------------------------------------------------------

    def propose(
        self,
        state: Tensor,
        root: int,
        plan: TreePlan,
        sampling: Sampling = GREEDY,
        generator: torch.Generator | None = None,
    ) -> Tree:
        plan = plan.cut(self.config.num_heads)
        hidden = state.to(self.heads()[0].dtype)
        levels = (head(hidden).float().log_softmax(-1) for head in self.medusa)  # a shallow plan leaves heads alone
        first, step, vocabulary = next(levels), same_children(levels), self.draft_vocabulary()
        return grow(first, step, plan, root, vocabulary, sampling=sampling, generator=generator)
