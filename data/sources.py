"""Rows of chat data sets, streamed: the file of an installed package, a local file, or a data set on the hub.

The hub goes through `datasets`. Local files are read by `data.readers`, which tolerates what is broken in them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import datasets
from huggingface_hub import HfApi, is_offline_mode

from data.readers import ReadReport, read_json
from spec_decode.errors import DraftwrightError
from spec_decode.packaged import packaged_file


@dataclass(frozen=True)
class Source:
    """Where chats come from, and which of them are left out. The first that is set counts: path (a local file), hub
    (a data set name or a folder with a copy of one, with its split), package (a pip requirement whose installed files
    hold the data).

    strict: stop at the first bad row. dedup: leave out chats that are equal, or nearly equal, to earlier ones.
    decontaminate: benchmarks and files whose prompts may not occur. split_long: go on behind max_length as another
    sequence.
    """

    name: str
    path: str | None = None
    hub: str | None = None
    split: str = "train"
    package: str | None = None
    strict: bool = False
    dedup: Literal["exact", "near", "none"] = "none"
    decontaminate: tuple[str, ...] | None = None
    split_long: bool = False

    def place(self) -> str:
        """Where the chats come from, for messages to people."""
        return str(self.path or self.hub or self.package or self.name)


def open_rows(source: Source, report: ReadReport) -> Iterator[tuple[dict[str, Any], str]]:
    """Stream (row, place) of a source; what is broken in a local file is counted in `report`.

    Raises DraftwrightError when the source is missing, empty or out of reach, and in a strict one at what is broken.
    """
    file = local_file(source)
    report.strict = str(file or source.hub) if source.strict else ""
    if file is not None:
        return read_json(str(file), report)
    rows = load_from_hub(str(source.hub), None, source.split, "dataset.hub=FOLDER", streaming=True)
    return ((row, f"row {number}") for number, row in enumerate(rows, 1))


def local_file(source: Source) -> Path | None:
    """The file that holds a source's rows; None for the hub. Raises DraftwrightError if it can't be read."""
    if source.path is not None:
        return check_file(Path(source.path).expanduser(), "dataset.path")
    if source.hub is not None:
        return None
    if source.package is not None:
        file, _ = packaged_file(source.package, (".json", ".jsonl"), "pass another file as dataset.path=FILE")
        return check_file(file, f"the package {source.package}")
    raise DraftwrightError(f"dataset={source.name} needs a file: pass dataset.path=FILE.jsonl")


def check_file(path: Path, key: str) -> Path:
    """The path, if it is a file with content that can be opened; DraftwrightError otherwise."""
    if not path.exists():
        raise DraftwrightError(f"the file {path} does not exist: correct {key}")
    if not path.is_file():
        raise DraftwrightError(f"{path} is not a file: {key} must name one JSON or JSON-lines file")
    try:
        with path.open("rb") as file:
            if not file.read(1):
                raise DraftwrightError(f"the file {path} is empty: let {key} name a file with rows")
    except OSError as error:
        raise DraftwrightError(f"the file {path} cannot be read ({error.strerror}): correct {key}") from error
    return path


def load_from_hub(name: str, config: str | None, split: str, instead: str, **options: Any) -> Iterator[dict[str, Any]]:
    """Rows of a data set on the hub, or of a folder that holds a copy of it.

    Raises DraftwrightError that names the command which gets a copy, and where to pass it: `instead`.
    """
    try:
        if not (Path(name).expanduser().is_dir() or is_offline_mode()):
            # Fails at once where there is no network; load_dataset would retry for half a minute first.
            HfApi().dataset_info(name, timeout=10)
        yield from datasets.load_dataset(os.path.expanduser(name), config, split=split, **options)
    except Exception as error:  # hub, HTTP and socket libraries share no base class
        raise DraftwrightError(
            f"the data set {name} (split {split}) could not be read ({type(error).__name__}): check the name and the "
            f"network, or run `hf download {name} --repo-type dataset --local-dir FOLDER` where the hub can be "
            f"reached and pass {instead}"
        ) from error
