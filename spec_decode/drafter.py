"""What every draft model is: something that proposes a tree of tokens from target states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from spec_decode.target import Target, TargetOutput
from spec_decode.tree import Tree, TreePlan


class Drafter(nn.Module, ABC):
    """Base of all drafts. One round of decoding is propose -> (target verifies) -> commit.

    taps: the target states that `start` and `commit` need, in Hugging Face numbering.
    """

    taps: tuple[int, ...] = ()
    needs_last_hidden = False

    @abstractmethod
    def bind(self, target: Target) -> None:
        """Take what is shared with the target (embeddings, head); raise DraftwrightError if it doesn't fit."""

    @abstractmethod
    def start(self, output: TargetOutput, ids: Tensor) -> Any:
        """Draft state after the prompt ids [P], from the target's output over all P rows ([1, P, ...])."""

    @abstractmethod
    def propose(self, state: Any, root: int, plan: TreePlan, generator: torch.Generator | None = None) -> Tree:
        """A tree whose node 0 is `root`, the last committed token, which the target has not processed yet."""

    @abstractmethod
    def commit(self, state: Any, tree: Tree, path: Tensor, output: TargetOutput) -> Any:
        """Draft state after the accepted `path` (node ids, root first) of a tree the target ran ([1, N, ...])."""
