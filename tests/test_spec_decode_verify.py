"""What the accept walk emits has the target's distribution: counts against exact values, with fixed seeds.

A chi-square statistic of df degrees may be df + 5 sqrt(2 df) here, which a right walk exceeds about once in 10,000
seeds; the last test shows that the bound catches the subtlest of the known wrong rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from spec_decode.sampling import Probabilities, Sampling
from spec_decode.tree import Tree
from spec_decode.verify import verify, verify_greedy

Make = Callable[[torch.Generator], tuple[Tree, Tensor]]

ROOT = 0
P = torch.tensor([0.35, 0.30, 0.20, 0.10, 0.05], dtype=torch.float64)
Q = torch.tensor([0.10, 0.20, 0.30, 0.25, 0.15], dtype=torch.float64)
ROWS = torch.stack([P.roll(token + 1) for token in range(5)] + [P])  # target distribution after each token; root last


def excess(counts: Tensor, expected: Tensor) -> float:
    """Chi-square statistic over its bound: above 1 the distribution is wrong."""
    cells = expected > 0
    assert counts[~cells].sum() == 0
    chi2 = float((((counts - expected) ** 2)[cells] / expected[cells]).sum())
    df = int(cells.sum()) - 1
    return chi2 / (df + 5 * math.sqrt(2 * df))


def emitted(make: Make, seed: int, rounds: int) -> Tensor:
    """Counts [5, 5] of the first two tokens after the root; where the walk ends after one, the target draws the
    second, as the next round of decoding does."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.zeros(5, 5, dtype=torch.float64)
    for _ in range(rounds):
        tree, p = make(generator)
        verdict = verify(tree, p, generator)
        tokens = [*tree.tokens[verdict.path[1:]].tolist(), verdict.bonus]
        if len(tokens) == 1:
            tokens.append(int(torch.multinomial(ROWS[tokens[0]], 1, generator=generator)))
        counts[tokens[0], tokens[1]] += 1
    return counts


TARGET = P[:, None] * ROWS[:5]


def tree_of(tokens: list[int], parent: list[int], q: list[Tensor] | None = None) -> tuple[Tree, Tensor]:
    return Tree(torch.tensor(tokens), torch.tensor(parent), torch.stack([Q, *q]) if q else None), ROWS[
        [-1, *tokens[1:]]
    ]


def chain(generator: torch.Generator) -> tuple[Tree, Tensor]:
    first, second = torch.multinomial(Q, 2, replacement=True, generator=generator).tolist()
    return tree_of([ROOT, first, second], [-1, 0, 1], [Q, Q])


def independent(generator: torch.Generator) -> tuple[Tree, Tensor]:
    draws = torch.multinomial(Q, 3, replacement=True, generator=generator).tolist()
    return tree_of([ROOT, *draws], [-1, 0, 0, 0], [Q, Q, Q])


def without_replacement(generator: torch.Generator) -> tuple[Tree, Tensor]:
    draws = torch.multinomial(Q, 2, generator=generator).tolist()
    rest = Q.clone()
    rest[draws[0]] = 0
    return tree_of([ROOT, *draws], [-1, 0, 0], [Q, rest / rest.sum()])


def one_hot(generator: torch.Generator) -> tuple[Tree, Tensor]:
    # children of two nodes interleaved, which a walk by levels would meet in another order
    return tree_of([ROOT, 3, 2, 0, 4, 1, 2], [-1, 0, 0, 1, 2, 1, 2])


def one_hot_duplicates(generator: torch.Generator) -> tuple[Tree, Tensor]:
    return tree_of([ROOT, 2, 2, 1, 1], [-1, 0, 0, 0, 1])


def one_hot_of_samples(generator: torch.Generator) -> tuple[Tree, Tensor]:
    draws = torch.multinomial(Q, 3, generator=generator).sort().values.tolist()
    return tree_of([ROOT, *draws], [-1, 0, 0, 0])


@pytest.mark.parametrize(
    ("make", "rounds"),
    [
        (chain, 5000),
        (independent, 5000),
        (without_replacement, 20_000),
        (one_hot, 5000),
        (one_hot_duplicates, 5000),
        (one_hot_of_samples, 5000),
    ],
)
def test_emits_the_targets_distribution(make: Make, rounds: int) -> None:
    assert excess(emitted(make, 0, rounds).flatten(), rounds * TARGET.flatten()) < 1


