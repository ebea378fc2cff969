"""Typical acceptance: Medusa's rule as stated, and really not the target's distribution."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_decode.decode import speculative_decode
from spec_decode.drafters.leviathan import LanguageModelDraft
from spec_decode.lossy import LossyTypicalAcceptance, verify_lossy_typical
from spec_decode.sampling import Probabilities, Sampling
from spec_decode.toy import BigramLM
from spec_decode.tree import StaticTree, Tree

RULE = LossyTypicalAcceptance()


def rows(*values: list[float]) -> Probabilities:
    return Probabilities(torch.tensor(values, dtype=torch.float64).log(), Sampling(1.0))


def test_the_threshold_is_the_smaller_of_both() -> None:
    sure = torch.tensor([0.98, 0.01, 0.01])
    flat = torch.full((64,), 1 / 64)
    assert RULE.threshold(sure) == pytest.approx(0.09)
    assert RULE.threshold(flat) == pytest.approx(0.3 / 64)
    assert LossyTypicalAcceptance(0.5, 0.2).threshold(flat) == pytest.approx(0.2 * math.exp(-math.log(64)))


def test_the_longest_path_of_typical_tokens_is_taken() -> None:
    # root's children: 1 (plausible, a dead end), 2 (plausible), 0 (below the threshold); 2's child is plausible too
    tree = Tree(torch.tensor([0, 1, 2, 0, 1, 1]), torch.tensor([-1, 0, 0, 0, 1, 2]))
    p = rows(
        [0.02, 0.50, 0.48],
        [0.49, 0.01, 0.50],
        [0.30, 0.40, 0.30],
        [1 / 3] * 3,
        [1 / 3] * 3,
        [0.0, 0.0, 1.0],
    )
    verdict = verify_lossy_typical(tree, p, RULE)
    assert verdict.path.tolist() == [0, 2, 5]
    assert verdict.bonus == 2


def test_nothing_typical_leaves_the_targets_own_token() -> None:
    tree = Tree(torch.tensor([0, 1]), torch.tensor([-1, 0]))
    verdict = verify_lossy_typical(tree, rows([1.0, 0.0, 0.0], [0.0, 1.0, 0.0]), RULE)
    assert (verdict.path.tolist(), verdict.bonus) == ([0], 0)


def first_tokens(lossy: LossyTypicalAcceptance | None) -> Tensor:
    """The share of each second token, of 2,000 answers that start with token 0."""
    p = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    target = BigramLM(p.expand(4, 4).contiguous())
    draft = LanguageModelDraft(BigramLM(torch.tensor([[0.05, 0.15, 0.7, 0.1]], dtype=torch.float64).expand(4, 4)))
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(4)
    for _ in range(2000):
        result = speculative_decode(
            target,
            draft,
            [0],
            tree=StaticTree((1,)),
            max_new_tokens=2,
            sampling=Sampling(1.0),
            generator=generator,
            lossy=lossy,
        )
        counts[result.tokens[1]] += 1
    return counts / 2000


def test_it_is_lossy_and_exact_verification_is_not() -> None:
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    chi2 = 2000 * float(((first_tokens(None) - p) ** 2 / p).sum())
    assert chi2 < 3 + 5 * 6**0.5  # exceeded by a right decoder about once in 1,000 seeds
    # the draft's favourite, token 2, passes the threshold .3 exp(-1.14) = .096 and is always taken
    assert float(first_tokens(RULE)[2]) == 1.0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"epsilon": "0.1"}, TypeError, "epsilon must be a number, not str"),
        ({"delta": None}, TypeError, "delta must be a number, not NoneType"),
        ({"epsilon": 0.0}, ValueError, "0 < epsilon < 1 and delta > 0"),
        ({"delta": -1.0}, ValueError, "0 < epsilon < 1 and delta > 0"),
    ],
)
def test_wrong_thresholds_are_named(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LossyTypicalAcceptance(**arguments)


def test_it_needs_a_temperature() -> None:
    target = BigramLM(torch.full((4, 4), 0.25, dtype=torch.float64))
    with pytest.raises(ValueError, match="typical acceptance needs a temperature above 0"):
        speculative_decode(target, LanguageModelDraft(target), [0], tree=[1], max_new_tokens=2, lossy=RULE)
