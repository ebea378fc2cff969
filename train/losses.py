"""Losses between the draft's logits and the target's distribution, and how to take them without the memory.

p is the target's distribution, q the draft's. Every loss maps (logits [..., V] in fp32, p [..., V]) to [...].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from spec_decode.errors import DraftwrightError

Loss = Callable[[Tensor, Tensor], Tensor]

CHUNK_ROWS = 256  # rows of logits at a time: a chunk stays in a CPU's cache, yet fills its matrix products
TOP_K = 10  # tokens that HASS looks at
TINY = 1e-30  # a probability that counts as 0 in logarithms
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


def kl(logits: Tensor, p: Tensor) -> Tensor:
    """KL(p || q): soft cross-entropy less the target's entropy, so 0 at the optimum; the same gradient."""
    return soft_cross_entropy(logits, p) + (p * _log(p)).sum(dim=-1)


def reverse_kl(logits: Tensor, p: Tensor) -> Tensor:
    """KL(q || p), which a draft lowers by covering the target's main mode (MiniLLM, arXiv:2306.08543)."""
    log_q = logits.log_softmax(dim=-1)
    return (log_q.exp() * (log_q - _log(p))).sum(dim=-1)


def total_variation(logits: Tensor, p: Tensor) -> Tensor:
    """1 - sum_v min(p(v), q(v)): the probability that a drafted token is rejected (DistillSpec, arXiv:2310.08461)."""
    return 1 - acceptance(logits, p)


def lk(logits: Tensor, p: Tensor) -> Tensor:
    """-log sum_v min(p(v), q(v)), the likelihood of acceptance (LK losses, arXiv:2602.23881, its "alpha")."""
    return -acceptance(logits, p).clamp(min=TINY).log()


def lk_adaptive(logits: Tensor, p: Tensor) -> Tensor:
    """w KL(p || q) + (1 - w) TV with w = exp(-3 acceptance): KL while the draft is far off, then what counts (LK
    losses, arXiv:2602.23881, its "lambda"; w carries no gradient)."""
    accepted = acceptance(logits, p)
    w = torch.exp(-3 * accepted.detach())
    return w * kl(logits, p) + (1 - w) * (1 - accepted)


def hard_cross_entropy(logits: Tensor, p: Tensor) -> Tensor:
    """-log q(best token of p): Medusa's loss (arXiv:2401.10774, section 2.2.1) when p is one-hot on the data."""
    best = p.argmax(dim=-1, keepdim=True).expand(*logits.shape[:-1], 1)
    return -logits.log_softmax(dim=-1).gather(-1, best)[..., 0]


def top_k_cross_entropy(logits: Tensor, p: Tensor) -> Tensor:
    """-sum over the target's TOP_K best tokens of p log q (HASS, arXiv:2408.15766, section 3.1)."""
    values, ids = p.topk(min(TOP_K, p.shape[-1]), dim=-1)
    log_q = logits.log_softmax(dim=-1)
    return -(values * log_q.gather(-1, ids.expand(*logits.shape[:-1], -1))).sum(dim=-1)


def acceptance(logits: Tensor, p: Tensor) -> Tensor:
    """sum_v min(p(v), q(v)): the probability that a token drawn from q is accepted (arXiv:2211.17192, theorem 3.5)."""
    return torch.minimum(p, logits.softmax(dim=-1)).sum(dim=-1)


def build_loss(wanted: Loss | str | Mapping[str, float]) -> Loss:
    """A loss by its name, or the sum of several: {"soft_cross_entropy": 0.1, "top_k_cross_entropy": 1.0}.

    Raises DraftwrightError for a name that isn't in LOSSES and for a weight that isn't a number of at least 0.
    """
    if callable(wanted):
        return wanted
    shares = {wanted: 1.0} if isinstance(wanted, str) else wanted
    if not isinstance(shares, Mapping) or not shares:
        raise DraftwrightError(
            f"module.loss={wanted} is not possible: it must be the name of a loss, or names with the weight of each"
        )
    for name, share in shares.items():
        if name not in LOSSES:
            raise DraftwrightError(f"module.loss={name} is unknown; choose from {', '.join(LOSSES)}")
        if type(share) not in (int, float) or not 0 <= share < math.inf:
            raise DraftwrightError(
                f"module.loss.{name}={share} is not possible: a weight must be a number of at least 0"
            )
    if len(shares) == 1:
        name, share = next(iter(shares.items()))
        if share == 1:
            return LOSSES[name]

    def mixture(logits: Tensor, p: Tensor) -> Tensor:
        return torch.stack([share * LOSSES[name](logits, p) for name, share in shares.items()]).sum(dim=0)

    return mixture


def _log(p: Tensor) -> Tensor:
    """log p, finite where p is 0."""
    return p.clamp(min=TINY).log()