def test_the_bound_catches_a_wrong_rule() -> None:
    def original_q(generator: torch.Generator) -> tuple[Tree, Tensor]:
        return tree_of([ROOT, *torch.multinomial(Q, 2, generator=generator).tolist()], [-1, 0, 0], [Q, Q])

    assert excess(emitted(original_q, 0, 20_000).sum(1), 20_000 * P) > 1  # total variation .018


def test_acceptance_rates_are_those_of_the_rule() -> None:
    # verification.md: one-hot top-2 of q accepts P(2) + P(3) = .30, the chain sum min(p, q) = .65
    generator = torch.Generator().manual_seed(0)
    one_hot_tree = tree_of([ROOT, 2, 3], [-1, 0, 0])
    hits = sum(len(verify(*one_hot_tree, generator).path) == 2 for _ in range(4000))
    assert hits / 4000 == pytest.approx(0.30, abs=0.03)
    hits = sum(len(verify(*chain(generator), generator).path) >= 2 for _ in range(4000))
    assert hits / 4000 == pytest.approx(0.65, abs=0.03)


def test_a_sure_token_is_always_taken_and_an_impossible_one_never() -> None:
    p = torch.tensor([[0.0, 1.0, 0.0]] * 3)
    for seed in range(50):
        verdict = verify(
            Tree(torch.tensor([0, 2, 1]), torch.tensor([-1, 0, 0])), p, torch.Generator().manual_seed(seed)
        )
        assert verdict.path.tolist() == [0, 2]
        assert verdict.bonus == 1


def test_a_residual_without_mass_falls_back_to_p() -> None:
    # fp32 rounding can leave p(x) a little below q(x) = 1 with nothing elsewhere; a large gap makes it sure to happen
    p = torch.tensor([[0.0, 1e-30, 0.0]] * 2)
    tree = Tree(torch.tensor([0, 1]), torch.tensor([-1, 0]), torch.tensor([[0.0, 1.0, 0.0]] * 2))
    verdict = verify(tree, p, torch.Generator().manual_seed(0))
    assert verdict.path.tolist() == [0]
    assert verdict.bonus == 1


def test_greedy_equals_one_hot_p_on_random_trees() -> None:
    generator = torch.Generator().manual_seed(0)
    depths = []
    for _ in range(300):
        size = int(torch.randint(1, 12, (), generator=generator))
        parent = [-1] + [int(torch.randint(0, node, (), generator=generator)) for node in range(1, size)]
        tree = Tree(torch.randint(0, 3, (size,), generator=generator), torch.tensor(parent))
        logits = torch.randn(size, 3, generator=generator)
        greedy = verify_greedy(tree, logits.argmax(-1))
        walked = verify(tree, Probabilities(logits, Sampling(0.0)), generator)
        assert greedy.path.tolist() == walked.path.tolist()
        assert greedy.bonus == walked.bonus
        depths.append(len(greedy.path) - 1)
    assert max(depths) >= 3  # the trees do get accepted


def test_the_same_seed_gives_the_same_verdict() -> None:
    def verdicts() -> list[tuple[list[int], int]]:
        generator = torch.Generator().manual_seed(5)
        tree, p = one_hot(generator)
        return [(verdict.path.tolist(), verdict.bonus) for verdict in (verify(tree, p, generator) for _ in range(20))]

    assert verdicts() == verdicts()
    assert len({bonus for _, bonus in verdicts()}) > 1


# --- what a caller can get wrong ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: verify([0, 1], P[None]), "tree must be a Tree, not list"),  # type: ignore[arg-type]
        (lambda: verify(Tree.of_root(0), [0.5, 0.5]), "p must be a tensor"),  # type: ignore[arg-type]
        (lambda: verify(Tree.of_root(0), P[None], 7), "generator must be a torch.Generator or None, not int"),  # type: ignore[arg-type]
        (lambda: verify_greedy(None, torch.tensor([1])), "tree must be a Tree, not NoneType"),  # type: ignore[arg-type]
        (lambda: verify_greedy(Tree.of_root(0), [1]), r"argmax must be an int64 tensor \[N\], not list"),  # type: ignore[arg-type]
    ],
)
def test_wrong_types_are_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


def test_decisions_tell_what_chance_decided() -> None:
    tree, p = tree_of([ROOT, 2, 3], [-1, 0, 0])
    verdict = verify(tree, p, torch.Generator().manual_seed(0))
    first = verdict.decisions[0]
    assert (first.node, first.probability) == (1, pytest.approx(0.20))
    if len(verdict.decisions) == 2:
        assert verdict.decisions[1].probability == pytest.approx(0.10 / 0.80)
        assert float(verdict.decisions[1].residual[2]) == 0
