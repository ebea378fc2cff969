"""What every format is made of: a config.json, tensors under the consumer's names, and a way back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from spec_decode.drafter import VocabularyDrafter
from spec_decode.errors import DraftwrightError
from spec_decode.target import TargetSpec

NOTE = "draftwright"  # key of config.json with what no consumer has a place for
VOCABULARY = ("d2t", "t2d")
SPECULATIVE_TOKENS = 4  # drafted in a round by the serving commands that we write
MASK_ADVICE = "train it with draft.mask_token=ID, a token of the target that chats don't hold"


@dataclass(frozen=True)
class ServedTarget:
    """The target as a server finds it. location: a folder or hub name; architecture: its class in transformers;
    embeddings: reads its input embeddings [V, H], for formats that repeat them."""

    spec: TargetSpec
    location: str
    architecture: str
    embeddings: Callable[[], Tensor]


@dataclass(frozen=True)
class Files:
    """What a draft folder of a consumer holds; weights: the name of the file with the tensors."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    weights: str = "model.safetensors"


@dataclass(frozen=True)
class Layout:
    """How a consumer stores one kind of draft.

    write: (draft's config, its tensors, target) -> config.json; refuses by name what the consumer can't hold.
    read: (config.json, tensors of the file, target_layers or None) -> draft's config; refuses what the draft can't
    hold.
    names: (config.json, draft's config) -> the file's name of every tensor that it stores, by the draft's name.
    embeddings: what a file may call the target's embeddings, which our drafts share; stores_embeddings: it must.
    renamed: beginnings of tensor names as older or other tools write them, to those that `names` gives.
    pack: (the draft's tensors by the file's names, draft's config) -> those of the file, where they differ by more than
    their name; unpack: the way back.
    """

    name: str
    draft: type[VocabularyDrafter]
    write: Callable[[Any, Mapping[str, Tensor], ServedTarget], dict[str, Any]]
    read: Callable[[dict[str, Any], Mapping[str, Tensor], tuple[int, ...] | None], Any]
    names: Callable[[dict[str, Any], Any], dict[str, str]]
    weights: str = "model.safetensors"
    embeddings: str | None = None
    stores_embeddings: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)
    pack: Callable[[dict[str, Tensor], Any], dict[str, Tensor]] = lambda tensors, config: tensors
    unpack: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict


def refuse(layout: str, what: str, instead: str) -> DraftwrightError:
    """The error for a draft that a consumer can't hold."""
    return DraftwrightError(f"{layout} can't hold this draft, since it has {what}: {instead}")


def note(config: Mapping[str, Any], key: str, otherwise: Any = "") -> Any:
    """What an export of ours wrote down beside the consumer's own keys."""
    found = config.get(NOTE)
    return found.get(key, otherwise) if isinstance(found, Mapping) else otherwise


def whole_vocabulary(layout: str, config: Any) -> None:
    """Raise DraftwrightError if the draft proposes from a part of the vocabulary, for which a consumer has no place."""
    if config.draft_vocab_size != config.vocab_size:
        raise refuse(
            layout,
            f"a draft vocabulary of {config.draft_vocab_size} tokens",
            "train it with draft_vocab_size=null, which takes all of the target's",
        )
