"""Sweeps: what a run leaves behind, who is said to have won, and the sentences for what can't be started."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from rich.console import Console

from spec_decode.errors import DraftwrightError
from train.sweep import Run, changed, conclusions, read_runs, recorded, show


def leave(
    folder: Path,
    *overrides: str,
    failed: str | None = None,
    val_tau: float | None = None,
    decoded: tuple[float | None, float] | None = None,
) -> None:
    """What a run of a sweep writes; decoded: τ and speedup of the final evaluation."""
    (folder / "eval").mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps({"overrides": ["seed=1", *overrides], "failed": failed}))
    metrics = {} if val_tau is None else {"val/tau": val_tau}
    (folder / "run.json").write_text(json.dumps({"config": {"module": {"steps": 3}}, "metrics": metrics}))
    if decoded:
        numbers = {"tau": decoded[0], "speedup": decoded[1]}
        (folder / "eval" / "report.json").write_text(json.dumps({"benchmarks": {"held_out": numbers}}))


def test_files_of_the_runs_become_a_table(tmp_path: Path) -> None:
    leave(tmp_path / "0", "module.lr=0.001", val_tau=1.25, decoded=(1.75, 1.125))
    leave(tmp_path / "2", "module.lr=0.00123456", "names=[kl,lk]", val_tau=1.5, decoded=(1.5, 1.25))
    leave(tmp_path / "10", "module.lr=1", failed="it is too high")
    leave(tmp_path / "9", "module.lr=2")
    (tmp_path / "multirun.yaml").touch()
    runs = read_runs(tmp_path)
    assert runs == [
        Run(
            "2",
            ["seed=1", "module.lr=0.00123456", "names=[kl,lk]"],
            None,
            {"val/tau": 1.5, "τ": 1.5, "speedup": 1.25},
            3,
        ),
        Run("0", ["seed=1", "module.lr=0.001"], None, {"val/tau": 1.25, "τ": 1.75, "speedup": 1.125}, 3),
        Run("9", ["seed=1", "module.lr=2"], None, {}, 3),
        Run("10", ["seed=1", "module.lr=1"], "it is too high", {}, None),
    ]
    shown = StringIO()
    show(runs, Console(file=shown, width=100))
    lines = [line for line in shown.getvalue().splitlines() if line.strip(" ─")]
    assert [line.split() for line in lines[:-3]] == [
        ["run", "changed", "val/tau", "τ", "speedup"],
        ["2", "module.lr=0.001235", "names=[kl,lk]", "1.500", "1.500", "1.250"],
        ["0", "module.lr=0.001", "1.250", "1.750", "1.125"],
        ["9", "module.lr=2", "–", "–", "–"],
        ["10", "module.lr=1", "failed"],
    ]
    assert lines[-3:] == [
        "best val/tau: run 2 (module.lr=0.001235 names=[kl,lk]) with 1.500, 0.250 above run 0",
        "best τ: run 0 (module.lr=0.001) with 1.750, 0.250 above run 2",
        "best speedup: run 2 (module.lr=0.001235 names=[kl,lk]) with 1.250, 0.125 above run 0",
    ]


def test_runs_with_different_steps_are_not_compared_in_silence() -> None:
    runs = [Run(str(steps), [f"module.steps={steps}"], None, {"val/tau": 1 + steps / 4}, steps) for steps in (2, 4)]
    assert changed(runs[0], runs) == "module.steps=2"
    assert conclusions(runs) == [
        "best val/tau: run 4 (module.steps=4) with 2.000, 0.500 above run 2",
        "val/tau can't exceed 1 + module.steps, so it doesn't compare runs with different steps",
    ]
    assert conclusions(runs[:1]) == []


@pytest.mark.parametrize(
    ("error", "sentence"),
    [(DraftwrightError("a is wrong: do b"), "a is wrong: do b"), (MemoryError("no\nroom"), "MemoryError: no")],
)
def test_an_error_ends_the_run_and_not_the_sweep(
    error: Exception, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with recorded(tmp_path, ["seed=1"]):
        raise error
    assert json.loads((tmp_path / "job.json").read_text()) == {"overrides": ["seed=1"], "failed": sentence}
    assert ("Traceback" in capsys.readouterr().err) == isinstance(error, MemoryError)


def test_a_signal_ends_the_sweep(tmp_path: Path) -> None:
    with pytest.raises(SystemExit), recorded(tmp_path, []):
        raise SystemExit(143)
    assert json.loads((tmp_path / "job.json").read_text())["failed"] is None


@pytest.fixture
def world(tmp_path: Path, make_world: Callable[[Path], Path]) -> Path:
    return make_world(tmp_path)


def test_sweep_in_other_processes_ends_with_the_table_and_names_what_failed(
    world: Path, train_in: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["+variant=eagle3", "logger=none", "eval.enabled=false", "hydra/launcher=local", "hydra.sweep.dir=out"]
    with pytest.raises(SystemExit) as ended:
        train_in(world, *words, "module.loss=kl,nonsense,lk", sweep=True)
    shown = capsys.readouterr()
    assert ended.value.code == 2
    runs = {run.name: run for run in read_runs(world / "out")}
    assert [runs[name].overrides[-1] for name in "012"] == [f"module.loss={x}" for x in ("kl", "nonsense", "lk")]
    assert [bool(runs[name].values) for name in "012"] == [True, False, True]
    best = max((runs["0"], runs["2"]), key=lambda run: run.values["val/tau"])
    assert f"best val/tau: run {best.name} ({best.overrides[-1]}) with {best.values['val/tau']:.3f}" in shown.out
    assert shown.err.splitlines()[-1].startswith("train: run 1 failed: module.loss=nonsense is unknown; choose from")


def refused(train_in: Callable[..., None], world: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one sentence on stderr that a sweep ends with."""
    with pytest.raises(SystemExit) as ended:
        train_in(world, *words, sweep=True)
    (sentence,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    return sentence.removeprefix("train: ")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["+variant=eagle3", "module.lr=interval(0.1,1)"],
            "interval(…) leaves a value to a search: add +sweep=optuna, or list values: key=a,b",
        ),
        (
            ["+variant=eagle,eagle3", "module.lr=1"],
            "'module.lr' comes with what the sweep varies: write module.lr=choice(VALUE)",
        ),
        (
            ["+variant=eagle3", "hydra/launcher=cluster"],
            "there is no hydra/launcher 'cluster'; choose from: basic, joblib, local, slurm, submitit_local, "
            "submitit_slurm",
        ),
        (
            ["+variant=eagle3", "+sweep=optuna", "heldout_tokens=0"],
            "heldout_tokens=0 leaves nothing to measure val/tau on: raise it for a search",
        ),
        (
            ["+variant=eagle3", "+sweep=optuna", "module.lr=interval(2,1)"],
            "module.lr=interval(2,1) is no range to search (`low <= high` must hold, but got (low=2.0, high=1.0).): "
            "correct its ends",
        ),
    ],
)
def test_what_cannot_be_swept_is_one_sentence(
    words: list[str], sentence: str, tmp_path: Path, train_in: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(train_in, tmp_path, capsys, *words) == sentence


@pytest.mark.skipif(shutil.which("srun") is not None, reason="this is a SLURM cluster")
def test_slurm_needs_a_cluster(
    tmp_path: Path, train_in: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = refused(train_in, tmp_path, capsys, "+variant=eagle3", "hydra/launcher=slurm", "seed=1,2")
    assert sentence == "hydra/launcher=slurm finds no srun: start it on a machine of a SLURM cluster"


@pytest.mark.parametrize(
    ("choice", "plugin", "package"),
    [("local", "joblib", "hydra-joblib-launcher"), ("slurm", "submitit_slurm", "hydra-submitit-launcher")],
)
def test_a_missing_launcher_names_its_package(
    choice: str,
    plugin: str,
    package: str,
    tmp_path: Path,
    train_in: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Plugins.instance()  # plugins store their choices when they are discovered
    monkeypatch.delitem(ConfigStore.instance().repo["hydra"]["launcher"], f"{plugin}.yaml")
    sentence = refused(train_in, tmp_path, capsys, "+variant=eagle3", f"hydra/launcher={choice}", "seed=1,2")
    assert sentence == f"this launcher needs the package {package}: run `pip install {package}` first"
