"""Every loss against its definition, its gradient, what is hard for it, and mixtures; then heads by step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from spec_decode.errors import DraftwrightError
from train import losses
from train.losses import LOSSES, Loss, build_loss, chunked_head_loss

P = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)
Q = torch.tensor([0.25, 0.25, 0.4, 0.1], dtype=torch.float64)
LOG = math.log
ACCEPTED = 0.25 + 0.25 + 0.2  # sum of min(p, q)
CROSS = -(0.5 * LOG(0.25) + 0.3 * LOG(0.25) + 0.2 * LOG(0.4))
ENTROPY = -(0.5 * LOG(0.5) + 0.3 * LOG(0.3) + 0.2 * LOG(0.2))
W = math.exp(-3 * ACCEPTED)
BY_HAND = {
    "soft_cross_entropy": CROSS,
    "kl": CROSS - ENTROPY,
    # log p of the token with p = 0 counts as log 1e-30.
    "reverse_kl": 0.25 * LOG(0.5) + 0.25 * LOG(0.25 / 0.3) + 0.4 * LOG(2) + 0.1 * (LOG(0.1) + 30 * LOG(10)),
    "total_variation": 1 - ACCEPTED,
    "lk": -LOG(ACCEPTED),
    "lk_adaptive": W * (CROSS - ENTROPY) + (1 - W) * (1 - ACCEPTED),
    "hard_cross_entropy": -LOG(0.25),
    "top_k_cross_entropy": CROSS,  # all four tokens are among the ten best
}
DIVERGENCES = ("kl", "reverse_kl", "total_variation", "lk", "lk_adaptive")

every_loss = pytest.mark.parametrize("name", LOSSES)


def random_pair(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits and p in fp64."""
    generator = torch.Generator().manual_seed(seed)
    logits, other = (2 * torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return logits, other.softmax(-1)


def test_every_loss_is_tested_by_hand() -> None:
    assert BY_HAND.keys() == LOSSES.keys()


@every_loss
def test_the_value_by_hand(name: str) -> None:
    value = LOSSES[name](Q.log() + 3.0, P)  # logits are free up to a constant
    assert value.shape == ()
    assert value.item() == pytest.approx(BY_HAND[name], rel=1e-12)


TORCH: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "soft_cross_entropy": lambda z, p: F.cross_entropy(z, p, reduction="none"),
    "kl": lambda z, p: F.kl_div(z.log_softmax(-1), p, reduction="none").sum(-1),
    "reverse_kl": lambda z, p: F.kl_div(p.log(), z.log_softmax(-1), reduction="none", log_target=True).sum(-1),
    "total_variation": lambda z, p: 0.5 * (p - z.softmax(-1)).abs().sum(-1),
    "hard_cross_entropy": lambda z, p: F.cross_entropy(z, p.argmax(-1), reduction="none"),
}


@pytest.mark.parametrize("name", TORCH)
def test_values_and_gradients_are_those_of_torch(name: str) -> None:
    logits, p = random_pair(6, 13)
    logits.requires_grad_()
    ours, wanted = LOSSES[name](logits, p), TORCH[name](logits, p)
    torch.testing.assert_close(ours, wanted)
    weights = torch.rand(6, dtype=torch.float64)
    left, right = (torch.autograd.grad((each * weights).sum(), logits)[0] for each in (ours, wanted))
    torch.testing.assert_close(left, right)


def test_top_k_takes_the_targets_ten_best() -> None:
    logits, p = random_pair(5, 40)
    best = p.argsort(dim=-1, descending=True)[:, :10]
    wanted = -(p.gather(1, best) * logits.log_softmax(-1).gather(1, best)).sum(1)
    torch.testing.assert_close(LOSSES["top_k_cross_entropy"](logits, p), wanted)


@every_loss
@pytest.mark.parametrize("zeros", [False, True], ids=["all positive", "with zeros"])
def test_the_gradient_is_that_of_finite_differences(name: str, zeros: bool) -> None:
    logits, p = random_pair(3, 12)
    if zeros:
        p = torch.where(p < p.median(dim=-1, keepdim=True).values, 0.0, p)
        p = p / p.sum(-1, keepdim=True)
    logits.requires_grad_()
    if name != "lk_adaptive":
        assert torch.autograd.gradcheck(lambda z: LOSSES[name](z, p), (logits,))
        return
    w = torch.exp(-3 * losses.acceptance(logits, p)).detach()  # a constant to the gradient

    def constant_weight(z: Tensor) -> Tensor:
        return w * losses.kl(z, p) + (1 - w) * losses.total_variation(z, p)

    assert torch.autograd.gradcheck(constant_weight, (logits,))
    ours, wanted = (
        torch.autograd.grad(loss.sum(), logits)[0] for loss in (LOSSES[name](logits, p), constant_weight(logits))
    )
    torch.testing.assert_close(ours, wanted)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_perfect_draft_has_no_loss_and_no_gradient(name: str, dtype: torch.dtype) -> None:
    logits, _ = random_pair(4, 30)
    logits = logits.to(dtype).requires_grad_()
    value = LOSSES[name](logits, logits.detach().softmax(-1))
    tolerance = 10 * torch.finfo(dtype).eps
    torch.testing.assert_close(value, torch.zeros_like(value), rtol=0, atol=tolerance)
    if name in ("kl", "reverse_kl"):  # the others have a kink there
        (gradient,) = torch.autograd.grad(value.sum(), logits)
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_anything_else_has_a_loss(name: str) -> None:
    logits, p = random_pair(200, 7, seed=3)
    assert (LOSSES[name](logits, p) > 0).all()


