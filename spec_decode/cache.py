"""Key/value cache for Hugging Face targets that can keep one path of a verified tree."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache


class TreeCache(DynamicCache):
    """Keys and values of every layer, [B, kv_heads, T, head_dim]; grows by concatenation."""

    def length(self) -> int:
        return int(self.get_seq_length())

    def keep(self, start: int, path: Tensor) -> None:
        """Keep positions < start and start + path; path is ascending int64 [A]."""
        is_prefix = path.numel() == 0 or int(path[-1]) == path.numel() - 1
        stop = start + path.numel()
        for layer in self.layers:
            if is_prefix:
                layer.keys, layer.values = layer.keys[:, :, :stop], layer.values[:, :, :stop]
            else:
                layer.keys, layer.values = _gather(layer.keys, start, path), _gather(layer.values, start, path)


def _gather(states: Tensor, start: int, path: Tensor) -> Tensor:
    return torch.cat((states[:, :, :start], states[:, :, start + path]), dim=2)
