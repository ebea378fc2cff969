"""The draft's vocabulary: the part of the target's tokens that a draft may propose (EAGLE-3).

d2t[i] = target id of draft token i, minus i     int64 [N], target ids ascending
t2d[v] = whether target token v is in it         bool [V]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data.batch import Sequences
from spec_decode.errors import DraftwrightError


@dataclass(frozen=True)
class DraftVocabulary:
    """ids: the target ids of the draft's tokens, int64 [N], ascending; vocab_size: V of the target."""

    ids: Tensor
    vocab_size: int

    @property
    def d2t(self) -> Tensor:
        return self.ids - torch.arange(len(self))

    @property
    def t2d(self) -> Tensor:
        return torch.zeros(self.vocab_size, dtype=torch.bool).index_fill_(0, self.ids, True)

    def __len__(self) -> int:
        return self.ids.numel()

    def coverage(self, sequences: Sequences) -> float:
        """The share of supervised tokens that the draft can propose; 0 when none are supervised."""
        supervised = sequences.ids[sequences.loss_mask].long()
        return float(self.t2d[supervised].float().mean()) if supervised.numel() else 0.0


def build_draft_vocabulary(
    sequences: Sequences, size: int | None, vocab_size: int, forced: Iterable[int] = ()
) -> DraftVocabulary:
    """The `forced` ids and the most frequent supervised tokens, `size` in all; None takes the whole vocabulary.

    Ties go to the lower id; where fewer distinct tokens exist, the lowest unused ids fill up. Raises
    DraftwrightError when the size doesn't fit between the forced ids and the target's vocabulary.
    """
    size = vocab_size if size is None else size
    must = torch.tensor(sorted(set(forced)), dtype=torch.long)
    if not max(1, len(must)) <= size <= vocab_size:
        raise DraftwrightError(
            f"a draft vocabulary of {size} tokens is not possible: choose a size from {max(1, len(must))} "
            f"(tokens that structure a turn) to {vocab_size} (the target's vocabulary)"
        )
    supervised = sequences.ids[sequences.loss_mask].long()
    outside = torch.cat((supervised, must))
    if outside.numel() and not 0 <= int(outside.min()) <= int(outside.max()) < vocab_size:
        raise DraftwrightError(
            f"the data holds token ids up to {int(outside.max())}, but the target's vocabulary has {vocab_size}: "
            "the tokenizer belongs to another target"
        )
    counts = torch.bincount(supervised, minlength=vocab_size)
    counts[must] = supervised.numel() + 1  # above every other
    best = torch.sort(counts, descending=True, stable=True).indices[:size]
    return DraftVocabulary(best.sort().values, vocab_size)


def structure_tokens(tokenizer: PreTrainedTokenizerBase, eos_ids: Iterable[int]) -> list[int]:
    """Ids, ascending, that can end or structure a turn: end tokens, and special tokens in the chat template's text."""
    ids = {*eos_ids}
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    template = tokenizer.get_chat_template() if tokenizer.chat_template else ""
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token.special and token.content in template:
            ids.add(token_id)
    return sorted(ids)
