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
