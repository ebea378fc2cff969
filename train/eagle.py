"""EAGLE-1 and HASS: the draft also learns the target's next state.

    loss = regression * SmoothL1(f^_{t+1}, f_{t+1}) + the loss on tokens           (EAGLE, arXiv:2401.15077, eq. 3)

EAGLE-1 runs one step on the target's states, with noise on them; HASS (arXiv:2408.15766) runs several on the draft's
own, which is training-time test; as in its code no gradient flows from one step into the state that it starts from.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from conf.check import NonNegative
from data.batch import Batch
from spec_decode.feature_drafter import FeatureDrafter
from train.module import DraftModule, Unrolled
from train.unroll import training_time_test

NOISE_LENGTH = 512  # tokens of the sequence whose noise is `noise` wide; longer ones get less (EAGLE's code)


class EagleModule(DraftModule):
    """regression: weight of the loss on states; noise: width of the uniform noise on the target's states."""

    draft: FeatureDrafter

    def __init__(
        self,
        draft: FeatureDrafter,
        target: Any,
        *,
        regression: NonNegative,
        noise: NonNegative,
        **options: Any,
    ) -> None:
        super().__init__(draft, target, **options)
        self.regression, self.noise = regression, noise

    def unroll(self, batch: Batch, rows: Tensor) -> Tensor:
        states = self.draft.target_states(batch).to(self.draft.dtype)
        if self.training and self.noise:
            lengths = batch.offsets.diff().repeat_interleave(batch.offsets.diff())
            width = self.noise * NOISE_LENGTH / lengths[:, None]
            states = states + (torch.rand_like(states) - 0.5) * width
        return training_time_test(self.draft, self.target, batch, states, rows, self.steps, detach=True)

    def _loss(self, unrolled: Unrolled) -> tuple[Tensor, Tensor]:
        loss, steps = super()._loss(unrolled)
        wanted = unrolled.target_states.to(unrolled.states.dtype).expand_as(unrolled.states)
        distance = F.smooth_l1_loss(unrolled.states, wanted, reduction="none").mean(dim=-1)
        valid = unrolled.alignment.valid
        by_step = (distance * valid).sum(dim=1) / self._counts(unrolled, valid)
        decay = self.decay ** torch.arange(self.steps, device=valid.device)
        return loss + self.regression * (decay * by_step).sum(), steps
