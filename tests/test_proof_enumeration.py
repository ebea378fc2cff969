"""The proof: over all outcomes of its randomness, with exact fractions, the accept walk emits the target's
distribution for every sibling rule, and each inexact variant of `shared/facts/verification.md` has its stated error.

`spec_decode.verify.walk` and `spec_decode.sampling.siblings` themselves run here, on arrays of `Fraction`: a source
of chance follows every branch once and multiplies the probabilities along it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from spec_decode.sampling import siblings, without
from spec_decode.tree import Tree
from spec_decode.verify import Chance, positive_part, walk

Row = Any  # a distribution over five tokens: an object array of fractions
VOCAB = 5
ROOT = 0


def row(*percent: int) -> Row:
    assert sum(percent) == 100
    return np.array([Fraction(value, 100) for value in percent], dtype=object)


P = row(35, 30, 20, 10, 5)
Q = row(10, 20, 30, 25, 15)
P_AFTER = [np.roll(P, token + 1) for token in range(VOCAB)]  # the target after each token
Q_AFTER = [np.roll(row(0, 50, 20, 0, 30), token) for token in range(VOCAB)]  # the draft there; three tokens possible


class Scripted:
    """Takes the branch that `script` names at each choice, the first one beyond it, and notes the others."""

    def __init__(self, script: list[int], open_scripts: list[list[int]]) -> None:
        self.script, self.open, self.taken = script, open_scripts, 0
        self.weight = Fraction(1)

    def _choose(self, options: list[tuple[Fraction, Any]]) -> Any:
        options = [(weight, value) for weight, value in options if weight > 0]
        if self.taken == len(self.script):
            self.open += [[*self.script, other] for other in range(1, len(options))]
            self.script = [*self.script, 0]
        weight, value = options[self.script[self.taken]]
        self.taken += 1
        self.weight *= weight
        return value

    def accepts(self, probability: Fraction) -> bool:
        return bool(self._choose([(Fraction(probability), True), (1 - Fraction(probability), False)]))

    def draw(self, p: Row) -> int:
        return int(self._choose(list(zip(p, range(VOCAB), strict=True))))


def outcomes(procedure: Callable[[Chance], tuple[int, ...]]) -> dict[tuple[int, ...], Fraction]:
    """The exact distribution of what a random procedure returns."""
    total: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
    scripts: list[list[int]] = [[]]
    while scripts:
        chance = Scripted(scripts.pop(), scripts)
        value = procedure(chance)
        total[value] += chance.weight
    return total


def emitted(tree: Tree, chance: Chance) -> tuple[int, ...]:
    """The tokens of one round of the real walk, for a target that looks at the last token alone."""
    p = [P, *(P_AFTER[token] for token in tree.tokens.tolist()[1:])]
    verdict = walk(tree, p, chance)
    return (*tree.tokens[verdict.path[1:]].tolist(), verdict.bonus)


def completed(rounds: dict[tuple[int, ...], Fraction], length: int) -> dict[tuple[int, ...], Fraction]:
    """Outcomes cut or drawn on from the target to `length` tokens, as the following rounds of decoding do."""
    total: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
    for tokens, weight in rounds.items():
        if len(tokens) >= length:
            total[tokens[:length]] += weight
            continue
        for token, p in enumerate(P_AFTER[tokens[-1]]):
            for rest, share in completed({(*tokens, token): weight * p}, length).items():
                total[rest] += share
    return {tokens: weight for tokens, weight in total.items() if weight}


def targets(length: int) -> dict[tuple[int, ...], Fraction]:
    return completed({(token,): p for token, p in enumerate(P)}, length)


def make_tree(tokens: list[int], parent: list[int], q: list[Row] | None) -> Tree:
    rows: Any = None if q is None else np.array([Q * 0, *q], dtype=object)
    return Tree(torch.tensor([ROOT, *tokens]), torch.tensor([-1, *parent]), rows)


def drawn_tree(branching: tuple[int, ...], rule: str) -> Callable[[Chance], Tree]:
    """Trees grown as `spec_decode.growth` does: level by level, each node's children drawn by the rule."""

    def draw(chance: Chance) -> Tree:
        tokens: list[int] = []
        parent: list[int] = []
        q: list[Row] = []
        level = [(0, Q)]
        for width in branching:
            below = []
            for node, distribution in level:
                for token, source in zip(*siblings(distribution, width, rule, chance.draw), strict=True):
                    tokens.append(token)
                    parent.append(node)
                    q.append(source)
                    below.append((len(tokens), Q_AFTER[token]))
            level = below
        return make_tree(tokens, parent, q)

    return draw


def fixed_tree(branching: tuple[int, ...]) -> Callable[[Chance], Tree]:
    """The most probable tokens of the draft at every node, no chance involved."""

    def build(_chance: Chance) -> Tree:
        tokens: list[int] = []
        parent: list[int] = []
        level = [(0, Q)]
        for width in branching:
            below = []
            for node, distribution in level:
                for token in sorted(range(VOCAB), key=lambda token: -distribution[token])[:width]:
                    tokens.append(token)
                    parent.append(node)
                    below.append((len(tokens), Q_AFTER[token]))
            level = below
        return make_tree(tokens, parent, None)

    return build


def one_hot(draw: Callable[[Chance], Tree]) -> Callable[[Chance], Tree]:
    """The same tree without its q: nodes verified as if nobody had drawn them."""

    def build(chance: Chance) -> Tree:
        tree = draw(chance)
        return Tree(tree.tokens, tree.parent)

    return build


