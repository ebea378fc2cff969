"""What drafts that are heads on the target's last state share: Medusa and Hydra."""

from __future__ import annotations

from torch import Tensor

from spec_decode.drafter import VocabularyDrafter
from spec_decode.target import TargetOutput
from spec_decode.tree import Tree


class HeadsDrafter(VocabularyDrafter):
    """The state between rounds is the last row of target states [H], after the target's final norm."""

    needs_last_hidden = True

    def start(self, output: TargetOutput, ids: Tensor) -> Tensor:
        assert output.last_hidden is not None
        return output.last_hidden[0, -1]

    def commit(self, state: Tensor, tree: Tree, path: Tensor, output: TargetOutput) -> Tensor:
        assert output.last_hidden is not None
        return output.last_hidden[0, path[-1]]
