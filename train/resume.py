"""Continuing a run: find its checkpoint, and refuse one that was written with other settings."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor

from data.batch import Sequences
from spec_decode.checkpoint import write_atomically
from spec_decode.errors import DraftwrightError, first_line
from spec_decode.target import Target
from train.provenance import flat
from train.settings import TrainSettings

LAST = "last.ckpt"
OF_THE_DATA = ("data (token ids and loss masks)", "draft vocabulary")
_KEY = "draftwright"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its final name, then renames it. Lightning writes to the system's temporary folder
    first, which may lie on another, smaller disk, and then copies over the only checkpoint there is."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, partial(torch.save, checkpoint))
        except (OSError, RuntimeError) as error:  # torch makes a RuntimeError of a full disk
            kept = f"{path} from before is kept" if path.exists() else "there is none from before"
            free = shutil.disk_usage(path.parent).free / 1e9
            raise DraftwrightError(
                f"could not write the checkpoint {path} ({first_line(error)}; {free:.1f} GB free): {kept}; free space, "
                f"then continue with ckpt_path={path}"
            ) from error


class RememberSettings(Callback):
    """Writes what a run was started with (`identity`) into its checkpoints."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = dict(settings)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[_KEY] = self.settings


def find_checkpoint(ckpt_path: Path | None, folder: Path) -> Path | None:
    """The checkpoint that ckpt_path names; `last` is the newest last.ckpt in `folder` and the folders beside it."""
    if ckpt_path is None:
        return None
    if str(ckpt_path) == "last":
        found = [*folder.glob(LAST), *folder.parent.glob(f"*/{LAST}")]
        if not found:
            raise DraftwrightError(f"ckpt_path=last finds no {LAST} in {folder.parent}/*: pass ckpt_path=FILE")
        ckpt_path = max(found, key=lambda file: file.stat().st_mtime)
    if not zipfile.is_zipfile(ckpt_path):
        raise DraftwrightError(f"the checkpoint {ckpt_path} is missing or damaged: pass the path of a complete {LAST}")
    return ckpt_path


def saved_settings(checkpoint: Path) -> dict[str, Any]:
    """The settings in a checkpoint; raises DraftwrightError for a file that no training run wrote."""
    try:
        return torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)[_KEY]
    except (RuntimeError, UnpicklingError, KeyError, TypeError, ValueError, EOFError) as error:
        raise DraftwrightError(
            f"{checkpoint} is no checkpoint of a training run: pass the path of a {LAST} that training wrote"
        ) from error


def identity(settings: TrainSettings, target: Target) -> dict[str, Any]:
    """What must stay the same for a continued run to end as an uninterrupted one, as flat keys and plain values.

    `data_identity` joins them later; the order of the batches and the length of the run are checked by
    data/module.py.
    """
    return {
        "target.dtype": settings.target.dtype,
        "target (its weights)": target.identity()[:16],
        **flat({"draft": settings.draft}, "."),
        "draft_vocab_size": settings.draft_vocab_size,
        "vocabulary_tokens": settings.vocabulary_tokens,
        **flat({"module": settings.module}, "."),
        "trainer.precision": settings.trainer.get("precision"),
        "features": settings.features,
        "features_dtype": settings.features_dtype,
        "trainer.gradient_clip_val": settings.trainer.get("gradient_clip_val"),
        "trainer.accumulate_grad_batches": settings.trainer.get("accumulate_grad_batches"),
    }


def data_identity(sequences: Sequences, vocabulary: Tensor) -> dict[str, str]:
    """The same for what is trained on: token ids and loss masks, and the draft vocabulary int64 [V_draft]."""
    parts = ((sequences.ids, sequences.loss_mask, sequences.offsets), (vocabulary,))
    return {key: _digest(*tensors) for key, tensors in zip(OF_THE_DATA, parts, strict=True)}


def _digest(*tensors: Tensor) -> str:
    digest = sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def refuse_changes(checkpoint: Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise DraftwrightError that names the first key in which a run differs from the one that it continues."""
    for key in [*now, *(then.keys() - now.keys())]:
        if then.get(key) != now.get(key):
            raise DraftwrightError(
                f"the checkpoint {checkpoint} was written with another {key} ({then.get(key)}, now {now.get(key)}): "
                "repeat the command that started that run and add ckpt_path"
            )