@every_loss
def test_steps_down_the_gradient_lower_every_loss(name: str) -> None:
    logits, p = random_pair(4, 15, seed=5)
    before = LOSSES[name](logits, p)
    for _ in range(20):
        (gradient,) = torch.autograd.grad(LOSSES[name](logits.requires_grad_(), p).sum(), logits)
        logits = (logits - 0.3 * gradient).detach()
    assert (LOSSES[name](logits, p) < before).all()


@every_loss
def test_one_hot_targets(name: str) -> None:
    """Every p of the labels of data: the loss is a function of q at that token alone (reverse KL aside)."""
    logits, _ = random_pair(5, 9)
    labels = torch.tensor([0, 8, 3, 3, 5])
    p = F.one_hot(labels, 9).double()
    q = logits.softmax(-1)[torch.arange(5), labels]
    w = torch.exp(-3 * q)
    log_zero = 30 * LOG(10)
    wanted = {
        "total_variation": 1 - q,
        "lk_adaptive": -w * q.log() + (1 - w) * (1 - q),
        "reverse_kl": -torch.distributions.Categorical(logits=logits).entropy() + log_zero * (1 - q),
    }
    torch.testing.assert_close(LOSSES[name](logits, p), wanted.get(name, -q.log()))


EXTREME = {
    "right": [1e4, -1e4, 0.0, -1e4],
    "wrong": [-1e4, 1e4, 0.0, 1e4],
    "one large": [0.0, 0.0, 1e4, 0.0],
    "all large": [1e4, 1e4, 1e4, 1e4],
    "all small": [-1e4, -1e4, -1e4, -1e4],
}


@every_loss
@pytest.mark.parametrize("case", EXTREME)
@pytest.mark.parametrize("p", [[1.0, 0.0, 0.0, 0.0], [0.5, 0.25, 0.25, 0.0], [0.25] * 4], ids=str)
def test_extreme_logits_give_finite_numbers(name: str, case: str, p: list[float]) -> None:
    logits = torch.tensor(EXTREME[case], requires_grad=True)
    value = LOSSES[name](logits, torch.tensor(p))
    assert value.isfinite()
    rounding = 4e4 * torch.finfo(torch.float32).eps
    assert value >= -rounding
    value.backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    exact = LOSSES[name](logits.detach().double(), torch.tensor(p, dtype=torch.float64))
    torch.testing.assert_close(value.detach().double(), exact, rtol=1e-5, atol=rounding)


@every_loss
def test_shapes_of_training_and_of_metrics(name: str) -> None:
    """p may lack the axis of steps (as in metrics) or have one entry in it (as in training)."""
    logits, _ = random_pair(5, 3, 17)
    _, p = random_pair(5, 17)
    steps_last = LOSSES[name](logits, p[:, None])
    assert steps_last.shape == (5, 3)
    for step in range(3):
        torch.testing.assert_close(steps_last[:, step], LOSSES[name](logits[:, step], p))
    torch.testing.assert_close(LOSSES[name](logits.transpose(0, 1), p), steps_last.T)


# --- mixtures --------------------------------------------------------------------------------------------------------


def test_a_name_is_that_loss() -> None:
    assert all(build_loss(name) is loss for name, loss in LOSSES.items())
    assert all(build_loss({name: 1}) is loss for name, loss in LOSSES.items())
    own: Loss = lambda logits, p: logits.sum(-1)  # noqa: E731
    assert build_loss(own) is own


