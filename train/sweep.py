"""Sweeps (`python -m train -m …`): what each run leaves behind, and the table at the end.

    SWEEP_DIR/0/job.json    {"overrides": ["+variant=eagle3", "module.lr=0.01"], "failed": null or a sentence}
    SWEEP_DIR/0/run.json    val/tau, of the whole held-out split
    SWEEP_DIR/0/eval/report.json    τ and speedup of decoding, where they were measured

A run may be in another process or on another machine, so files carry what the table needs.
"""

from __future__ import annotations

import json
import shutil
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from conf import MISTAKES, fail, one_sentence
from spec_decode.errors import first_line
from train.provenance import write_record

MEASURES = ("val/tau", "τ", "speedup")  # the first is of the simulated acceptance, the others of real decoding


@dataclass(frozen=True)
class Run:
    """One run of a sweep. values: of each of MEASURES that was measured; steps: of the training-time test."""

    name: str
    overrides: list[str]
    failed: str | None
    values: dict[str, float]
    steps: int | None


@contextmanager
def recorded(folder: Path, overrides: Sequence[str]) -> Iterator[None]:
    """Write job.json for what runs inside; an error ends the run, not the sweep."""

    def record(failed: str | None) -> None:
        write_record(folder, "job.json", {"overrides": list(overrides), "failed": failed})

    record(None)
    try:
        try:
            yield
        except MISTAKES as error:
            record(one_sentence("train", error))  # or raises what isn't a user's mistake
    except Exception as error:
        traceback.print_exc()
        record(f"{type(error).__name__}: {first_line(error)}")


class SweepCallback(Callback):
    """Hydra callback that shows how the runs of a sweep compare; failed ones end the program with status 2."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        if config.hydra.launcher._target_.endswith(".SlurmLauncher") and not shutil.which("srun"):
            fail("train", "hydra/launcher=slurm finds no srun: start it on a machine of a SLURM cluster")

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        runs = read_runs(Path(config.hydra.sweep.dir))
        show(runs, Console())
        if failed := [run for run in runs if run.failed]:
            fail("train", *(f"run {run.name} failed: {run.failed}" for run in failed))


def read_runs(folder: Path) -> list[Run]:
    """The runs in a sweep's folder, best val/tau first, those without one last."""
    runs = [_read_run(path.parent) for path in folder.glob("*/job.json")]
    return sorted(runs, key=lambda run: (-run.values.get("val/tau", 0.0), len(run.name), run.name))


def _read_run(folder: Path) -> Run:
    job = json.loads((folder / "job.json").read_text())
    record, report = (
        json.loads(path.read_text()) if path.exists() and not job["failed"] else {}
        for path in (folder / "run.json", folder / "eval" / "report.json")
    )
    numbers = report.get("benchmarks", {}).get("held_out", {})
    measured = (record.get("metrics", {}).get("val/tau"), numbers.get("tau"), numbers.get("speedup"))
    values = {name: value for name, value in zip(MEASURES, measured, strict=True) if value is not None}
    steps = record["config"]["module"]["steps"] if record else None
    return Run(folder.name, job["overrides"], job["failed"], values, steps)


def show(runs: Sequence[Run], console: Console) -> None:
    """Print one row for each run, and who leads in each measure."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("run")
    table.add_column("changed", overflow="fold")
    for name in MEASURES:
        table.add_column(name, justify="right")
    for run in runs:
        numbers = (f"{run.values[name]:.3f}" if name in run.values else "–" for name in MEASURES)
        table.add_row(run.name, escape(changed(run, runs)), *(["failed"] if run.failed else numbers))
    console.print(table)
    for sentence in conclusions(runs):
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)


def changed(run: Run, runs: Sequence[Run]) -> str:
    """The overrides that not all runs share, numbers with four digits."""
    shared = set.intersection(*(set(other.overrides) for other in runs))
    return " ".join(_short(word) for word in run.overrides if word not in shared)


def _short(word: str) -> str:
    key, _, value = word.partition("=")
    try:
        return f"{key}={float(value):.4g}"
    except ValueError:
        return word


def conclusions(runs: Sequence[Run]) -> list[str]:
    """Which run is best in each measure and by how much, in sentences."""
    sentences = []
    for name in MEASURES:
        ranked = sorted((run for run in runs if name in run.values), key=lambda run: -run.values[name])
        if len(ranked) > 1:
            first, second = ranked[:2]
            sentences.append(
                f"best {name}: run {first.name} ({changed(first, runs)}) with {first.values[name]:.3f}, "
                f"{first.values[name] - second.values[name]:.3f} above run {second.name}"
            )
    if len({run.steps for run in runs if run.steps}) > 1:
        sentences.append("val/tau can't exceed 1 + module.steps, so it doesn't compare runs with different steps")
    return sentences
