"""Key/value cache for Hugging Face targets that can keep one path of a verified tree."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DynamicCache


class TreeCache(DynamicCache):
    """Keys and values of every layer, [B, kv_heads, T, head_dim]; grows by concatenation."""

    def length(self) -> int:
        return int(self.get_seq_length())

    def keep(self, start: int, path: Tensor) -> None:
        """Keep positions < start and start + path; path is ascending int64 [A]."""
        moves = path.numel() > 0 and int(path[-1]) != path.numel() - 1
        stop = start + path.numel()
        layers: list[Any] = self.layers
        for layer in layers:
            if moves:
                # In place, because copying the whole prefix each round would cost more.
                layer.keys[:, :, start:stop] = layer.keys[:, :, start + path]
                layer.values[:, :, start:stop] = layer.values[:, :, start + path]
            layer.keys, layer.values = layer.keys[:, :, :stop], layer.values[:, :, :stop]