def test_a_mixture_is_the_weighted_sum_with_its_gradient() -> None:
    logits, p = random_pair(3, 2, 9)
    logits.requires_grad_()
    p = p[:, :1]
    mixed = build_loss({"kl": 0.25, "total_variation": 2, "soft_cross_entropy": 0.0})(logits, p)
    wanted = 0.25 * losses.kl(logits, p) + 2 * losses.total_variation(logits, p)
    torch.testing.assert_close(mixed, wanted)
    left, right = (torch.autograd.grad(each.sum(), logits, retain_graph=True)[0] for each in (mixed, wanted))
    torch.testing.assert_close(left, right)
    torch.testing.assert_close(build_loss({"lk": 0.5})(logits, p), 0.5 * losses.lk(logits, p))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("mse", r"module\.loss=mse is unknown; choose from soft_cross_entropy, kl, "),
        ({"kl": 1.0, "mse": 0.5}, r"module\.loss=mse is unknown; choose from soft_cross_entropy, kl, "),
        ({}, r"module\.loss=\{\} is not possible: it must be the name of a loss, or names with the weight of each"),
        (3, r"module\.loss=3 is not possible"),
        (None, r"module\.loss=None is not possible"),
        (["kl"], r"module\.loss=\['kl'\] is not possible"),
        ({"kl": "much"}, r"module\.loss\.kl=much is not possible: a weight must be a number of at least 0"),
        ({"kl": -1.0}, r"module\.loss\.kl=-1\.0 is not possible"),
        ({"kl": True}, r"module\.loss\.kl=True is not possible"),
        ({"kl": float("nan")}, r"module\.loss\.kl=nan is not possible"),
    ],
    ids=str,
)
def test_losses_that_do_not_exist_are_named(wanted: Any, message: str) -> None:
    with pytest.raises(DraftwrightError, match=message) as refused:
        build_loss(wanted)
    assert "\n" not in str(refused.value)


# --- heads by step ---------------------------------------------------------------------------------------------------

STEPS, ROWS, WIDTH, VOCAB = 3, 10, 6, 11


@pytest.mark.parametrize("labelled", [False, True], ids=["distributions", "labels"])
@pytest.mark.parametrize("frozen", [(), (1,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("heads", [1, STEPS])
@pytest.mark.parametrize("name", ["soft_cross_entropy", "lk_adaptive", "top_k_cross_entropy"])
def test_chunks_give_the_loss_and_gradients_of_all_rows_at_once(
    name: str, heads: int, frozen: tuple[int, ...], labelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "CHUNK_ROWS", 7)
    monkeypatch.setattr(losses, "GROUP_ROWS", 13)
    torch.manual_seed(0)
    states = torch.randn(STEPS, ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    own = [torch.randn(VOCAB, WIDTH, dtype=torch.float64, requires_grad=head not in frozen) for head in range(heads)]
    weights = torch.rand(STEPS, ROWS) * (torch.rand(STEPS, ROWS) > 0.3)
    target_states = torch.randn(ROWS, 5, dtype=torch.float64, requires_grad=True)
    target_weight = torch.randn(VOCAB, 5, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(VOCAB, (ROWS,)) if labelled else None
    arguments: Any = (weights, target_states, target_weight, LOSSES[name], labels)

    total, steps = chunked_head_loss(states, own, *arguments)
    logits = torch.stack([state @ own[step % heads].T for step, state in enumerate(states)])
    p = (target_states @ target_weight.T).softmax(-1) if labels is None else F.one_hot(labels, VOCAB).double()
    values = LOSSES[name](logits, p.detach())
    wanted = (values * weights).sum()

    assert total.item() == pytest.approx(wanted.item(), rel=1e-6)
    torch.testing.assert_close(steps.double(), (values * (weights > 0)).sum(1).detach(), rtol=1e-6, atol=0)
    learning = [states, *(head for head in own if head.requires_grad)]
    ours, theirs = torch.autograd.grad(2 * total, learning), torch.autograd.grad(2 * wanted, learning)
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-9)
    (2 * chunked_head_loss(states, own, *arguments)[0]).backward()
    everything = [states, *own, target_states, target_weight]
    assert [tensor.grad is not None for tensor in everything] == [
        True, *(head not in frozen for head in range(heads)), False, False
    ]  # fmt: skip
    with torch.no_grad():
        again, same_steps = chunked_head_loss(states, own, *arguments)
    assert torch.equal(again, total)
    assert torch.equal(same_steps, steps)


@pytest.mark.parametrize("heads", [1, STEPS])
def test_autocast_multiplies_in_bfloat16_but_leaves_gradients_in_fp32(heads: int) -> None:
    torch.manual_seed(0)
    states = torch.randn(STEPS, ROWS, WIDTH, requires_grad=True)
    own = [torch.randn(VOCAB, WIDTH, requires_grad=True) for _ in range(heads)]
    rest: Any = (torch.rand(STEPS, ROWS), torch.randn(ROWS, 5), torch.randn(VOCAB, 5), LOSSES["kl"])
    exact, _ = chunked_head_loss(states, own, *rest)
    wanted = torch.autograd.grad(exact, [states, *own])
    with torch.autocast("cpu", torch.bfloat16):
        rounded, _ = chunked_head_loss(states, own, *rest)
    assert rounded.dtype == torch.float32
    assert rounded.item() == pytest.approx(exact.item(), rel=0.02)
    assert rounded.item() != exact.item()
    for left, right in zip(torch.autograd.grad(rounded, [states, *own]), wanted, strict=True):
        assert left.dtype == torch.float32
        torch.testing.assert_close(left, right, rtol=0.1, atol=0.1)
