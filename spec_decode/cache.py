"""Key/value cache for Hugging Face targets that can keep one path of a verified tree, in every row of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
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
    """Room for a fixed number of rows that advance one token a pass, each at its own length; nothing is ever moved.

    A row is a slot that holds one sequence after another: `fill` starts one, `advance` says which rows keep what the
    last pass wrote. Positions behind a row's length are garbage, which its mask has to hide.
    """

    def __init__(self, slots: int, room: int) -> None:
        super().__init__()
        self.lengths = torch.zeros(slots, dtype=torch.int64)
        self.room = room
        self._tensors: list[tuple[Tensor, Tensor]] = []  # per layer, [slots, kv_heads, room, head_dim]

    def length(self) -> int:
        return int(self.lengths.max())

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length()

    def fill(self, slots: Sequence[int], prompts: TreeCache, lengths: Sequence[int]) -> None:
        """Row i of `prompts` and its first lengths[i] positions become the content of slots[i]."""
        layers: list[Any] = prompts.layers
        if not self._tensors:
            sizes = [(len(self.lengths), layer.keys.shape[1], self.room, layer.keys.shape[3]) for layer in layers]
            self._tensors = [
                (layer.keys.new_zeros(size), layer.values.new_zeros(size))
                for layer, size in zip(layers, sizes, strict=True)
            ]
        width = max(lengths)
        index = torch.tensor(slots, device=layers[0].keys.device)
        for layer, (keys, values) in zip(layers, self._tensors, strict=True):
            keys[index, :, :width], values[index, :, :width] = layer.keys[:, :, :width], layer.values[:, :, :width]
        self.lengths[list(slots)] = torch.tensor(lengths)

    def free(self, slot: int) -> None:
        self.lengths[slot] = 0

    def advance(self) -> None:
        """Keep the token that the last pass wrote into every slot in use."""
        self.lengths += self.lengths > 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one position of every row, [slots, kv_heads, 1, head_dim], and return all that is in use."""
        keys, values = self._tensors[layer_idx]
        place = self.lengths.to(keys.device)
        rows = torch.arange(len(place), device=keys.device)
        keys[rows, :, place], values[rows, :, place] = key_states[:, :, 0], value_states[:, :, 0]
        width = self.length() + 1
        return keys[:, :, :width], values[:, :, :width]
