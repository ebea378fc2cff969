"""`python -m train import`: a published draft, in whichever format, as a folder of ours."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from omegaconf import DictConfig
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from conf import plain
from conf.check import Positive, build
from spec_decode.errors import DraftwrightError, first_line
from spec_decode.formats import import_draft
from spec_decode.formats.eagle3 import EMBEDDINGS
from train.publish import refuse_full

_MASK = "mask_embedding.pt"  # of some DFlash drafts
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")  # the first kind that is there is read


@dataclass(frozen=True)
class ImportSettings:
    """The keys of conf/import.yaml."""

    path: str
    out: Path
    target_layers: tuple[Positive, ...] | None


def run_import(cfg: DictConfig) -> None:
    """The command."""
    settings = build(ImportSettings, plain(cfg))
    refuse_full(settings.out)
    config, tensors = read_files(locate(settings.path))
    try:
        draft, name = import_draft(config, tensors, settings.target_layers)
    except DraftwrightError as error:
        raise DraftwrightError(f"{settings.path} can't be imported: {error}") from error
    draft.save_pretrained(settings.out, readme=_readme(settings.path, name))
    print(f"{type(draft).__name__} imported from {name}'s format to {settings.out}")
    if any(key.removeprefix("model.") == EMBEDDINGS for key in tensors):
        print(f"{EMBEDDINGS} was left out: the draft reads its target's, so it differs if it had learned its own")


def locate(path: str) -> Path:
    """The folder itself, or the files of a hub name, downloaded."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(path, allow_patterns=["config.json", *_WEIGHTS]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise DraftwrightError(
            f"path={path} is no folder and could not be downloaded ({first_line(error)}): pass a folder with "
            "config.json and weights, or the name of a model on the hub"
        ) from error


def read_files(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and all tensors of a folder. No code in a pickle is run."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise DraftwrightError(
            f"{folder}/config.json can't be read ({first_line(error)}): pass the folder of a published draft"
        ) from error
    if not isinstance(config, dict):
        raise DraftwrightError(f"{folder}/config.json holds no keys: pass the folder of a published draft")
    if (folder / _MASK).exists():
        raise DraftwrightError(
            f"{folder} has {_MASK}, which vLLM reads beside the weights and Draftwright doesn't: without it the draft "
            "would be another one"
        )
    files = next((found for kind in _WEIGHTS if (found := sorted(folder.glob(kind)))), [])
    if not files:
        raise DraftwrightError(f"{folder} has no weights ({', '.join(_WEIGHTS)}): pass the folder of a published draft")
    tensors: dict[str, Tensor] = {}
    for file in files:
        part = _read_tensors(file)
        if twice := sorted(tensors.keys() & part.keys()):
            raise DraftwrightError(f"{folder} has the tensor '{twice[0]}' in several files: keep one set of weights")
        tensors |= part
    return config, tensors


def _read_tensors(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        found = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, RuntimeError, UnpicklingError, EOFError, ValueError) as error:
        raise DraftwrightError(
            f"{file} is truncated, damaged or holds more than tensors ({first_line(error)}): download it again"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise DraftwrightError(f"{file} holds something else than named tensors: pass the folder of a published draft")
    return found


def _readme(path: str, name: str) -> str:
    return f"""# Imported draft

From `{path}`, in {name}'s format. What it was trained on stands there. Measure it with

    python -m eval checkpoint=FOLDER target=hf target.path=TARGET benchmark=mt_bench

FOLDER is the folder of this file.
"""
