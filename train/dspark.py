"""DSpark (arXiv:2607.05147): DFlash's training with true tokens before each predicted one, and a confidence head.

    loss = sum over k of decay^k * mean over anchors of  L(p^k, q^k) + BCE(c_k, sum_v min(p^k(v), q^k(v)))

L is 0.1 cross-entropy + 0.9 |p - q|_1, and |p - q|_1 is twice the total variation. Cross-entropy is taken against the
target's distribution, of which the data's token is one draw when the data are the target's own answers
(`python -m data regenerate`). What the confidence head learns, the probability of acceptance, carries no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from data.batch import Batch
from spec_decode.drafters.dspark import DSparkDraft
from train.block import BlockModule
from train.losses import Loss, acceptance


class DSparkModule(BlockModule):
    """As for any block; the confidence is one more row of the head, so that one pass over the logits serves both."""

    draft: DSparkDraft

    def unroll(self, batch: Batch, rows: Tensor) -> Tensor:
        hidden = super().unroll(batch, rows)
        before = rows + 1 + torch.arange(self.steps, device=rows.device)[:, None]
        # A row whose token would lie beyond its document gets some other one: nothing reads that row.
        return self.draft.joined(hidden, batch.ids[before.clamp(max=batch.ids.numel() - 1)])

    def _objective(self) -> tuple[list[Tensor], Loss]:
        return [torch.cat((*self.draft.heads(), self.draft.confidence[None]))], self._with_confidence

    def _with_confidence(self, logits: Tensor, p: Tensor) -> Tensor:
        """logits [..., V + 1], the last column the confidence's; p [..., V] -> [...]."""
        tokens, confidence = logits[..., :-1], logits[..., -1] + self.draft.config.confidence_bias
        accepted = acceptance(tokens.detach(), p)
        return self.loss(tokens, p) + F.binary_cross_entropy_with_logits(confidence, accepted, reduction="none")
