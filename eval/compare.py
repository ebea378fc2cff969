"""`python -m eval compare FOLDER…`: drafts that were measured, side by side: a table, compare.html and compare.json."""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from conf import plain
from conf.check import build
from eval.compare_page import page
from eval.report import hardware, interval, tau, tree_sizes, warnings
from spec_decode.checkpoint import as_text, write_folder
from spec_decode.errors import DraftwrightError

COLUMNS = (
    "benchmark", "draft", "τ", "speedup", "95%", "accepted %", "params", "draft ms", "verify ms", "train s", "tree"
)  # fmt: skip
TEXT = ("draft", "accepted %", "tree")  # columns that a narrow screen may break into lines


@dataclass(frozen=True)
class CompareSettings:
    """The keys of conf/compare.yaml."""

    folders: tuple[Path, ...] | None
    benchmark: str | None
    output_dir: Path

    def __post_init__(self) -> None:
        if self.folders is None:
            raise DraftwrightError(
                "no folder is given: pass those that python -m train or python -m eval wrote, as in python -m eval "
                "compare FOLDER FOLDER"
            )


@dataclass(frozen=True)
class Row:
    """One draft on one benchmark. Numbers are those of report.json; conditions are what must be equal for rows to be
    comparable."""

    benchmark: str
    draft: str
    folder: str
    tau: float | None
    speedup: float
    speedup_ci: list[float] | None
    acceptance_by_position: list[float]
    draft_parameters: int | None
    draft_s_per_round: float
    verify_s_per_round: float
    training_seconds: float | None
    prompts: int
    tree: dict[str, Any]
    conditions: dict[str, Any]


def run(cfg: DictConfig) -> list[Row]:
    """The command: read, sort, print, write."""
    settings = build(CompareSettings, plain(cfg))
    assert settings.folders is not None
    reports = find_reports(settings.folders)
    every = tell_apart([row for path, folder in reports.items() for row in read_rows(path, folder)])
    rows = [row for row in best_first(every) if settings.benchmark in (None, row.benchmark)]
    if not rows:
        known = ", ".join(dict.fromkeys(row.benchmark for row in every))
        raise DraftwrightError(f"no draft was measured on benchmark '{settings.benchmark}': choose from {known}")
    remarks = [*lossy(rows), *differences(rows, list(dict.fromkeys(row.draft for row in every)))]
    _write(rows, remarks, settings.output_dir)
    console = Console()
    show(rows, remarks, console)
    for name in ("compare.json", "compare.html"):
        console.print(settings.output_dir / name, soft_wrap=True, highlight=False)
    return rows


def find_reports(folders: Sequence[Path]) -> dict[Path, Path]:
    """report.json -> its folder, for each folder, and for each run of a folder that is a sweep's. Files are passed
    over: FOLDER/* names those that lie beside the runs of a sweep.

    Raises DraftwrightError for what isn't there and for a folder without a report.
    """
    found: dict[Path, Path] = {}
    for given in folders:
        if not given.is_file():
            for folder in runs_in(given):
                found.setdefault(report_of(folder).resolve(), folder.resolve())
    if not found:
        raise DraftwrightError(f"'{folders[0]}' is a file: pass the folder that it lies in")
    return found


def runs_in(folder: Path) -> list[Path]:
    """The jobs 0/, 1/, … of a sweep, or the folder itself."""
    if not folder.is_dir():
        raise DraftwrightError(
            f"there is no folder '{folder}': pass those that python -m train or python -m eval wrote"
        )
    jobs = [path for path in folder.iterdir() if path.name.isdecimal() and path.is_dir()]
    return sorted(jobs, key=lambda path: int(path.name)) or [folder]


def report_of(folder: Path) -> Path:
    """report.json as python -m eval writes it, or eval/report.json as training does."""
    for path in (folder / "report.json", folder / "eval" / "report.json"):
        if path.is_file():
            return path
    raise DraftwrightError(f"'{folder}' holds no report: make one with {_command(folder, folder / 'eval')}")


