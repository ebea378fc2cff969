"""EAGLE-3 with training-time test (arXiv:2503.01840, section 3; alignment and masks as in the released code).

MTP trains the same way: one module that is reused on its own states.
"""

from __future__ import annotations

from torch import Tensor

from data.batch import Batch
from spec_decode.feature_drafter import FeatureDrafter
from train.module import DraftModule
from train.unroll import training_time_test


class Eagle3Module(DraftModule):
    """Training-time test for any `FeatureDrafter`, with no loss but that on the tokens."""

    draft: FeatureDrafter

    def unroll(self, batch: Batch, rows: Tensor) -> Tensor:
        states = self.draft.target_states(batch)
        return training_time_test(self.draft, self.target, batch, states, rows, self.steps)
