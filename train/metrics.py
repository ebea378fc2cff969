"""What is measured while training, against the target's distribution over its full vocabulary.

Sums are kept and divided at the end, never a mean of means.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchmetrics import Metric

from data.alignment import Alignment
from train.losses import Loss

CHUNK_ROWS = 64  # tokens whose logits over the full vocabulary exist at a time


class UnrollMetrics(Metric):
    """Of K unrolled steps: loss, accuracy (draft argmax is the target's argmax), acceptance probability
    sum_v min(p(v), q(v)), and the simulated acceptance length tau = 1 + sum_k P(first k all right) from joint
    counts. A target token outside the draft vocabulary counts as a miss."""

    full_state_update = False

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        for name in ("loss", "correct", "accepted", "tokens", "chains", "chains_right"):
            self.add_state(name, torch.zeros(steps, dtype=torch.float64), dist_reduce_fx="sum")

    loss: Tensor
    correct: Tensor
    accepted: Tensor
    tokens: Tensor
    chains: Tensor
    chains_right: Tensor

    @torch.no_grad()
    def update(
        self,
        states: Tensor,
        heads: Sequence[Tensor],
        target_states: Tensor,
        head_weight: Tensor,
        vocabulary: Tensor,
        alignment: Alignment,
        loss: Loss,
    ) -> None:
        """states [K, S, H] of the draft and heads [V_draft, H], one for each step or one for all; target_states
        [S, H'], or [K, S, H'] where steps predict other tokens, and head_weight [V, H']; vocabulary [V_draft]: target
        id of every draft id."""
        right = torch.zeros_like(alignment.valid)
        size = max(1, CHUNK_ROWS // (self.steps if target_states.dim() == 3 else 1))
        for start in range(0, states.shape[1], size):
            rows = slice(start, start + size)
            valid = alignment.valid[:, rows]
            full = (target_states[..., rows, :] @ head_weight.T).float()
            restricted = full[..., vocabulary]
            logits = _logits(states[:, rows], heads).float()
            p = (restricted - full.logsumexp(dim=-1, keepdim=True)).exp()
            right[:, rows] = (vocabulary[logits.argmax(-1)] == full.argmax(-1)) & valid
            self.accepted += (torch.minimum(p, logits.softmax(-1)).sum(-1) * valid).sum(1)
            self.loss += (loss(logits, restricted.softmax(-1)) * valid).sum(1)
        self.correct += right.sum(1)
        self.tokens += alignment.valid.sum(1)
        self._count_chains(right, alignment)

    def _count_chains(self, right: Tensor, alignment: Alignment) -> None:
        """A chain starts at a row; its k-th token is step k - 1 of that row."""
        shape = (self.steps, alignment.rows.numel())
        by_row, exists = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
        for step in range(self.steps):
            valid = alignment.valid[step]
            index = alignment.index[step, valid].cpu()
            by_row[step, index] = right[step, valid].cpu()
            exists[step, index] = True
        whole = exists.int().cumprod(0).bool()
        self.chains += whole.sum(1).to(self.chains)
        self.chains_right += (by_row & whole).int().cumprod(0).sum(1).to(self.chains)

    def compute(self) -> dict[str, Tensor]:
        """Names to scalars: loss/k, accuracy/k, acceptance/k for each step k, and tau."""
        tokens = self.tokens.clamp(min=1)
        result = {"tau": 1 + (self.chains_right / self.chains.clamp(min=1)).sum()}
        for name, sums in (("loss", self.loss), ("accuracy", self.correct), ("acceptance", self.accepted)):
            result |= {f"{name}/{step}": value for step, value in enumerate(sums / tokens)}
        return {name: value.float() for name, value in result.items()}


def _logits(states: Tensor, heads: Sequence[Tensor]) -> Tensor:
    """states [K, R, H] -> [K, R, V_draft]."""
    if len(heads) == 1:
        return states @ heads[0].T.to(states.dtype)
    return torch.stack([state @ head.T.to(state.dtype) for state, head in zip(states, heads, strict=True)])