def read_rows(path: Path, folder: Path) -> list[Row]:
    """The rows of the report of a folder; raises DraftwrightError for a file that is no report."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        rows = [_row(folder, report, name, numbers) for name, numbers in report["benchmarks"].items()]
    except KeyError as error:
        raise _damaged(path, folder, f"it lacks {error}") from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise _damaged(path, folder, str(error)) from error
    if not rows:
        raise _damaged(path, folder, "it has no benchmarks")
    return rows


def _damaged(path: Path, folder: Path, why: str) -> DraftwrightError:
    command = _command(folder, path.parent)
    return DraftwrightError(f"{path} is no report that can be read ({why}): write it again with {command}")


def _command(folder: Path, output: Path) -> str:
    """The words that measure the draft in the folder of a run, or the draft that the folder is."""
    drafts = [path for path in (folder / "draft", folder) if (path / "config.json").is_file()]
    words = [f"checkpoint={drafts[0] if drafts else 'DRAFT'}", f"output_dir={output}"]
    return f"python -m eval {shlex.join(words)}"


def _row(folder: Path, report: Mapping[str, Any], benchmark: str, numbers: Mapping[str, Any]) -> Row:
    environment = report["environment"]
    parameters, seconds = report.get("draft_parameters"), report.get("training_seconds")  # unknown to older reports
    low, high = numbers["speedup_ci"] or (None, None)
    return Row(
        benchmark=benchmark,
        draft=str(report["draft"]),
        folder=str(folder),
        tau=None if numbers["tau"] is None else _number(numbers["tau"]),
        speedup=_number(numbers["speedup"]),
        speedup_ci=None if low is None else [_number(low), _number(high)],
        acceptance_by_position=[_number(share) for share in numbers["acceptance_by_position"]],
        draft_parameters=None if parameters is None else int(parameters),
        draft_s_per_round=_number(numbers["draft_s_per_round"]),
        verify_s_per_round=_number(numbers["verify_s_per_round"]),
        training_seconds=None if seconds is None else _number(seconds),
        prompts=int(numbers["prompts"]),
        tree={**report["tree"], "kind": str(report["tree"]["kind"])},
        conditions={
            "target": report["target"],
            "dtype": environment["dtype"],
            "temperature": report["temperature"],
            "acceptance": report["acceptance"],
            **{key: environment[key] for key in ("max_new_tokens", "top_k", "top_p")},
            "hardware": hardware(environment),
        },
    )


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{json.dumps(value)} is no number")
    return float(value)


def tell_apart(rows: Sequence[Row]) -> list[Row]:
    """The same rows; where several folders hold drafts of one name, the name gets what tells the folders apart."""
    folders: dict[str, list[str]] = {}
    for row in rows:
        folders.setdefault(row.draft, []).append(row.folder)
    top = {name: os.path.commonpath(places) for name, places in folders.items() if len(set(places)) > 1}
    return [
        replace(row, draft=f"{row.draft} ({os.path.relpath(row.folder, top[row.draft])})") if row.draft in top else row
        for row in rows
    ]


def best_first(rows: Sequence[Row]) -> list[Row]:
    """Benchmark by benchmark, in the order of their first row, by falling τ."""
    order = list(dict.fromkeys(row.benchmark for row in rows))
    return sorted(rows, key=lambda row: (order.index(row.benchmark), -(row.tau or 0)))


def lossy(rows: Sequence[Row]) -> list[str]:
    """What must be said of drafts whose acceptance wasn't exact, as `eval.report.warnings` has it."""
    told: dict[str, list[str]] = {}
    for row in rows:
        for warning in warnings(row.conditions):
            told.setdefault(warning, []).append(row.draft)
    return [f"{warning}: {', '.join(dict.fromkeys(drafts))}" for warning, drafts in told.items()]


def differences(rows: Sequence[Row], drafts: Sequence[str]) -> list[str]:
    """Sentences on what makes rows incomparable, each with the drafts that differ; `drafts` are all that were read."""
    told: list[str] = []
    for condition in rows[0].conditions:
        told += _differs(condition.replace("_", " "), {row.draft: row.conditions[condition] for row in rows})
    for benchmark in dict.fromkeys(row.benchmark for row in rows):
        measured = {row.draft: row.prompts for row in rows if row.benchmark == benchmark}
        if missing := [draft for draft in drafts if draft not in measured]:
            told.append(f"Not comparable: benchmarks differ: {benchmark} was not measured for {', '.join(missing)}")
        told += _differs(f"number of prompts of {benchmark}", measured)
    return told


def _differs(what: str, values: Mapping[str, Any]) -> Iterator[str]:
    """values: by draft."""
    groups: dict[str, list[str]] = {}
    for draft, value in values.items():
        groups.setdefault(_words(value), []).append(draft)
    if len(groups) > 1:
        told = "; ".join(f"{value} ({', '.join(drafts)})" for value, drafts in groups.items())
        yield f"Not comparable: {what} differs: {told}"


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(inner)}" for key, inner in value.items())
    return str(value)


def cells(row: Row) -> list[str]:
    """A row as text, in the order of COLUMNS."""
    numbers = asdict(row)
    return [
        row.benchmark,
        row.draft,
        tau(numbers),
        f"{row.speedup:.2f}×",
        interval(row.speedup_ci) or "–",
        " ".join(f"{100 * share:.0f}" for share in row.acceptance_by_position) or "–",
        "–" if row.draft_parameters is None else _count(row.draft_parameters),
        f"{1000 * row.draft_s_per_round:.1f}",
        f"{1000 * row.verify_s_per_round:.1f}",
        "–" if row.training_seconds is None else f"{row.training_seconds:,.0f}",
        f"{row.tree['kind']} {tree_sizes(row.tree)}",
    ]


def _count(number: int) -> str:
    return f"{number / 1e6:.1f}M" if number >= 1_000_000 else f"{number:,}"


def show(rows: Sequence[Row], remarks: Sequence[str], console: Console) -> None:
    """Print the table, the name of each benchmark above its rows, and below what makes rows incomparable."""
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    for column in COLUMNS[1:]:
        text = column in TEXT
        head = column.replace(" ", "\n")
        table.add_column(head, justify="left" if text else "right", overflow="fold", no_wrap=not text)
    for benchmark in dict.fromkeys(row.benchmark for row in rows):
        table.add_row(Text(benchmark, style="bold"))
        for row in rows:
            if row.benchmark == benchmark:
                table.add_row(*map(Text, cells(row)[1:]))
        table.add_section()
    console.print(table)
    for remark in remarks:
        console.print(f"\n{remark}", style="bold", markup=False, highlight=False)


def _write(rows: Sequence[Row], remarks: Sequence[str], folder: Path) -> None:
    content = {"remarks": remarks, "rows": [asdict(row) for row in rows]}
    files = {
        "compare.json": json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n",
        "compare.html": page(COLUMNS, [cells(row) for row in rows], [asdict(row) for row in rows], remarks),
    }
    write_folder(folder, {name: as_text(text) for name, text in files.items()})
