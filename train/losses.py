"""Losses between the draft's logits and the target's distribution, and how to take them without the memory.

p is the target's distribution, q the draft's. Every loss maps (logits [..., V] in fp32, p [..., V]) to [...].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

Loss = Callable[[Tensor, Tensor], Tensor]

CHUNK_ROWS = 64  # target rows per chunk: small enough for the logits of all steps to stay in a CPU's cache


def soft_cross_entropy(logits: Tensor, p: Tensor) -> Tensor:
    """-sum_v p(v) log q(v), EAGLE-3's loss (arXiv:2503.01840, section 3.1)."""
    return -(p * logits.log_softmax(dim=-1)).sum(dim=-1)


def chunked_head_loss(
    states: Tensor, weight: Tensor, weights: Tensor, target_states: Tensor, target_weight: Tensor, loss: Loss
) -> tuple[Tensor, Tensor]:
    """Sum of weights[k, s] * loss(states[k, s] @ weight^T, softmax(target_states[s] @ target_weight^T)).

    states [K, S, H], the draft's normed states of K unrolled steps, all of which predict the same S tokens;
    weight [V, H], the draft's head; weights [K, S]; target_states [S, H'] and target_weight [V, H'] frozen.
    Logits and their gradients exist for CHUNK_ROWS rows at a time, in the forward pass alone.
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
        # Casting once here, not once for each chunk as autocast would.
        states, weight = states.to(compute), weight.to(compute)
        target_states, target_weight = target_states.to(compute), target_weight.to(compute)
        for start in range(0, states.shape[1], CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            hidden, scale = states[:, rows].flatten(0, 1), weights[:, rows]
            p = _precise(target_states[rows] @ target_weight.T).softmax(dim=-1)
            logits = _precise(hidden @ weight.T).requires_grad_(learns)
            with torch.set_grad_enabled(learns):
                values = loss(logits.view(*scale.shape, -1), p)
                chunk = (values * scale).sum()
            total += chunk.detach()
            steps += (values.detach() * (scale > 0)).sum(dim=1)
            if learns:
                grad = torch.autograd.grad(chunk, logits)[0].to(compute)
                grad_states[:, rows] = (grad @ weight).view(*scale.shape, -1)
                grad_weight += grad.T @ hidden
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
