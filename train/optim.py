"""Optimisers and the learning-rate schedule that every variant shares.

Muon (Jordan et al. 2024, with the RMS match of arXiv:2502.16982) updates matrices; AdamW updates heads, embeddings
and vectors at a lower rate. Both live in one Optimizer, so Lightning's clipping, schedules and checkpoints see one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.overrides import TorchFunctionMode

from spec_decode.errors import DraftwrightError
from spec_decode.hardware import multiplies_bfloat16

Named = tuple[str, nn.Parameter]
_VOCABULARY_SIDE = {"lm_head", "embed_tokens"}  # one row per token: orthogonalising them would mix tokens


class MuonAdamW(Optimizer):
    """Muon and AdamW as one optimizer: its param_groups and state are theirs, Muon's groups first."""

    def __init__(self, muon: Muon, adamw: AdamW) -> None:
        self._parts = (muon, adamw)
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Point both parts at our groups and state; loading a state dict replaces these objects."""
        split = len(self._parts[0].param_groups)
        groups = (self.param_groups[:split], self.param_groups[split:])
        for part, part_groups in zip(self._parts, groups, strict=True):
            part.param_groups, part.state = part_groups, self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        device = self.param_groups[0]["params"][0].device
        with nullcontext() if multiplies_bfloat16(device) else _NoBfloat16():
            for part in self._parts:
                part.step()
        return loss


class _NoBfloat16(TorchFunctionMode):
    """torch's Muon iterates in bfloat16, which takes longer than all else of a step where the CPU can't multiply it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.bfloat16:
            return args[0].clone()
        return func(*args, **(kwargs or {}))


def build_optimizer(
    named_parameters: Iterable[Named],
    *,
    name: str,
    lr: float,
    head_lr_scale: float = 1.0,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.95),
    extra: Sequence[dict[str, Any]] = (),
) -> Optimizer:
    """The optimizer `name` ("muon" or "adamw") over the parameters that are trained.

    Matrices learn at `lr`; heads, embeddings and vectors (norms, biases) with AdamW at head_lr_scale * lr.
    Vectors get no weight decay. extra: groups of other parameters, for AdamW. Raises DraftwrightError for another name.
    """
    matrices, heads, vectors = _split(named_parameters)
    beta1, beta2 = betas  # a list when it comes from YAML
    low = {"lr": lr * head_lr_scale}
    groups = [{"params": heads, **low}, {"params": vectors, **low, "weight_decay": 0.0}]
    groups = [group for group in (*groups, *extra) if group["params"]]
    if name == "adamw":
        matrix_group = [{"params": matrices, "lr": lr}] if matrices else []
        return _adamw([*matrix_group, *groups], lr, (beta1, beta2), weight_decay)
    if name == "muon" and matrices and groups:
        muon = Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        return MuonAdamW(muon, _adamw(groups, lr, (beta1, beta2), weight_decay))
    if name == "muon":
        raise DraftwrightError(
            "module.optimizer.name=muon needs matrices and vectors to train; use module.optimizer.name=adamw"
        )
    raise DraftwrightError(f"module.optimizer.name='{name}' is unknown; choose muon or adamw")


def _adamw(groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], weight_decay: float) -> AdamW:
    """Fused: one pass over the weights instead of a dozen, a few percent of a step."""
    optimizer = AdamW(groups, lr=lr, betas=betas, weight_decay=weight_decay, fused=True)
    # Lightning refuses to clip gradients beside a fused optimizer, for loss scalers, which we don't use.
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    return optimizer


def warmup_cosine(optimizer: Optimizer, *, total_steps: int, warmup_steps: int, final_ratio: float) -> LambdaLR:
    """Linear warm-up over `warmup_steps`, then a cosine that reaches final_ratio * lr at `total_steps`."""

    def ratio(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        return final_ratio + (1 - final_ratio) * 0.5 * (1 + math.cos(math.pi * progress))

    return LambdaLR(optimizer, ratio)


def _split(named_parameters: Iterable[Named]) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """(matrices, heads and embeddings, vectors) among the parameters that require a gradient."""
    matrices: list[nn.Parameter] = []
    heads: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for name, parameter in named_parameters:
        if not parameter.requires_grad:
            continue
        if _VOCABULARY_SIDE & set(name.split(".")):
            heads.append(parameter)
        else:
            (matrices if parameter.ndim == 2 else vectors).append(parameter)
    return matrices, heads, vectors
