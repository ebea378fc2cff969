"""`python -m eval simulate`: closed form and Monte Carlo agree, and the command says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval.cli import main
from eval.simulate import best_static, simulate
from spec_decode.search import expected_tokens, length_distribution, rank_table, static_shapes
from spec_decode.tree import SparseTree, StaticTree, chain

TABLE = rank_table([0.70, 0.55, 0.42, 0.32], 4)


@pytest.mark.parametrize("plan", [StaticTree((4, 3, 2, 2)), chain(4), SparseTree(((0,), (1,), (0, 0)))])
def test_the_simulation_agrees_with_the_closed_form(plan: Any) -> None:
    one = simulate("", plan, TABLE, 200_000, np.random.default_rng(0))
    assert one.expected == expected_tokens(plan, TABLE)
    assert abs(one.mean - one.expected) < 4 * one.error  # a right one fails once in 16,000 seeds
    assert 0 < one.error < 0.004
    for share, exact in zip(one.lengths, length_distribution(plan, TABLE), strict=True):
        assert share == pytest.approx(exact, abs=0.006)


def test_the_best_static_shapes_come_first() -> None:
    found = best_static(TABLE[:3], 4)
    best = max(expected_tokens(shape, TABLE) for shape in static_shapes(4, 3))
    assert expected_tokens(found[0], TABLE) == pytest.approx(best)
    values = [expected_tokens(shape, TABLE) for shape in found]
    assert values == sorted(values, reverse=True)


@pytest.fixture
def run_simulate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture) -> Any:
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> str:
        monkeypatch.setattr("sys.argv", ["eval", "simulate", *words])
        main()
        return " ".join(capsys.readouterr().out.split())

    return run


def test_the_example_of_the_docs(run_simulate: Any, tmp_path: Path) -> None:
    told = run_simulate("shape=[4,3,2,2]", "accuracy=[0.70,0.55,0.42,0.32]")
    for number in ("88", "3.8133", "2.2984", "tree over chain: 1.659"):
        assert number in told
    (plot,) = tmp_path.glob("outputs/simulate/*/lengths.svg")
    assert plot.read_text().startswith("<svg")


def test_pruning_and_the_sweep(run_simulate: Any) -> None:
    told = run_simulate("threshold=0.02", "nodes=12")
    assert "pruned at 0.02" in told
    assert "best 12 nodes" in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["shape=[4,3]", "accuracy=[0.5]"], "shape=[4, 3] has 2 levels but accuracy=[0.5] has 1"),
        (["accuracy=[0.5,1.5,0.1,0.1]"], "accuracy=[0.5, 1.5, 0.1, 0.1] is not possible"),
        (["shape=[0]"], "shape=[0] is not possible"),
        (["threshold=0.99"], "threshold=0.99 drops every node"),
        (["nodes=0"], "nodes=0 is not possible"),
    ],
)
def test_bad_numbers_are_refused(
    run_simulate: Any, capsys: pytest.CaptureFixture, words: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        run_simulate(*words)
    assert message in " ".join(capsys.readouterr().err.split())