def chunked_head_loss(
    states: Tensor,
    heads: Sequence[Tensor],
    weights: Tensor,
    target_states: Tensor,
    target_weight: Tensor,
    loss: Loss,
    labels: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum of weights[k, s] * loss(states[k, s] @ heads[k]^T, softmax(target_states[s] @ target_weight^T)).

    states [K, S, H], the draft's states of K unrolled steps, all of which predict the same S tokens; heads: the
    unembedding [V, H] of each step, or one for all; weights [K, S]; target_states [S, H'] and target_weight [V, H']
    frozen; labels [S]: draft ids that take all probability instead of the target's distribution. Where steps predict
    other tokens, target_states are [K, S, H'] and labels [K, S]. Logits exist for CHUNK_ROWS rows at a time and their
    gradients for GROUP_ROWS, in the forward pass.
    Returns (weighted sum, unweighted sums over s where weights > 0 as [K]); only the former has a gradient.
    """
    learns = torch.is_grad_enabled()  # always off inside forward
    return _ChunkedHeadLoss.apply(states, weights, target_states, target_weight, loss, labels, learns, *heads)  # type: ignore[no-any-return]


class _ChunkedHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        states: Tensor,
        weights: Tensor,
        target_states: Tensor,
        target_weight: Tensor,
        loss: Loss,
        labels: Tensor | None,
        learns: bool,
        *heads: Tensor,
    ) -> tuple[Tensor, Tensor]:
        compute = _compute_dtype(states)
        total = states.new_zeros((), dtype=torch.float32)
        steps = states.new_zeros(states.shape[0], dtype=torch.float32)
        grad_states = torch.zeros_like(states)
        trained = [learns and head.requires_grad for head in heads]  # a frozen head needs no gradient
        grad_heads = [torch.zeros_like(head) if train else None for head, train in zip(heads, trained, strict=True)]
        # From here on [S, K, ...], so that chunks are contiguous, and cast once, not for each chunk as autocast would.
        states, weights = states.transpose(0, 1).to(compute).contiguous(), weights.T
        own = [head.to(compute) for head in heads]
        target_weight = target_weight.to(compute)
        target_states = _by_row(target_states.to(compute), 3, len(steps))
        labels = None if labels is None else _by_row(labels, 2, len(steps))
        # One head takes all steps in one product; several take one step each.
        spans = [slice(None)] if len(own) == 1 else [slice(step, step + 1) for step in range(len(own))]
        size, chunk_size = (max(1, rows // states.shape[1]) for rows in (GROUP_ROWS, CHUNK_ROWS))
        for first in range(0, len(states), size):
            group = states[first : first + size]
            grads = group.new_empty(*group.shape[:2], len(own[0])) if learns else None
            for start in range(0, len(group), chunk_size):
                chunk = slice(start, start + chunk_size)
                rows = slice(first + start, first + start + len(group[chunk]))
                if labels is None:
                    p = _precise(_product(target_states[rows], target_weight.T)).softmax(dim=-1)
                else:
                    p = F.one_hot(labels[rows], len(target_weight)).to(torch.float32)
                parts = [_product(states[rows, span], head.T) for span, head in zip(spans, own, strict=True)]
                logits = _precise(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).requires_grad_(learns)
                with torch.set_grad_enabled(learns):
                    values = loss(logits, p)
                    weighted = (values * weights[rows]).sum()
                total += weighted.detach()
                steps += (values.detach() * (weights[rows] > 0)).sum(dim=0)
                if grads is not None:
                    grads[chunk] = torch.autograd.grad(weighted, logits)[0]
                    for span, head in zip(spans, own, strict=True):
                        grad = _product(grads[chunk, span], head).transpose(0, 1)
                        grad_states[span, rows] = grad.to(grad_states.dtype)
            if grads is not None:
                for span, grad_head in zip(spans, grad_heads, strict=True):
                    if grad_head is not None:
                        grad_head += grads[:, span].flatten(0, 1).T @ group[:, span].flatten(0, 1)
        ctx.save_for_backward(grad_states, *grad_heads)  # type: ignore[arg-type]
        ctx.mark_non_differentiable(steps)
        return total, steps

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_total, _grad_steps):  # type: ignore[no-untyped-def]
        grad_states, *grad_heads = ctx.saved_tensors
        scaled = [None if grad_head is None else grad_head * grad_total for grad_head in grad_heads]
        return grad_states * grad_total, None, None, None, None, None, None, *scaled


def _by_row(tensor: Tensor, dims: int, steps: int) -> Tensor:
    """[S, ...], the same for all steps, or [K, S, ...], for `steps` of the K -> [S, 1 or steps, ...]."""
    return tensor[:, None] if tensor.dim() < dims else tensor[:steps].transpose(0, 1)


def _product(rows: Tensor, matrix: Tensor) -> Tensor:
    """rows [R, K, A] @ matrix [A, B], as one product: for strided rows torch would copy the matrix R times."""
    return (rows.reshape(-1, rows.shape[-1]) @ matrix).unflatten(0, rows.shape[:2])


def _compute_dtype(tensor: Tensor) -> torch.dtype:
    """What autocast would multiply matrices in, or the tensor's own dtype."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


def _precise(tensor: Tensor) -> Tensor:
    """At least fp32."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


LOSSES: dict[str, Loss] = {
    loss.__name__: loss
    for loss in (
        soft_cross_entropy,
        kl,
        reverse_kl,
        total_variation,
        lk,
        lk_adaptive,
        hard_cross_entropy,
        top_k_cross_entropy,
    )
}