EXACT = {
    "chain of 1": drawn_tree((1,), "independent"),
    "chain of 2": drawn_tree((1, 1), "independent"),
    "chain of 3": drawn_tree((1, 1, 1), "without_replacement"),
    "independent [3]": drawn_tree((3,), "independent"),
    "independent [2, 2]": drawn_tree((2, 2), "independent"),
    "without replacement [3]": drawn_tree((3,), "without_replacement"),
    "without replacement [2, 2]": drawn_tree((2, 2), "without_replacement"),
    "without replacement, all tokens": drawn_tree((5,), "without_replacement"),
    "top 3": fixed_tree((3,)),
    "top [3, 2]": fixed_tree((3, 2)),
    "greedy chain of 3": fixed_tree((1, 1, 1)),
    "drawn chain, one-hot": one_hot(drawn_tree((1, 1), "independent")),
    "drawn [2, 2], one-hot": one_hot(drawn_tree((2, 2), "independent")),
    "drawn without replacement [3], one-hot": one_hot(drawn_tree((3,), "without_replacement")),
}


@pytest.mark.parametrize("name", EXACT)
def test_the_emitted_tokens_have_exactly_the_targets_distribution(name: str) -> None:
    rounds = outcomes(lambda chance: emitted(EXACT[name](chance), chance))
    length = max(len(tokens) for tokens in rounds)  # a whole accepted path and its bonus token
    assert sum(rounds.values()) == 1
    assert completed(rounds, length) == targets(length)


def first_acceptance(build: Callable[[Chance], Tree]) -> Fraction:
    """The probability that some child of the root is accepted."""
    rounds = outcomes(lambda chance: (len(emitted(build(chance), chance)) - 1,))
    return 1 - rounds[(0,)]


@pytest.mark.parametrize(
    ("build", "accepted"),
    [
        (drawn_tree((2,), "without_replacement"), 0.788),
        (drawn_tree((2,), "independent"), 0.755),
        (drawn_tree((1,), "independent"), 0.65),
        (fixed_tree((2,)), 0.30),
    ],
)
def test_acceptance_is_that_of_the_table(build: Callable[[Chance], Tree], accepted: float) -> None:
    assert float(first_acceptance(build)) == pytest.approx(accepted, abs=5e-4)


# --- what is known to be wrong has the stated error -----------------------------------------------------------------


def original_q(chance: Chance) -> Tree:
    tokens, _ = siblings(Q, 2, "without_replacement", chance.draw)
    return make_tree(tokens, [0, 0], [Q, Q])


def top_2_by_ratio(chance: Chance) -> Tree:
    return make_tree([2, 3], [0, 0], [Q, Q])


def best_2_of_3(chance: Chance) -> Tree:
    tokens, _ = siblings(Q, 3, "without_replacement", chance.draw)
    kept = sorted(sorted(range(3), key=lambda i: -Q[tokens[i]])[:2])
    first, second = (tokens[i] for i in kept)
    return make_tree([first, second], [0, 0], [Q, without(Q, first)])


def sorted_by_q(chance: Chance) -> Tree:
    tokens, _ = siblings(Q, 2, "without_replacement", chance.draw)
    first, second = sorted(tokens, key=lambda token: -Q[token])
    return make_tree([first, second], [0, 0], [Q, without(Q, first)])


def removes_only_x(chance: Chance) -> tuple[int, ...]:
    token = chance.draw(Q)
    if chance.accepts(min(Fraction(1), P[token] / Q[token])):
        return (token,)
    return (chance.draw(without(P, token)),)


def walked(build: Callable[[Chance], Tree]) -> Callable[[Chance], tuple[int, ...]]:
    return lambda chance: emitted(build(chance), chance)[:1]


@pytest.mark.parametrize(
    ("procedure", "error"),
    [
        (walked(original_q), 0.018),
        (walked(top_2_by_ratio), 0.467),
        (removes_only_x, 0.111),
        (walked(best_2_of_3), 0.116),
        (walked(sorted_by_q), 0.188),
        (walked(one_hot(best_2_of_3)), 0.0),
        (walked(one_hot(sorted_by_q)), 0.0),
    ],
    ids=[
        "original q",
        "top 2 by p/q",
        "residual removes x",
        "best 2 of 3",
        "sorted",
        "best 2, one-hot",
        "sorted, one-hot",
    ],
)
def test_inexact_variants_have_their_stated_error(procedure: Callable[[Chance], tuple[int, ...]], error: float) -> None:
    first = outcomes(procedure)
    distance = sum(abs(first[(token,)] - P[token]) for token in range(VOCAB)) / 2
    assert float(distance) == pytest.approx(error, abs=6e-4)
    assert (distance == 0) == (error == 0)


def test_the_functions_under_proof_do_the_same_on_tensors() -> None:
    p, q = (torch.tensor([float(value) for value in values], dtype=torch.float64) for values in (P, Q))
    exact = [float(value) for value in positive_part(P - Q)]
    assert positive_part(p - q).tolist() == pytest.approx(exact)
    assert without(q, 2).tolist() == pytest.approx([float(value) for value in without(Q, 2)])
    assert positive_part(q - q) is None
    assert without(torch.tensor([0.0, 1.0]), 1) is None


def every_row() -> Iterator[Row]:
    yield from (P, Q, *P_AFTER, *Q_AFTER)


def test_the_example_is_made_of_distributions() -> None:
    assert all(values.sum() == 1 and min(values) >= 0 for values in every_row())
