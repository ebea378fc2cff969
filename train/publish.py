"""`python -m train export`: a draft in the files that a server reads, with a model card; on the hub when asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from omegaconf import DictConfig
from safetensors.torch import save_file
from torch import Tensor

from conf import plain
from conf.check import build
from spec_decode.checkpoint import as_text, read_config, write_folder, write_folder_atomically
from spec_decode.drafters import load_draft
from spec_decode.errors import DraftwrightError, first_line
from spec_decode.formats import Files, export_draft
from spec_decode.formats.layout import ServedTarget
from spec_decode.target_hf import (
    HFTarget,
    TargetSource,
    open_target,
    open_tokenizer,
    sketch_target,
    tokenizer_fingerprint,
)
from train.model_card import model_card
from train.settings import Format


@dataclass(frozen=True)
class ExportSettings:
    """The keys of conf/export.yaml."""

    target: TargetSource
    checkpoint: Path
    format: Format
    out: Path
    push_to_hub: str | None


def run_export(cfg: DictConfig) -> None:
    """The command."""
    settings = build(ExportSettings, plain(cfg))
    refuse_full(settings.out)
    if read_config(settings.checkpoint).get("tokenizer") not in (
        None,
        "",
        tokenizer_fingerprint(open_tokenizer(settings.target)),
    ):
        raise DraftwrightError(
            f"the draft in {settings.checkpoint} was trained with another tokenizer or chat template than that of "
            f"{settings.target.name()}: choose the target it was trained for with target=… or target.path=…"
        )
    target = served(settings.target, sketch_target(settings.target))
    write_export(settings.checkpoint, settings.format, target, settings.out)
    if settings.push_to_hub:
        push(settings.out, settings.push_to_hub)


def refuse_full(out: Path) -> None:
    """Raise DraftwrightError if the folder to write holds something already."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DraftwrightError(f"out={out} is there already: choose a new folder, or remove this one")


def served(source: TargetSource, target: HFTarget) -> ServedTarget:
    """The target as formats see it; its weights are read only if a format repeats its embeddings."""

    def embeddings() -> Tensor:
        whole = open_target(source)[0] if target.device.type == "meta" else target
        return whole.model.get_input_embeddings().weight

    place = source.location
    place = str(Path(place).resolve()) if Path(place).is_dir() else place
    return ServedTarget(target.spec, place, type(target.model).__name__, embeddings)


def write_export(checkpoint: Path, name: Format, target: ServedTarget, out: Path) -> None:
    """Write the draft in `checkpoint` as a folder of the format `name`, which replaces `out`.

    Raises DraftwrightError naming what the format can't hold.
    """
    draft: Any = load_draft(checkpoint)
    files = export_draft(draft, name, target)
    card = model_card(draft, name, target, checkpoint)
    write_folder_atomically(out, lambda folder: _write(files, card, folder))
    print(f"{name} export written to {out}")


def _write(files: Files, card: str, folder: Path) -> None:
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in files.tensors.items()}
    save: Callable[[Path], Any]
    if files.weights.endswith(".pt"):
        save = lambda path: torch.save(own, path)  # noqa: E731
    else:
        save = lambda path: save_file(own, path, metadata={"format": "pt"})  # noqa: E731
    config = as_text(json.dumps(files.config, indent=2) + "\n")
    write_folder(folder, {files.weights: save, "config.json": config, "README.md": as_text(card)})


def push(folder: Path, name: str) -> None:
    """Upload a folder as the model `name` of the hub. Raises DraftwrightError if that fails."""
    try:
        api = HfApi()
        api.create_repo(name, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Draft exported by Draftwright")
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise DraftwrightError(
            f"push_to_hub={name} failed ({first_line(error)}): log in with `hf auth login`, or upload {folder} by hand"
        ) from error
    print(f"uploaded to https://huggingface.co/{name}")
