"""init_from=FOLDER: a draft starts from the weights of another one of the same shape, an imported one for example."""

from __future__ import annotations

from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from spec_decode.drafter import VocabularyDrafter
from spec_decode.drafters import load_draft
from spec_decode.errors import DraftwrightError
from train.settings import TrainSettings

_NAMES = ("target", "tokenizer", "max_positions")  # fields that don't change what the weights mean


def load_start(folder: Path | None, kind: type[VocabularyDrafter]) -> VocabularyDrafter | None:
    """The draft in init_from, or None without one; raises DraftwrightError unless it is a `kind`."""
    if folder is None:
        return None
    start = load_draft(folder)
    if type(start) is not kind:
        raise DraftwrightError(
            f"init_from={folder} holds a draft of the class {type(start).__name__}, but this variant trains "
            f"{kind.__name__}: choose the variant that the draft belongs to"
        )
    return start  # type: ignore[return-value]


def check_start(settings: TrainSettings, start: VocabularyDrafter | None, vocab_size: int, tokenizer: str) -> None:
    """Raise DraftwrightError if the draft has a vocabulary of another size or another tokenizer."""
    if start is None:
        return
    folder, draft_vocab_size = settings.init_from, settings.draft_vocab_size or vocab_size
    if start.config.draft_vocab_size != draft_vocab_size:
        raise DraftwrightError(
            f"init_from={folder} proposes from {start.config.draft_vocab_size} tokens and this run's draft from "
            f"{draft_vocab_size}: use draft_vocab_size={start.config.draft_vocab_size}"
        )
    if start.config.tokenizer not in ("", tokenizer):
        raise DraftwrightError(
            f"init_from={folder} was trained with another tokenizer or chat template than the target's: choose the "
            "target that it was trained for"
        )


def copy_weights(folder: Path | None, start: VocabularyDrafter | None, draft: VocabularyDrafter) -> None:
    """Give the draft all weights of the other; raises DraftwrightError naming the field in which they differ."""
    if start is None:
        return
    theirs, ours = (asdict(one.config) for one in (start, draft))  # type: ignore[call-overload]
    for field in ours:
        if field not in _NAMES and ours[field] != theirs[field]:
            raise DraftwrightError(
                f"init_from={folder} has {field}={_shown(theirs[field])} and this run's draft {_shown(ours[field])}: "
                f"pass ++draft.{field}={_shown(theirs[field])}, or choose the target that it was trained for"
            )
    draft.load_state_dict(start.state_dict())


def start_identity(start: VocabularyDrafter | None) -> dict[str, str | None]:
    """For train/resume.py: what a continued run must have started from."""
    if start is None:
        return {"init_from (its weights)": None}
    digest = sha256()
    for name, tensor in start.state_dict().items():
        digest.update(f"{name} {tensor.dtype}".encode())
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().data)
    return {"init_from (its weights)": digest.hexdigest()[:16]}


def _shown(value: Any) -> str:
    """A value as an override writes it."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_shown(entry)}" for key, entry in value.items()) + "}"
    return f"[{','.join(map(_shown, value))}]" if isinstance(value, list | tuple) else str(value)
