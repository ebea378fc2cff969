"""Key/value cache for Hugging Face targets that can keep one path of a verified tree, in every row of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache


class TreeCache(DynamicCache):
    """Keys and values of every layer, [B, kv_heads, T, head_dim]; grows by concatenation.

    Rows of a batch may hold fewer positions than the longest: what lies behind a row's own positions is garbage,
    which its mask has to hide. Who decodes knows the rows' lengths.
    """

    def length(self) -> int:
        return int(self.get_seq_length())

    def keep(self, lengths: Sequence[int], start: int, paths: Sequence[Tensor]) -> None:
        sizes = [path.numel() for path in paths]
        stop = max(length + size for length, size in zip(lengths, sizes, strict=True))
        rows = torch.arange(len(paths)).repeat_interleave(torch.tensor(sizes))
        source = start + torch.cat(list(paths))
        place = torch.cat([length + torch.arange(size) for length, size in zip(lengths, sizes, strict=True)])
        moved = source != place
        layers: list[Any] = self.layers
        if bool(moved.any()):
            rows, source, place = (index[moved].to(layers[0].keys.device) for index in (rows, source, place))
            for layer in layers:
                # In place, because copying the whole prefix each round would cost more.
                layer.keys[rows, :, place] = layer.keys[rows, :, source]
                layer.values[rows, :, place] = layer.values[rows, :, source]
        if stop < self.length():
            for layer in layers:
                layer.keys, layer.values = layer.keys[:, :, :stop], layer.values[:, :, :stop]

    def select(self, rows: Sequence[int]) -> None:
        layers: list[Any] = self.layers
        for layer in layers:
            index = torch.tensor(rows, device=layer.keys.device)
            layer.keys, layer.values = layer.keys[index], layer.values[index]


class SlotCache(DynamicCache):
    """Room for a fixed number of sequences, each at its own length, of which a pass advances neighbouring ones.

    A pass reads and writes slices of what is held, so nothing is copied but what `start` finds and `swap` exchanges.
    A slot keeps its content until another sequence starts there.
    """

    def __init__(self, slots: int, room: int) -> None:
        super().__init__()
        self.lengths = torch.zeros(slots, dtype=torch.int64)
        self._ids = torch.zeros(slots, room, dtype=torch.int64)
        self._tensors: list[tuple[Tensor, Tensor]] = []  # per layer, [slots, kv_heads, room, head_dim]

    def length(self) -> int:
        """Positions that the pass sees, apart from as many as it has columns."""
        return self._width - self._columns

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length()

    def start(self, first: int, prompts: Sequence[Tensor]) -> None:
        """A prompt [P] begins in each slot from `first` on: with as much of it as any slot holds, at most P - 1 tokens.

        That is the system prompt that all share, or the earlier turns of the same chat.
        """
        found = [self._longest_shared(prompt[:-1]) for prompt in prompts]
        slots = list(range(first, first + len(prompts)))
        shared = torch.tensor([length for _, length in found])
        self._copy([slot for slot, _ in found], slots, int(shared.max()))
        self.lengths[slots] = shared

    def append(self, first: int, tokens: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Give each slot from `first` on its next tokens, of any number; the pass that computes them must follow.

        Returns what it runs: ids [B, T], padded on the right, their positions [B, T], and what they see [B, T, S].
        """
        ids = pad_sequence(list(tokens), batch_first=True)
        counts = torch.tensor([few.numel() for few in tokens])
        self._slots = slice(first, first + len(tokens))
        columns = torch.arange(ids.shape[1])
        positions = self.lengths[self._slots, None] + columns
        self._written = (columns < counts[:, None]).nonzero(as_tuple=True)  # rows and columns without the padding
        self._places = positions[self._written]
        self._ids[self._slots][self._written[0], self._places] = ids[self._written]
        self.lengths[self._slots] += counts
        self._width, self._columns = int(self.lengths[self._slots].max()), ids.shape[1]
        positions = positions.clamp(max=self._width - 1)  # of the padding
        return ids, positions, torch.arange(self._width) <= positions[..., None]

    def swap(self, a: int, b: int) -> None:
        """Exchange the contents of two slots."""
        if a != b:
            self._copy([a, b], [b, a], int(self.lengths[[a, b]].max()))
            self.lengths[[a, b]] = self.lengths[[b, a]]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write what a pass computed, [B, kv_heads, T, head_dim], and return all that it sees."""
        if layer_idx == len(self._tensors):
            _, heads, _, size = key_states.shape
            shape = (len(self.lengths), heads, self._ids.shape[1])
            self._tensors.append((key_states.new_zeros(*shape, size), value_states.new_zeros(*shape, size)))
        rows, columns, places = (index.to(key_states.device) for index in (*self._written, self._places))
        keys, values = (held[self._slots] for held in self._tensors[layer_idx])
        keys[rows, :, places], values[rows, :, places] = key_states[rows, :, columns], value_states[rows, :, columns]
        return keys[:, :, : self._width], values[:, :, : self._width]

    def _longest_shared(self, ids: Tensor) -> tuple[int, int]:
        """The slot that begins with most of ids [T], and how much that is."""
        size = ids.numel()
        same = (self._ids[:, :size] == ids) & (torch.arange(size) < self.lengths[:, None])
        shared = same.int().cumprod(dim=1).sum(dim=1)
        slot = int(shared.argmax())
        return slot, int(shared[slot])

    def _copy(self, sources: Sequence[int], slots: Sequence[int], width: int) -> None:
        """The first `width` positions of each source into its slot, as if all at once."""
        self._ids[slots, :width] = self._ids[sources, :width]
        for held in chain.from_iterable(self._tensors):
            source, slot = (torch.tensor(index, device=held.device) for index in (sources, slots))
            held[slot, :, :width] = held[source, :, :width]
