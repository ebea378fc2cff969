"""UnrollMetrics on states, distributions and alignment made by hand.

The document is x0 ... x5 with x2 to x5 supervised, two steps. Row t predicts x[t + 2], then x[t + 3].

    row   step 0            step 1
    0     x2 hit            x3 miss (outside)
    1     x3 miss (outside) x4 miss
    2     x4 hit            x5 hit
    3     x5 miss           (no such token)
"""

from __future__ import annotations

import math

import pytest
import torch

import train.metrics
from data.alignment import Alignment
from train.losses import soft_cross_entropy
from train.metrics import UnrollMetrics

# Target's distributions over four tokens; the draft's vocabulary leaves out token 1, the favourite at x3.
P = [[0.125, 0.125, 0.5, 0.25], [0.125, 0.5, 0.25, 0.125], [0.25, 0.125, 0.125, 0.5], [0.5, 0.25, 0.125, 0.125]]
VOCABULARY = torch.tensor([0, 2, 3])
RESTRICTED = [[1 / 7, 4 / 7, 2 / 7], [1 / 4, 1 / 2, 1 / 4], [2 / 7, 1 / 7, 4 / 7], [2 / 3, 1 / 6, 1 / 6]]
# Draft's distributions over tokens 0, 2, 3, for x2 to x5. At x3 its favourite is the target's best inside.
Q0 = [[0.25, 0.5, 0.25], [0.25, 0.5, 0.25], [0.125, 0.25, 0.625], [0.25, 0.5, 0.25]]
Q1 = [[0.125, 0.75, 0.125], [0.25, 0.5, 0.25], [0.625, 0.25, 0.125], [0.5, 0.25, 0.25]]  # x2 is never used
ALIGNMENT = Alignment(
    rows=torch.tensor([0, 1, 2, 3]),
    targets=torch.tensor([2, 3, 4, 5]),
    index=torch.tensor([[0, 1, 2, 3], [0, 0, 1, 2]]),
    valid=torch.tensor([[True] * 4, [False, True, True, True]]),
)
# Sum over the draft's vocabulary of min(p, q): worked out by hand from P, Q0 and Q1.
ACCEPTED = [[0.875, 0.5, 0.75, 0.5], [0.125 + 0.25 + 0.125, 0.25 + 0.125 + 0.125, 0.5 + 0.125 + 0.125]]


def _update(metrics: UnrollMetrics, q0: list[list[float]], q1: list[list[float]], alignment: Alignment) -> None:
    count = alignment.targets.numel()
    states = torch.tensor([q0[:count], q1[:count]], dtype=torch.float64).log()
    target_states = torch.tensor(P[:count], dtype=torch.float64).log()
    inside, everything = torch.eye(3, dtype=torch.float64), torch.eye(4, dtype=torch.float64)
    metrics.update(states, [inside], target_states, everything, VOCABULARY, alignment, soft_cross_entropy)


def _cross_entropy(p: list[float], q: list[float]) -> float:
    return -sum(a * math.log(b) for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_hits_joint_hits_and_misses_outside_the_vocabulary(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train.metrics, "CHUNK_ROWS", chunk)
    metrics = UnrollMetrics(2)
    _update(metrics, Q0, Q1, ALIGNMENT)
    losses0 = [_cross_entropy(p, q) for p, q in zip(RESTRICTED, Q0, strict=True)]
    losses1 = [_cross_entropy(p, q) for p, q in zip(RESTRICTED[1:], Q1[1:], strict=True)]
    wanted = {
        "tau": 1 + 2 / 4 + 1 / 3,  # row 2 alone is right twice; only rows 0 to 2 have two tokens
        "accuracy/0": 2 / 4,
        "accuracy/1": 1 / 3,
        "acceptance/0": sum(ACCEPTED[0]) / 4,
        "acceptance/1": sum(ACCEPTED[1]) / 3,
        "loss/0": sum(losses0) / 4,
        "loss/1": sum(losses1) / 3,
    }
    assert {name: value.item() for name, value in metrics.compute().items()} == pytest.approx(wanted, rel=1e-6)


def test_sums_are_kept_over_batches_and_divided_once() -> None:
    metrics = UnrollMetrics(2)
    _update(metrics, Q0, Q1, ALIGNMENT)
    one = torch.tensor([[True], [False]])
    _update(metrics, Q0, Q1, Alignment(torch.tensor([0]), torch.tensor([2]), torch.zeros(2, 1, dtype=torch.int64), one))
    found = metrics.compute()  # the second batch is x2 alone, a hit
    assert found["accuracy/0"].item() == pytest.approx(3 / 5)
    assert found["accuracy/1"].item() == pytest.approx(1 / 3)
    assert found["acceptance/0"].item() == pytest.approx((sum(ACCEPTED[0]) + ACCEPTED[0][0]) / 5)
    assert found["tau"].item() == pytest.approx(1 + 3 / 5 + 1 / 3)


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_nothing_measured_is_zero_and_one() -> None:
    found = UnrollMetrics(2).compute()
    assert found.pop("tau").item() == 1.0
    assert {value.item() for value in found.values()} == {0.0}
