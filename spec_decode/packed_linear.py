"""Linear layers of a frozen model on a CPU, with weights that are laid out for its matrix products once.

A pass of decoding multiplies 1 to 64 rows with every weight. Torch's product reads plain weights and lays them out
anew in each call; with packed ones a pass over 8 tokens takes three quarters of the time (benchmarks/passes.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_decode.errors import check_type
from spec_decode.layers import FrozenHead

_ROWS = 8  # what oneDNN chooses the layout for; every number of rows can use it


class PackedLinear(nn.Module):
    """A linear layer for inference: the same weights, and beside them a packed copy, where this CPU can pack them."""

    weight: Tensor

    def __init__(self, linear: nn.Linear | FrozenHead) -> None:
        super().__init__()
        self._parameters, self._buffers = linear._parameters, linear._buffers
        self._non_persistent_buffers_set = linear._non_persistent_buffers_set
        self.packed = _pack(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        bias = self._parameters.get("bias")
        if self.packed is None:
            return F.linear(x, self.weight, bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, "none", [], "")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves and casts, and packs again what was changed by that."""
        before = self.weight.dtype, self.weight.device
        super()._apply(fn, recurse)
        if before != (self.weight.dtype, self.weight.device):
            self.packed = _pack(self.weight)
        return self

    # A packed tensor can't be copied or written: copies pack their own.
    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "packed"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.packed = _pack(self.weight)


def pack_linears(model: nn.Module) -> None:
    """Replace the linear layers of a model, in place. It may not be trained or bound to another target any more.

    Costs a second copy of the weights in memory. Raises TypeError for what is no model.
    """
    check_type("model", model, nn.Module, "a torch module, such as the model of an HFTarget")
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear | FrozenHead):
                setattr(module, name, PackedLinear(child))


def _pack(weight: Tensor) -> Tensor | None:
    if weight.device.type != "cpu":
        return None
    try:
        return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)
    except RuntimeError:  # oneDNN has no layout for fp64, nor for bfloat16 without AVX-512
        return None
