"""Hydra draft (arXiv:2402.05109, section 3): Medusa's heads, each of which also reads the tokens drafted before it.

    h_t                                                                         [H]   the target's last state
    q^i = softmax(W_i block_i [h_t; e(x_{t+1}); ... e(x_{t+1+i})])              [V]   predicts x_{t+2+i}
    block_i(u) = R_i u + SiLU(L_i u + b_i)                                      [(i + 2) H] -> [H]

A head depends on the path to its node, so unlike Medusa's the levels of a tree differ from branch to branch. The
embedding e is the target's and not stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_decode.drafter import check_draft_vocabulary, check_sizes
from spec_decode.errors import check_positive, check_type
from spec_decode.growth import grow
from spec_decode.heads_drafter import HeadsDrafter
from spec_decode.sampling import GREEDY, Sampling
from spec_decode.target import Target, TargetSpec
from spec_decode.tree import Tree, TreePlan


@dataclass(frozen=True, kw_only=True)
class HydraConfig:
    """num_heads: tokens proposed beyond the target's own; draft_vocab_size: tokens that the heads score."""

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_heads: int = 4
    target: str = ""
    tokenizer: str = ""

    def __post_init__(self) -> None:
        check_positive(hidden_size=self.hidden_size, vocab_size=self.vocab_size, num_heads=self.num_heads)
        check_positive(draft_vocab_size=self.draft_vocab_size)
        check_draft_vocabulary(self.draft_vocab_size, self.vocab_size)

    @classmethod
    def for_target(cls, spec: TargetSpec, **changes: Any) -> Self:
        """Heads shaped for the target; `changes` override single fields."""
        fields: dict[str, Any] = {
            "hidden_size": spec.hidden_size,
            "vocab_size": spec.vocab_size,
            "draft_vocab_size": spec.vocab_size,
            "target": spec.name,
        }
        return cls(**(fields | changes))


class HydraHead(nn.Module):
    """R u + SiLU(L u + b), then a linear layer to the draft vocabulary. R starts by passing h_t on, L and b as zero,
    so at first a head is its unembedding of h_t."""

    def __init__(self, hidden_size: int, inputs: int, vocab_size: int) -> None:
        super().__init__()
        self.residual = nn.Linear(inputs * hidden_size, hidden_size, bias=False)
        self.linear = nn.Linear(inputs * hidden_size, hidden_size)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
        with torch.no_grad():
            self.residual.weight.zero_()
            self.residual.weight[:, :hidden_size] = torch.eye(hidden_size)
            nn.init.zeros_(self.linear.weight)
            nn.init.zeros_(self.linear.bias)

    def state(self, inputs: Tensor) -> Tensor:
        """[..., (i + 2) H] -> what lm_head reads [..., H]."""
        return self.residual(inputs) + F.silu(self.linear(inputs))


class HydraDraft(HeadsDrafter):
    """See the module's docstring."""

    config: HydraConfig

    def __init__(self, config: HydraConfig) -> None:
        check_type("config", config, HydraConfig, "a HydraConfig")
        super().__init__(config)
        self.hydra = nn.ModuleList(
            HydraHead(config.hidden_size, head + 2, config.draft_vocab_size) for head in range(config.num_heads)
        )
        self._embed: Callable[[Tensor], Tensor] | None = None

    def bind(self, target: Target) -> None:
        check_sizes(self.config, target.spec)
        self._embed = target.embed

    def heads(self) -> list[Tensor]:
        return [head.lm_head.weight for head in self.hydra]  # type: ignore[union-attr,misc]

    # --- decoding --------------------------------------------------------------------------------------------------

    def propose(
        self,
        state: Tensor,
        root: int,
        plan: TreePlan,
        sampling: Sampling = GREEDY,
        generator: torch.Generator | None = None,
    ) -> Tree:
        step = _TreeStep(self, state)
        first = step(torch.tensor([root], device=state.device), torch.tensor([-1], device=state.device))
        return grow(
            first[0],
            step,
            plan.cut(self.config.num_heads),
            root,
            self.draft_vocabulary(),
            sampling=sampling,
            generator=generator,
        )


class _TreeStep:
    """Runs one level of a tree, the root first: each head once, over all nodes of its level."""

    def __init__(self, draft: HydraDraft, state: Tensor) -> None:
        assert draft._embed is not None, "bind the draft to its target first"
        self.draft, self.depth = draft, 0
        self.inputs: list[Tensor] = []  # of every row run, row r - 1 of the tree at r: [(depth + 2) H]
        self.hidden = state.to(draft.heads()[0].dtype)

    def __call__(self, tokens: Tensor, parent_rows: Tensor) -> Tensor:
        """Target ids [M] and their parents' row numbers [M] (-1: the root) -> log-probabilities [M, V_draft]."""
        assert self.draft._embed is not None
        embeds = self.draft._embed(tokens).to(self.hidden.dtype)
        before = [self.inputs[row + 1] if self.inputs else self.hidden for row in parent_rows.tolist()]
        inputs = torch.cat((torch.stack(before), embeds), dim=-1)
        self.inputs += list(inputs)
        head: Any = self.draft.hydra[self.depth]
        self.depth += 1
        return head.lm_head(head.state(inputs)).float().log_softmax(-1)
