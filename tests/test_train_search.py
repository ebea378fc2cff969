"""A search: what it draws from, that it continues where it was stopped, and when it ends early."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

from spec_decode.errors import DraftwrightError
from train.search import Search, distribution, in_state, open_study

WORDS = ["+variant=eagle3", "lr=interval(0.5,2.0)", "loss=kl,lk", "decay=0.25"]


class Launcher:
    """Notes the words of every job and returns what `values` holds for it; "kill" stands for a killed process."""

    def __init__(self, *values: Any) -> None:
        self.values, self.batches = list(values), []

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[SimpleNamespace]:
        self.batches.append([list(words) for words in job_overrides])
        returned = [self.values.pop(0) for _ in job_overrides]
        if "kill" in returned:
            raise KeyboardInterrupt
        return [SimpleNamespace(return_value=value) for value in returned]

    @property
    def folders(self) -> list[list[str]]:
        """The sub-folders of the jobs, batch by batch."""
        prefix = "hydra.sweep.subdir="
        return [
            [w.removeprefix(prefix) for job in batch for w in job if w.startswith(prefix)] for batch in self.batches
        ]


def search(folder: Path, launcher: Launcher, n_trials: int, n_jobs: int = 1, words: Sequence[str] = WORDS) -> Search:
    found = Search(folder, words, seed=0)
    found.run(launcher, n_trials=n_trials, n_jobs=n_jobs)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("lr=interval(0.5,2)", FloatDistribution(0.5, 2.0)),
        ("lr=tag(log,interval(0.5,2))", FloatDistribution(0.5, 2.0, log=True)),
        ("depth=int(interval(1,8))", IntDistribution(1, 8)),
        ("depth=range(1,4)", CategoricalDistribution(["1", "2", "3"])),
        ("loss=kl,lk", CategoricalDistribution(["kl", "lk"])),
        ("layers=choice([1,2],[3])", CategoricalDistribution(["[1,2]", "[3]"])),
    ],
)
def test_ranges_and_choices(word: str, expected: BaseDistribution) -> None:
    assert distribution(OverridesParser.create().parse_override(word)) == expected


def test_jobs_get_what_is_fixed_and_what_is_drawn(tmp_path: Path) -> None:
    launcher = Launcher(1.5, 1.25)
    study = search(tmp_path / "a", launcher, 2, words=[*WORDS, "decay=0.5", "seed=3"]).study
    assert launcher.batches == [
        [
            [
                "+variant=eagle3", "decay=0.5", "seed=3", f"lr={trial.params['lr']}", f"loss={trial.params['loss']}",
                f"hydra.sweep.subdir={trial.number}",
            ]
        ]
        for trial in study.trials
    ]  # fmt: skip
    assert all(0.5 <= trial.params["lr"] <= 2 and trial.params["loss"] in ("kl", "lk") for trial in study.trials)
    assert [trial.value for trial in study.trials] == [1.5, 1.25]
    assert study.best_value == 1.5


def test_repeated_search_runs_what_is_left_and_draws_anew(tmp_path: Path) -> None:
    first, again, more = Launcher(1.0, 2.0), Launcher(), Launcher(3.0, None, 4.0)
    search(tmp_path, first, 2)
    search(tmp_path, again, 2)
    study = search(tmp_path, more, 5, n_jobs=2).study
    assert (first.folders, again.folders, more.folders) == ([["0"], ["1"]], [], [["2", "3"], ["4"]])
    assert [trial.value for trial in study.trials] == [1.0, 2.0, 3.0, None, 4.0]
    assert [trial.number for trial in in_state(study, TrialState.FAIL)] == [3]
    assert len({trial.params["lr"] for trial in study.trials}) == 5


def test_killed_runs_come_first_with_their_values_and_checkpoint(tmp_path: Path) -> None:
    killed, rest = Launcher(1.0, 1.0, "kill", "kill"), Launcher(2.0, 3.0, 4.0)
    folder = tmp_path / "it's"
    with pytest.raises(KeyboardInterrupt):
        search(folder, killed, 5, n_jobs=2)
    (folder / "3").mkdir()
    (folder / "3" / "last.ckpt").touch()
    study = search(folder, rest, 5, n_jobs=2).study
    assert (killed.folders, rest.folders) == ([["0", "1"], ["2", "3"]], [["2", "3"], ["4"]])
    before, now = killed.batches[1], rest.batches[0]
    assert now[0] == before[0]
    assert now[1][:-1] == before[1]
    parsed = OverridesParser.create().parse_override(now[1][-1])
    assert (parsed.key_or_group, parsed.value()) == ("ckpt_path", str(folder / "3" / "last.ckpt"))
    assert [trial.value for trial in study.trials] == [1.0, 1.0, 2.0, 3.0, 4.0]


def test_search_ends_where_nothing_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launcher = Launcher(None, None)
    search(tmp_path, launcher, 9, n_jobs=2)
    assert launcher.folders == [["0", "1"]]
    assert capsys.readouterr().out == f"no run in {tmp_path} has worked so far, so the search ends here\n"
    other = Launcher(1.0)
    search(tmp_path, other, 1, words=[*WORDS, "loss=kl"])  # other words may take the place of failures
    assert other.folders == [["0"]]


def test_another_search_does_not_continue_this_one(tmp_path: Path) -> None:
    search(tmp_path, Launcher(1.0), 1)
    message = (
        f"the search in {tmp_path} was started with decay=0.25, now it's decay=0.5 seed=1: repeat the command that "
        "started it, or start another search with hydra.sweep.dir=FOLDER"
    )
    with pytest.raises(DraftwrightError, match=f"^{re.escape(message)}$"):
        Search(tmp_path, [*WORDS, "decay=0.5", "seed=1"], seed=0)
    assert len(open_study(tmp_path, sorted(WORDS)).trials) == 1


def test_a_search_from_the_command_line_continues(
    tmp_path: Path, make_world: Callable[[Path], Path], train_in: Callable[..., None], capsys: pytest.CaptureFixture
) -> None:
    world = make_world(tmp_path)
    words = ["+variant=eagle3", "+sweep=optuna", "logger=none", "eval.enabled=false", "module.decay=0.5"]
    train_in(world, *words, "hydra.sweeper.n_trials=1")
    train_in(world, *words, "hydra.sweeper.n_trials=2")
    folder = world / "outputs" / "search" / "eagle3"
    records = [json.loads((folder / name / "run.json").read_text()) for name in "01"]
    for record in records:
        module = record["config"]["module"]
        assert 0.003 <= module["lr"] <= 0.05
        assert module["decay"] == 0.5
        assert module["loss"] in ("soft_cross_entropy", "lk", "lk_adaptive")
    study = optuna.load_study(study_name="eagle3", storage=f"sqlite:///{folder / 'optuna.db'}")
    assert [trial.value for trial in study.trials] == [record["metrics"]["val/tau"] for record in records]
    shown = capsys.readouterr().out
    assert shown.count("draft written to") == 2
    assert "best val/tau: run " in shown


def test_optuna_is_asked_for_by_name(
    tmp_path: Path, train_in: Callable[..., None], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "train.search")
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(SystemExit):
        train_in(tmp_path, "+variant=eagle3", "+sweep=optuna")
    assert capsys.readouterr().err == "train: +sweep=optuna needs Optuna: run `pip install optuna` first\n"
