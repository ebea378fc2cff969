"""The README.md of an exported draft: what it was trained on, what was measured, how to serve it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from spec_decode.formats.layout import ServedTarget
from train.provenance import flat
from train.serving import CONSUMERS, METHODS, serving


def model_card(draft: Any, name: str, target: ServedTarget, checkpoint: Path) -> str:
    """The card in Markdown. What it says of training and measuring comes from run.json and eval/report.json beside the
    checkpoint, as training writes them."""
    method = METHODS[type(draft)]
    licence = target_licence(target.location)
    beside = checkpoint.resolve().parent if checkpoint.resolve().name == "draft" else None
    run = _read(beside / "run.json") if beside else {}
    report = _read(beside / "eval" / "report.json") if beside else {}
    head = {"license": licence, "base_model": None if Path(target.location).is_dir() else target.location}
    front = "".join(f"{key}: {value}\n" for key, value in head.items() if value)
    return f"""---
{front}tags:
- speculative-decoding
- {method}
---
# {method} draft for {target.spec.name}

A draft model for speculative decoding, trained with Draftwright and stored as {CONSUMERS[name]} reads it
(format={name}). It proposes tokens for `{target.location}` and no other target.

## Trained on

{_training(run)}

## Measured

{_measured(report)}

## Serve

{serving(draft, name, target)}

FOLDER is the folder of this file. Draftwright reads it back with `python -m train import path=FOLDER out=DRAFT`.

## Licence of the target

{licence or "Not known: see where the target comes from"}.
"""


def target_licence(location: str) -> str | None:
    """What the header of the target's own card says, where the card is on this machine."""
    card = Path(location) / "README.md"
    if not Path(location).is_dir():
        cached = try_to_load_from_cache(location, "README.md")
        card = Path(cached) if isinstance(cached, str) else card
    try:
        lines = card.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    header = lines[1 : lines.index("---", 1)] if lines[:1] == ["---"] and "---" in lines[1:] else []
    found = [line.partition(":")[2].strip().strip("\"'") for line in header if line.startswith("license:")]
    return found[0] if found and found[0] else None


def _training(run: Mapping[str, Any]) -> str:
    """Data and recipe."""
    if not run.get("data"):
        return "Not recorded."
    config, data = run["config"], run["data"]
    train = data["train"]
    module = {key: value for key, value in flat({"module": config["module"]}, ".").items() if "._" not in key}
    recipe = {key: config.get(key) for key in ("epochs", "max_steps", "max_length", "draft_vocab_size")} | module
    lines = [
        f"- data: {config['dataset']['name']} ({data['source']})",
        f"- {train['conversations']:,} conversations, {train['tokens']:,} tokens, {train['supervised_tokens']:,} of "
        "them supervised",
        "- recipe: " + ", ".join(f"{key}={value}" for key, value in recipe.items() if value is not None),
        f"- command: `{run['command']}`",
        f"- Draftwright commit: {run['git_commit'] or 'unknown (not run from a git checkout)'}",
    ]
    if run.get("training_seconds") is not None:
        lines.append(f"- time: {run['training_seconds'] / 60:.0f} minutes on {run['machine']}")
    return "\n".join(lines)


def _measured(report: Mapping[str, Any]) -> str:
    """τ and speedup of each benchmark."""
    if not report.get("benchmarks"):
        return "Not measured."
    rows = []
    for name, numbers in report["benchmarks"].items():
        tau = "–" if numbers["tau"] is None else f"{numbers['tau']:.2f}"
        interval = numbers["speedup_ci"]
        span = f" ({interval[0]:.2f}–{interval[1]:.2f})" if interval else ""
        rows.append(f"| {name} | {numbers['prompts']} | {tau} | {numbers['speedup']:.2f}{span} |")
    where = report["environment"]
    machine = where["cpu"] if where["device"] == "cpu" else where["device"]
    tree = report["tree"]["kind"]
    return "\n".join(
        [
            "| benchmark | prompts | τ | speedup (95 %) |",
            "|---|---|---|---|",
            *rows,
            "",
            f"By Draftwright's decoder on {machine}, {where['dtype']}, temperature {report['temperature']}, {tree} "
            f"tree, {where['max_new_tokens']} new tokens, {where['date'][:10]}. A server's numbers differ.",
        ]
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
