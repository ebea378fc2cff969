"""The words and the table of a report; the numbers come from eval/tau.py."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from spec_decode.tree import TreePlan


def environment(dtype: torch.dtype, device: torch.device, settings: dict[str, Any]) -> dict[str, Any]:
    """Where and how it was measured. settings: what else decides the numbers (max_new_tokens, seed …)."""
    return {
        "cpu": _cpu_model(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join([sys.argv[0], *map(shlex.quote, sys.argv[1:])]),
        **settings,
    }


def describe_tree(tree: TreePlan) -> dict[str, Any]:
    """A tree plan as JSON: its kind and its sizes."""
    return {"kind": type(tree).__name__.removesuffix("Tree").lower(), **asdict(tree)}


def tree_sizes(tree: dict[str, Any]) -> str:
    """The sizes of a tree that `describe_tree` made, in words; of a sparse tree the nodes alone, root included.

    How siblings are chosen is said where chance chooses them.
    """
    words = []
    for key, value in tree.items():
        if key == "paths":
            words.append(f"nodes {len(value) + 1}")
        elif key != "kind" and (key, value) != ("siblings", "top_k"):
            words.append(f"{key} {'-'.join(map(str, value)) if isinstance(value, list | tuple) else value}")
    return ", ".join(words)


def hardware(environment: dict[str, Any]) -> str:
    """The processor that decoded, and the CPU threads."""
    name = environment["cpu"] if environment["device"] == "cpu" else environment["device"]
    return f"{name}, {environment['threads']} thread{'' if environment['threads'] == 1 else 's'}"


LISTED = 5  # differences shown one by one


def show(report: dict[str, Any], console: Console | None = None) -> None:
    """Print one row per benchmark, and the first differences from the baseline below."""
    console = console or Console()
    title = "\n".join([f"{report['draft']} drafting for {report['target']}", *warnings(report)])
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for column in ("benchmark", "prompts", "τ", "speedup", "95%", "tok/s", "plain", "identical"):
        table.add_column(column, justify="left" if column in ("benchmark", "identical") else "right", overflow="fold")
    for name, numbers in report["benchmarks"].items():
        table.add_row(name, *row(numbers))
    console.print(table)
    for name, numbers in report["benchmarks"].items():
        for sentence in describe_differences(name, numbers, report["environment"]["dtype"]):
            console.print(sentence, highlight=False)


def warnings(report: dict[str, Any]) -> list[str]:
    """What a reader must know before the numbers: acceptance that isn't exact."""
    if report["acceptance"] == "exact":
        return []
    return ["LOSSY typical acceptance: the output does not have the target's distribution"]


def row(numbers: dict[str, Any]) -> list[str]:
    """The cells of one benchmark, as shown on screen and on the page."""
    return [
        str(numbers["prompts"]),
        tau(numbers),
        f"{numbers['speedup']:.2f}×",
        interval(numbers["speedup_ci"]) or "–",
        f"{numbers['tokens_per_s']:.1f}",
        f"{numbers['baseline_tokens_per_s']:.1f}",
        describe_identity(numbers),
    ]


def tau(numbers: dict[str, Any]) -> str:
    """τ with two digits, or a dash where no round was needed."""
    return "–" if numbers["tau"] is None else f"{numbers['tau']:.2f}"


def interval(bounds: list[float] | None) -> str:
    """'1.10–1.25', or nothing for a single prompt."""
    return f"{bounds[0]:.2f}–{bounds[1]:.2f}" if bounds else ""


def describe_identity(numbers: dict[str, Any]) -> str:
    """How many drafted outputs equal the baseline's, in a word or two."""
    if numbers["identical"] is None:
        return "sampled"
    if numbers["identical"]:
        return "yes"
    return f"{numbers['prompts'] - len(numbers['differences'])} of {numbers['prompts']}"


def describe_differences(name: str, numbers: dict[str, Any], dtype: str) -> list[str]:
    """Sentences on the outputs that leave the baseline's: the first few places, and what low precision has to do
    with it."""
    found = numbers["differences"]
    sentences = [f"{name}: {describe_difference(difference)}" for difference in found[:LISTED]]
    if len(found) > LISTED:
        sentences.append(f"{name}: {len(found) - LISTED} more are listed in report.json")
    if found and dtype in ("bfloat16", "float16"):
        sentences.append(
            f"{name}: in {dtype} a pass over many tokens rounds otherwise than a pass over one; "
            "target.dtype=float32 compares exactly"
        )
    return sentences


def describe_difference(difference: dict[str, Any]) -> str:
    """One sentence on where a drafted output leaves the baseline's."""
    where = f"prompt {difference['prompt']} differs from token {difference['position']} on"
    if difference["near_tie"] is None:
        return f"{where}: the gap between the two tokens' logits was not measured"
    if difference["logit_gap"] is None:
        return f"{where}: one output ends there"
    kind = "a near-tie" if difference["near_tie"] else "not a near-tie"
    return f"{where}: the two tokens lie {difference['logit_gap']:.2g} apart in fp32 logits, {kind}"


def _cpu_model() -> str:
    """The processor's name: /proc/cpuinfo on Linux, what Python knows elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
