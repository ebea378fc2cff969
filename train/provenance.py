"""What a run was made from: composed config, package versions, git commit, machine."""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from spec_decode.checkpoint import write_folder

_PACKAGES = ("draftwright", "torch", "transformers", "lightning", "datasets", "hydra-core", "safetensors", "numpy")
_SOURCE = Path(__file__).resolve().parent.parent


def provenance(config: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a run as plain JSON values; git_commit is None outside a git checkout."""
    return {
        "config": dict(config),
        "command": command_line(),
        "git_commit": git_commit(_SOURCE),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "machine": platform.platform(),
    }


def flat(values: Mapping[str, Any], separator: str) -> dict[str, Any]:
    """Nested values with one key for each leaf: {"a": {"b": 1}} gives {"a.b": 1} where "." separates."""
    leaves: dict[str, Any] = {}
    for key, value in values.items():
        inner = flat(value, separator) if isinstance(value, Mapping) else None
        leaves |= {key: value} if inner is None else {f"{key}{separator}{name}": leaf for name, leaf in inner.items()}
    return leaves


def hyperparameters(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record as a logger can search and group by it: module/lr, versions/torch. W&B advises against dots in keys."""
    return {key.removeprefix("config/"): value for key, value in flat(record, "/").items()}


def git_commit(folder: Path) -> str | None:
    """Commit of the checkout whose root is `folder`, with "-dirty" when tracked files differ; None if there is none."""
    if not (folder / ".git").exists():
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    return f"{commit}-dirty" if commit and _git(folder, "status", "--porcelain", "--untracked-files=no") else commit


def command_line() -> str:
    """The command that started this process, as a person would type it (the launcher puts it in sys.argv)."""
    program, *words = sys.argv
    return " ".join([program, *map(shlex.quote, words)])


@rank_zero_only
def write_record(folder: Path, name: str, record: Mapping[str, Any]) -> None:
    """Write `record` as folder/name, atomically and in the first process alone. Raises DraftwrightError if the folder
    can't be written."""
    write_folder(folder, {name: lambda path: path.write_text(json.dumps(record, indent=2, default=str) + "\n")})


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None if result.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
