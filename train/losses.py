"""Losses between the draft's logits and the target's distribution, and how to take them without the memory.

p is the target's distribution, q the draft's. Every loss maps (logits [..., V] in fp32, p [..., V]) to [...].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

Loss = Callable[[Tensor, Tensor], Tensor]

CHUNK_ROWS = 256  # rows of logits at a time: a chunk stays in a CPU's cache, yet fills its matrix products
GROUP_ROWS = 1024  # rows per update of the head's gradient: that many at once spare memory traffic


def soft_cross_entropy(logits: Tensor, p: Tensor) -> Tensor:
    """-sum_v p(v) log q(v), EAGLE-3's loss (arXiv:2503.01840, section 3.1). p sums to one."""
    return _SoftCrossEntropy.apply(logits, p)  # type: ignore[no-any-return]


class _SoftCrossEntropy(torch.autograd.Function):
    """With z the logits: loss = logsumexp(z) - sum_v p(v) z(v), gradient = q - p.

    By hand because plain autograd passes over the vocabulary about twice as often, which is what this loss costs.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, p: Tensor) -> Tensor:
        q = logits.softmax(dim=-1)
        ctx.save_for_backward(q, p)
        # logsumexp(z) = max z - log max q, from two reads instead of another exponential.
        return logits.amax(dim=-1) - q.amax(dim=-1).log() - (p * logits).sum(dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        q, p = ctx.saved_tensors
        return (q - p).mul_(grad[..., None]), None


def chunked_head_loss(
    states: Tensor, weight: Tensor, weights: Tensor, target_states: Tensor, target_weight: Tensor, loss: Loss
) -> tuple[Tensor, Tensor]:
    """Sum of weights[k, s] * loss(states[k, s] @ weight^T, softmax(target_states[s] @ target_weight^T)).

    states [K, S, H], the draft's normed states of K unrolled steps, all of which predict the same S tokens;
    weight [V, H], the draft's head; weights [K, S]; target_states [S, H'] and target_weight [V, H'] frozen.
    Logits exist for CHUNK_ROWS rows at a time and their gradients for GROUP_ROWS, in the forward pass.
    Returns (weighted sum, unweighted sums over s where weights > 0 as [K]); only the former has a gradient.
    """
    learns = torch.is_grad_enabled()  # always off inside forward
    return _ChunkedHeadLoss.apply(states, weight, weights, target_states, target_weight, loss, learns)  # type: ignore[no-any-return]


class _ChunkedHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        states: Tensor,
        weight: Tensor,
        weights: Tensor,
        target_states: Tensor,
        target_weight: Tensor,
        loss: Loss,
        learns: bool,
    ) -> tuple[Tensor, Tensor]:
        compute = _compute_dtype(states)
        total = states.new_zeros((), dtype=torch.float32)
        steps = states.new_zeros(states.shape[0], dtype=torch.float32)
        grad_states = torch.zeros_like(states)
        grad_weight = torch.zeros_like(weight) if learns else weight.new_empty(0)
        # From here on [S, K, ...], so that chunks are contiguous, and cast once, not for each chunk as autocast would.
        states, weights = states.transpose(0, 1).to(compute).contiguous(), weights.T
        weight, target_states, target_weight = (x.to(compute) for x in (weight, target_states, target_weight))
        size, chunk_size = (max(1, rows // states.shape[1]) for rows in (GROUP_ROWS, CHUNK_ROWS))
        for first in range(0, len(states), size):
            group = states[first : first + size]
            grads = group.new_empty(*group.shape[:2], len(weight)) if learns else None
            for start in range(0, len(group), chunk_size):
                chunk = slice(start, start + chunk_size)
                rows = slice(first + start, first + start + len(group[chunk]))
                p = _precise(target_states[rows] @ target_weight.T).softmax(dim=-1)
                logits = _precise(states[rows] @ weight.T).requires_grad_(learns)
                with torch.set_grad_enabled(learns):
                    values = loss(logits, p[:, None])
                    weighted = (values * weights[rows]).sum()
                total += weighted.detach()
                steps += (values.detach() * (weights[rows] > 0)).sum(dim=0)
                if grads is not None:
                    grads[chunk] = torch.autograd.grad(weighted, logits)[0]
                    grad_states[:, rows] = (grads[chunk] @ weight).transpose(0, 1)
            if grads is not None:
                grad_weight += grads.flatten(0, 1).T @ group.flatten(0, 1)
        ctx.save_for_backward(grad_states, grad_weight)
        ctx.mark_non_differentiable(steps)
        return total, steps

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_total, _grad_steps):  # type: ignore[no-untyped-def]
        grad_states, grad_weight = ctx.saved_tensors
        return grad_states * grad_total, grad_weight * grad_total, None, None, None, None, None


def _compute_dtype(tensor: Tensor) -> torch.dtype:
    """What autocast would multiply matrices in, or the tensor's own dtype."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


def _precise(tensor: Tensor) -> Tensor:
    """At least fp32."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
