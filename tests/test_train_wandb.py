"""A W&B run without network, read back with W&B's own reader: what it holds, and that sweeps are groups."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

METRICS = {
    *(f"{side}/{name}/{i}" for side in ("train", "val") for name in ("loss", "accuracy", "acceptance") for i in (0, 1)),
    "train/loss", "train/tau", "val/loss", "val/tau", "train/lr", "train/grad_norm", "train/tokens_per_s", "epoch",
    "trainer/global_step",
}  # fmt: skip


@pytest.fixture
def world(tmp_path: Path, make_world: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "staged"))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return make_world(tmp_path)


class Recorded:
    """The records in a run's file, as `wandb sync` would send them."""

    def __init__(self, folder: Path) -> None:
        (self.folder,) = folder.glob("wandb/offline-run-*")
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(self.folder)]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        self.records = [json.loads(line) for line in lines]
        (self.run,) = self.each("run")
        self.config = self.run["config"]["update"]
        self.summary: dict[str, Any] = {}
        for kind, merged in (("config", self.config), ("summary", self.summary)):
            for record in self.each(kind):
                merged |= record["update"]
        self.artifacts = {
            artifact["name"]: artifact for artifact in self.each("artifact") if artifact["type"] != "run_table"
        }

    def each(self, kind: str) -> list[dict[str, Any]]:
        return [record[kind] for record in self.records if record["type"] == kind]

    def metrics(self) -> set[str]:
        keys = {key for record in self.each("history") for key in record["item"]}
        return {key for key in keys if not key.startswith(("_", "eval/"))}

    def table(self, name: str) -> dict[str, Any]:
        return json.loads((self.folder / "files" / self.summary[f"{name}.path"]).read_text())


def test_run_holds_metrics_config_summary_charts_answers_and_artifacts(
    world: Path, train_in: Callable[..., None]
) -> None:
    train_in(world, "+variant=eagle3", "module.steps=2", "max_steps=12", "output_dir=out")
    found = Recorded(world / "out")
    report = json.loads((world / "out" / "eval" / "report.json").read_text())
    numbers = report["benchmarks"]["held_out"]

    assert (found.run["project"], found.run["display_name"]) == ("draftwright", "eagle3")
    assert "run_group" not in found.run
    assert found.metrics() == METRICS

    config = {key: value for key, value in found.config.items() if not key.startswith("_wandb")}
    assert config.items() >= {
        "variant/name": "eagle3", "module/lr": 0.015, "module/optimizer/name": "muon", "draft/fusion": "split",
        "seed": 0, "max_steps": 12, "data/train/tokens": 616, "data/source": "chats.jsonl",
    }.items()  # fmt: skip
    assert {"versions/torch", "git_commit", "machine"} <= config.keys()
    assert not any(isinstance(value, dict) for value in config.values())

    assert found.summary["tau"] == pytest.approx(numbers["tau"])
    assert found.summary["speedup"] == pytest.approx(numbers["speedup"])
    assert found.summary["draft_parameters"] == report["draft_parameters"] > 0

    panel = found.config["_wandb.visualize.eval/acceptance_by_position"]["panel_config"]
    assert panel["fieldSettings"] == {"stroke": None, "x": "position", "y": "acceptance"}
    chart = found.table("eval/acceptance_by_position_table")
    assert chart["columns"] == ["position", "acceptance"]
    assert [row[0] for row in chart["data"]] == list(range(1, len(chart["data"]) + 1))
    assert [row[1] for row in chart["data"]] == pytest.approx(numbers["acceptance_by_position"])

    answers = found.table("eval/answers")
    assert answers["columns"] == ["prompt", "answer", "tokens", "passes of the target"]
    assert [row[0] for row in answers["data"]] == [example["prompt"] for example in report["examples"]]
    html = [Path(file["local_path"]).read_text() for file in staged(found) if file["path"].endswith(".html")]
    marks = sum(drafted for example in report["examples"] for _, drafted in example["runs"])
    assert "".join(html).count("<mark>") == marks > 0

    assert found.artifacts.keys() == {"eagle3-draft", "eagle3-report"}
    kept = {"eagle3-draft": world / "out" / "draft", "eagle3-report": world / "out" / "eval"}
    for name, folder in kept.items():
        files = {file["path"]: file for file in found.artifacts[name]["manifest"]["contents"]}
        assert files.keys() == {path.name for path in folder.iterdir()}
        for path in folder.iterdir():  # `wandb sync` reads them from there
            assert files[path.name]["local_path"] == str(path)
            assert int(files[path.name]["size"]) == path.stat().st_size
    assert {"config.json", "model.safetensors", "README.md"} == {path.name for path in kept["eagle3-draft"].iterdir()}


def staged(found: Recorded) -> list[dict[str, Any]]:
    """The files that W&B keeps until the tables are uploaded."""
    tables = [artifact for artifact in found.each("artifact") if artifact["type"] == "run_table"]
    return [file for table in tables for file in table["manifest"]["contents"]]


def test_sweep_is_a_group_whose_runs_share_their_metrics(world: Path, train_in: Callable[..., None]) -> None:
    words = ["+variant=eagle3,eagle", "module.steps=choice(2)", "eval.enabled=false", "hydra.sweep.dir=outputs/two"]
    train_in(world, *words, sweep=True)
    runs = [Recorded(world / "outputs" / "two" / name) for name in "01"]
    assert [found.config["variant/name"] for found in runs] == ["eagle3", "eagle"]
    for found in runs:
        assert found.run["run_group"] == "two"
        assert found.metrics() == METRICS
        assert found.artifacts.keys() == {f"{found.config['variant/name']}-draft"}
        assert "tau" not in found.summary


@pytest.mark.parametrize("logger", ["csv", "none"])
def test_other_loggers_leave_nothing_of_wandb(world: Path, train_in: Callable[..., None], logger: str) -> None:
    train_in(world, "+variant=eagle3", f"logger={logger}", "max_steps=2", "eval.limit=1", "output_dir=out")
    assert (world / "out" / "eval" / "report.json").exists()
    assert not (world / "out" / "wandb").exists()
    assert (world / "out" / "csv" / "hparams.yaml").exists() == (logger == "csv")
