"""Token sequences and training batches, both packed: documents lie end to end on one token axis.

Packing keeps every matrix product free of padding. With N tokens in D documents, document d holds the rows
offsets[d] to offsets[d + 1].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True)
class Sequences:
    """Tokenised conversations. ids: int32 [N]; loss_mask: bool [N], true where a token is supervised;
    offsets: int64 [D + 1]."""

    ids: Tensor
    loss_mask: Tensor
    offsets: Tensor

    def __len__(self) -> int:
        return self.offsets.numel() - 1

    def __getitem__(self, document: int) -> tuple[Tensor, Tensor]:
        """(ids [T], loss_mask [T]) of one document."""
        if not 0 <= document < len(self):
            raise IndexError(document)
        start, stop = int(self.offsets[document]), int(self.offsets[document + 1])
        return self.ids[start:stop], self.loss_mask[start:stop]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self[document] for document in range(len(self)))

    def prefix(self, tokens: int) -> Sequences:
        """The first documents that hold at least `tokens` tokens together, or all of them."""
        documents = min(int(torch.searchsorted(self.offsets, tokens)), len(self))
        stop = int(self.offsets[documents])
        return Sequences(self.ids[:stop], self.loss_mask[:stop], self.offsets[: documents + 1])

    def trimmed(self) -> Sequences:
        """Every document up to its last supervised token: no causal draft or target learns from what lies behind."""
        position = torch.arange(self.ids.numel())
        lengths = self.offsets.diff()
        document = torch.arange(len(self)).repeat_interleave(lengths)
        last = torch.full((len(self),), -1).scatter_reduce(0, document, position.where(self.loss_mask, -1), "amax")
        kept = position <= last[document]
        ends = torch.zeros(len(self), dtype=torch.int64).index_add(0, document, kept.long()).cumsum(0)
        return Sequences(self.ids[kept], self.loss_mask[kept], torch.cat((torch.zeros(1, dtype=torch.int64), ends)))

    def select(self, documents: Sequence[int]) -> Sequences:
        """These documents, in the order given."""
        ids, masks = zip(*(self[document] for document in documents), strict=True)
        lengths = torch.tensor([0, *(part.numel() for part in ids)])
        return Sequences(torch.cat(ids), torch.cat(masks), lengths.cumsum(0))

    def to(self, device: Any) -> Sequences:
        """The same on another device."""
        return Sequences(self.ids.to(device), self.loss_mask.to(device), self.offsets.to(device))


@dataclass(frozen=True)
class Share:
    """What a batch is one of `parts` parts of: the optimiser step of all processes and micro-batches.

    tokens: all documents of the step; spare: whether there was no document left for this part, so that it repeats one
    that must not count.
    """

    tokens: Sequences
    parts: int
    spare: bool


@dataclass(frozen=True)
class Batch:
    """One training batch of packed documents.

    ids: int64 [N]; loss_mask: bool [N] (belongs to the token itself: true where x[t] is supervised);
    offsets: int64 [D + 1]; features: [N, taps * H], the tapped target states at x[t];
    last_hidden: [N, H], the target's final-normed state at x[t], which predicts x[t + 1];
    share: None for a whole optimiser step.
    """

    ids: Tensor
    loss_mask: Tensor
    offsets: Tensor
    features: Tensor
    last_hidden: Tensor
    share: Share | None = None

    def padded(self) -> Tensor:
        """ids as documents [D, T], padded on the right: under causal attention no real token sees the padding."""
        return pad_sequence(list(self.ids.split(self.offsets.diff().tolist())), batch_first=True)

    def packed(self, states: Tensor) -> Tensor:
        """States of `padded` [D, T, H] end to end, [N, H]."""
        lengths = self.offsets.diff().tolist()
        return torch.cat([document[:length] for document, length in zip(states, lengths, strict=True)])

    def to(self, device: Any) -> Batch:
        """The same batch on another device."""
        share = self.share and replace(self.share, tokens=self.share.tokens.to(device))
        return Batch(**{name: tensor.to(device) for name, tensor in self.tensors().items()}, share=share)

    def tensors(self) -> dict[str, Tensor]:
        """All but `share`, by name."""
        return {name: value for name, value in vars(self).items() if name != "share"}
