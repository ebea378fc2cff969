"""What every draft model is: something that proposes a tree of tokens from target states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from spec_decode.checkpoint import open_draft, save_draft
from spec_decode.errors import DraftwrightError
from spec_decode.growth import DraftVocabulary
from spec_decode.sampling import GREEDY, Sampling
from spec_decode.target import Target, TargetOutput, TargetSpec
from spec_decode.tree import Tree, TreePlan


class DraftConfig(Protocol):
    """What the config dataclass of every draft holds beside its own fields: whom it was trained for."""

    @property
    def target(self) -> str: ...

    @property
    def tokenizer(self) -> str:
        """Fingerprint of the tokenizer, empty where it isn't known."""
        ...


class Drafter(nn.Module, ABC):
    """Base of all drafts. One round of decoding is propose -> (target verifies) -> commit.

    taps: the target states that `start` and `commit` need, in Hugging Face numbering.
    """

    config: DraftConfig
    taps: tuple[int, ...] = ()
    needs_last_hidden = False

    @abstractmethod
    def bind(self, target: Target) -> None:
        """Take what is shared with the target (embeddings, head); raise DraftwrightError if it doesn't fit."""

    @abstractmethod
    def start(self, output: TargetOutput, ids: Tensor) -> Any:
        """Draft state after the prompt ids [P], from the target's output over all P rows ([1, P, ...])."""

    @abstractmethod
    def propose(
        self,
        state: Any,
        root: int,
        plan: TreePlan,
        sampling: Sampling = GREEDY,
        generator: torch.Generator | None = None,
    ) -> Tree:
        """A tree whose node 0 is `root`, the last committed token, which the target has not processed yet.

        sampling: the request's, which drawn siblings are drawn with.
        """

    @abstractmethod
    def commit(self, state: Any, tree: Tree, path: Tensor, output: TargetOutput) -> Any:
        """Draft state after the accepted `path` (node ids, root first) of a tree the target ran ([1, N, ...])."""


class SizedConfig(DraftConfig, Protocol):
    """The config of a draft that reads the target's states."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...


def check_sizes(config: SizedConfig, spec: TargetSpec) -> None:
    """Raise DraftwrightError if a draft was made for a target of other sizes."""
    for name, ours, theirs in (
        ("hidden size", config.hidden_size, spec.hidden_size),
        ("vocabulary", config.vocab_size, spec.vocab_size),
    ):
        if ours != theirs:
            raise DraftwrightError(
                f"the draft was trained for target '{config.target}' with {name} {ours}, but target "
                f"'{spec.name}' has {theirs}: choose the target that the draft belongs to"
            )


def check_draft_vocabulary(draft_vocab_size: int, vocab_size: int) -> None:
    """Raise DraftwrightError if a draft would propose from more tokens than the target has."""
    if not 0 <= draft_vocab_size <= vocab_size:
        raise DraftwrightError(
            f"draft_vocab_size {draft_vocab_size} exceeds the target's vocabulary of {vocab_size} tokens"
        )


class VocabularyConfig(SizedConfig, Protocol):
    """The config of a draft that proposes from a part of the target's vocabulary."""

    @property
    def draft_vocab_size(self) -> int: ...

    @classmethod
    def for_target(cls, spec: TargetSpec, **changes: Any) -> Self:
        """A draft shaped for the target; `changes` override single fields."""
        ...


class VocabularyDrafter(Drafter):
    """A draft that scores a part of the target's vocabulary.

    d2t: target id minus draft id, int64 [V_draft]; t2d: whether the draft has a target token, bool [V].
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: VocabularyConfig) -> None:
        super().__init__()
        self.config: VocabularyConfig = config
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.set_vocabulary(torch.arange(config.draft_vocab_size))

    def set_vocabulary(self, ids: Tensor) -> None:
        """Choose the target ids [V_draft] (ascending, distinct) that the draft can propose."""
        size = self.config.draft_vocab_size
        if ids.numel() != size or bool((ids[1:] <= ids[:-1]).any()):
            raise ValueError(f"draft vocabulary must be {size} ascending ids, got {ids.shape}")
        self.d2t.copy_(ids - torch.arange(ids.numel(), device=ids.device))
        self.t2d.zero_()
        self.t2d[ids] = True

    def vocabulary(self) -> Tensor:
        """Target id of every draft id, int64 [V_draft]."""
        return self.d2t + torch.arange(self.d2t.numel(), device=self.d2t.device)

    def draft_vocabulary(self) -> DraftVocabulary:
        """The same, as trees are grown with it."""
        return DraftVocabulary(self.vocabulary(), self.config.vocab_size)

    def init_head(self, head_weight: Tensor) -> None:
        """Start the draft's own heads from the target's rows [V, H] of the draft vocabulary."""
        with torch.no_grad():
            for weight in self.heads():
                weight.copy_(head_weight[self.vocabulary().to(head_weight.device)])

    @abstractmethod
    def heads(self) -> list[Tensor]:
        """The unembedding [V_draft, H] of each step, or one for all steps."""

    def save_pretrained(self, folder: str | Path, readme: str = "") -> None:
        """Write config.json, model.safetensors and README.md, which `spec_decode.drafters.load_draft` opens."""
        save_draft(self, Path(folder), readme)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Self:
        """Load a folder written by `save_pretrained`.

        Raises DraftwrightError that names the missing, unexpected or wrongly shaped tensor or config key.
        """
        return open_draft(cls, Path(folder))
