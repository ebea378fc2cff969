"""What a W&B run holds beyond the metrics that Lightning logs: the same for every variant."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import wandb


def report_to_wandb(run: wandb.Run, variant: str, folder: Path, parameters: int, report: Mapping[str, Any]) -> None:
    """Log a finished run: the draft and its size, and the final evaluation as summary, chart, table and artifact.

    folder: of the run; parameters: of the draft; report: what eval/report.json holds, empty where nothing was decoded.
    """
    run.summary["draft_parameters"] = parameters
    _log_folder(run, f"{variant}-draft", "draft", folder / "draft")
    for numbers in report.get("benchmarks", {}).values():  # the held-out prompts alone
        run.summary.update({name: numbers[name] for name in ("tau", "speedup")})
        run.log({"eval/acceptance_by_position": acceptance_chart(numbers["acceptance_by_position"])})
        run.log({"eval/answers": answer_table(report["examples"])})
        _log_folder(run, f"{variant}-report", "report", folder / "eval")


def acceptance_chart(acceptance: list[float]) -> Any:
    """P(position k is accepted | those before it were) as a line over k = 1, 2, …"""
    table = wandb.Table(columns=["position", "acceptance"], data=list(map(list, enumerate(acceptance, start=1))))
    return wandb.plot.line(table, "position", "acceptance", title="acceptance by position")


def answer_table(examples: list[dict[str, Any]]) -> wandb.Table:
    """Decoded answers; drafted and accepted tokens are marked."""
    rows = [
        [example["prompt"], wandb.Html(marked(example["runs"]), inject=False), example["tokens"], example["forwards"]]
        for example in examples
    ]
    return wandb.Table(columns=["prompt", "answer", "tokens", "passes of the target"], data=rows)


def marked(runs: list[tuple[str, bool]]) -> str:
    """(text, was drafted) runs of an answer as HTML."""
    texts = (f"<mark>{escape(text)}</mark>" if drafted else escape(text) for text, drafted in runs)
    return f'<div style="white-space: pre-wrap">{"".join(texts)}</div>'


def _log_folder(run: wandb.Run, name: str, kind: str, folder: Path) -> None:
    """A folder as a new version of an artifact. Its files aren't copied: they are read when they are uploaded."""
    artifact = wandb.Artifact(name, type=kind)
    artifact.add_dir(str(folder.resolve()), policy="immutable", skip_cache=True)
    run.log_artifact(artifact)
