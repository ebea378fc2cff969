"""The chunked head loss against the same loss computed at once."""

from __future__ import annotations

import pytest
import torch

from train import losses
from train.losses import chunked_head_loss, soft_cross_entropy


def test_soft_cross_entropy_by_hand():
    p = torch.tensor([0.5, 0.25, 0.25])
    logits = torch.tensor([0.25, 0.5, 0.25]).log() + 3.0
    wanted = -(0.5 * torch.tensor(0.25).log() + 0.25 * torch.tensor(0.5).log() + 0.25 * torch.tensor(0.25).log())
    assert soft_cross_entropy(logits, p).item() == pytest.approx(wanted.item(), abs=1e-6)


def test_soft_cross_entropy_is_that_of_torch():
    torch.manual_seed(0)
    logits = (5 * torch.randn(4, 2, 9, dtype=torch.float64)).requires_grad_()
    p = torch.randn(4, 1, 9, dtype=torch.float64).softmax(-1)
    ours, wanted = soft_cross_entropy(logits, p), -(p * logits.log_softmax(-1)).sum(-1)
    torch.testing.assert_close(ours, wanted)
    weights = torch.rand(4, 2, dtype=torch.float64)
    left, right = (torch.autograd.grad((loss * weights).sum(), logits)[0] for loss in (ours, wanted))
    torch.testing.assert_close(left, right)


def test_chunks_give_the_same_loss_and_gradients(monkeypatch):
    monkeypatch.setattr(losses, "CHUNK_ROWS", 7)
    monkeypatch.setattr(losses, "GROUP_ROWS", 13)
    torch.manual_seed(0)
    states = torch.randn(3, 10, 6, requires_grad=True)
    weight = torch.randn(11, 6, requires_grad=True)
    weights = torch.rand(3, 10) * (torch.rand(3, 10) > 0.3)
    target_states, target_weight = torch.randn(10, 5), torch.randn(11, 5)

    total, steps = chunked_head_loss(states, [weight], weights, target_states, target_weight, soft_cross_entropy)
    values = soft_cross_entropy(states @ weight.T, (target_states @ target_weight.T).softmax(-1))
    wanted = (values * weights).sum()

    assert total.item() == pytest.approx(wanted.item(), rel=1e-5)
    torch.testing.assert_close(steps, (values * (weights > 0)).sum(1).detach(), rtol=1e-5, atol=1e-5)
    ours = torch.autograd.grad(2 * total, (states, weight))
    theirs = torch.autograd.grad(2 * wanted, (states, weight))
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_same_loss_without_gradients(mode):
    torch.manual_seed(0)
    states, weight = torch.randn(2, 3, 4), torch.randn(5, 4, requires_grad=True)
    rest = (torch.ones(2, 3), torch.randn(3, 4), torch.randn(5, 4), soft_cross_entropy)
    wanted, _ = chunked_head_loss(states, [weight], *rest)
    with mode():
        total, _ = chunked_head_loss(states, [weight], *rest)
    assert not total.requires_grad
    assert total.item() == wanted.item()
