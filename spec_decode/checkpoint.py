"""Reading and writing a draft folder: config.json, model.safetensors, README.md."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_type_hints
from uuid import uuid4

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from spec_decode.errors import DraftwrightError, first_line

Config = TypeVar("Config")
Module = TypeVar("Module", bound=nn.Module)


def save_draft(draft: nn.Module, folder: Path, readme: str) -> None:
    """Write a draft with a dataclass `config`: config.json, model.safetensors and README.md, each atomically."""
    config = dataclasses.asdict(draft.config)  # type: ignore[call-overload,arg-type]
    write_draft(type(draft), config, draft.state_dict(), folder, readme)


def write_draft(
    kind: type[nn.Module], config: Mapping[str, Any], tensors: Mapping[str, Tensor], folder: Path, readme: str
) -> None:
    """Write the files of a draft that has the class `kind`, each atomically."""
    name = f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}"  # as `spec_decode.drafters.load_draft` reads it
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_folder(
        folder,
        {
            "model.safetensors": lambda path: save_file(own, path, metadata={"format": "pt"}),
            "config.json": as_text(json.dumps({"drafter": name, **config}, indent=2) + "\n"),
            "README.md": as_text(readme),
        },
    )


def open_draft(kind: type[Module], folder: Path) -> Module:
    """A `kind`, whose one argument `config` is a dataclass, from a folder written by `save_draft`.

    Raises DraftwrightError that names the missing, unexpected or wrongly shaped tensor or config key.
    """
    config = parse_config(get_type_hints(kind.__init__)["config"], folder)
    try:
        draft = kind(config)
    except TypeError as error:
        raise _wrong_type(folder, error) from error
    draft.load_state_dict(read_tensors(folder, draft.state_dict()))
    return draft


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a draft folder as a dict."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise DraftwrightError(
            f"'{folder}' is not a draft folder: {path} can't be read ({error.strerror}); pass checkpoint=FOLDER "
            "with the folder that training wrote"
        ) from error
    except ValueError as error:
        raise DraftwrightError(f"{path} is not valid JSON ({error}): write the draft again") from error
    if not isinstance(config, dict) or "drafter" not in config:
        raise DraftwrightError(f"{path} has no key 'drafter': it isn't the config of a Draftwright draft")
    return config


def parse_config(kind: type[Config], folder: Path) -> Config:
    """config.json as the dataclass `kind`; a missing or unknown key is an error that names it."""
    values = {key: value for key, value in read_config(folder).items() if key != "drafter"}
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    required = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
    if unknown := sorted(values.keys() - fields.keys()):
        raise DraftwrightError(f"{folder}/config.json has the unknown key '{unknown[0]}'")
    if missing := sorted(required - values.keys()):
        raise DraftwrightError(f"{folder}/config.json lacks the key '{missing[0]}'")
    try:
        return kind(**values)
    except TypeError as error:
        raise _wrong_type(folder, error) from error


def _wrong_type(folder: Path, error: TypeError) -> DraftwrightError:
    return DraftwrightError(f"{folder}/config.json has a value of the wrong type ({first_line(error)}): correct it")


def read_tensors(folder: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """model.safetensors, checked by name and shape against `expected`."""
    path = folder / "model.safetensors"
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DraftwrightError(f"{path} is missing, truncated or damaged ({error}): write the draft again") from error
    if missing := sorted(expected.keys() - tensors.keys()):
        raise DraftwrightError(f"{path} lacks the tensor '{missing[0]}' ({len(missing)} missing in all)")
    if unexpected := sorted(tensors.keys() - expected.keys()):
        raise DraftwrightError(f"{path} has the unexpected tensor '{unexpected[0]}' ({len(unexpected)} in all)")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise DraftwrightError(
                f"{path}: tensor '{name}' has shape {list(tensor.shape)}, expected {list(expected[name].shape)}"
            )
    return tensors


def write_folder(folder: Path, writers: Mapping[str, Callable[[Path], Any]]) -> None:
    """Write each file to a temporary name in `folder`, then rename it: a reader never sees half a file."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, write in writers.items():
            write_atomically(folder / name, write)
    except (OSError, SafetensorError) as error:
        raise DraftwrightError(f"could not write to {folder} ({error}): free space or choose another folder") from error


def write_folder_atomically(folder: Path, write: Callable[[Path], Any]) -> None:
    """Let write(temporary folder) fill a folder, then put it in place of `folder`: no reader sees half of it."""
    temporary = folder.with_name(f".{folder.name}.{uuid4().hex}")
    try:
        temporary.mkdir(parents=True)
        write(temporary)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(temporary, folder)
    except (OSError, SafetensorError) as error:
        raise DraftwrightError(f"could not write to {folder} ({error}): free space or choose another folder") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def as_text(content: str) -> Callable[[Path], Any]:
    """What writes this text to a path, for `write_folder` and `write_atomically`."""
    return lambda path: path.write_text(content, encoding="utf-8")


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Call write(temporary path), then rename it to `path`; the temporary file stays behind only in a killed process.

    Its name is unique, so that several writers of the same path, even on several machines, don't meet.
    """
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
