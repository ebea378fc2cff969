"""A source of chats -> training and held-out token sequences.

The side of a chat depends on its id (or, without one, on its first user message), never on budgets, so a chat that
was held out once stays held out. ShareGPT cuts long chats into rows `id_0`, `id_1`, …: these stay together.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import takewhile
from operator import attrgetter
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data.batch import Sequences
from data.chat import render
from data.encoding import Encoder, encode_rows
from data.messages import Message
from data.readers import ReadReport
from data.rows import Row, chosen_rows
from data.sources import Source
from spec_decode.errors import DraftwrightError

HELDOUT_SHARE = 0.05
_CHUNK = re.compile(r"_\d+$")
# The longest real chat of ShareGPT has 89 rows; more rows under one stem are numbered rows (`row_1`), not chunks.
_MAX_CHUNKS = 128


@dataclass(frozen=True)
class Chat:
    """One encoded chat, or a piece of one. group: what decides its side; identity: its id, or its first user message;
    ids: int32 [T]; loss_mask: bool [T]; prompt: the messages before the first assistant turn; turns: in the chat, 0 in
    a later piece of it."""

    group: str
    identity: str
    ids: Tensor
    loss_mask: Tensor
    prompt: list[Message]
    turns: int = 0

    def digest(self) -> bytes:
        """Equal for chats with equal tokens."""
        return sha256(self.ids.numpy().tobytes()).digest()


@dataclass(frozen=True)
class Prepared:
    """Both sides of a data set; heldout_prompts[i] opens heldout[i]."""

    train: Sequences
    heldout: Sequences
    report: ReadReport
    heldout_prompts: list[list[Message]]


@dataclass
class _Side:
    budget: int | None  # tokens; None takes all
    chats: list[Chat] = field(default_factory=list)
    tokens: int = 0
    digests: set[bytes] = field(default_factory=set)

    def full(self) -> bool:
        return self.budget is not None and self.tokens >= self.budget

    def add(self, chat: Chat) -> None:
        self.chats.append(chat)
        self.tokens += len(chat.ids)
        self.digests.add(chat.digest())


def prepare(
    tokenizer: PreTrainedTokenizerBase,
    source: Source,
    *,
    max_length: int,
    train_tokens: int | None,
    heldout_tokens: int,
    cache_dir: str | Path | None = None,
) -> Prepared:
    """Read a source until both token budgets are met (train_tokens=None: to its end); same input, same result.

    A chat counts with all its tokens, and the last one may exceed the budget. With heldout_tokens=0 nothing is held
    out. What was encoded is kept under `cache_dir`, and never encoded again. Raises DraftwrightError when no chat is
    usable, naming the reasons with their counts.
    """
    if (train_tokens is not None and train_tokens < 1) or heldout_tokens < 0 or max_length < 2:
        raise DraftwrightError(
            f"train_tokens={train_tokens}, heldout_tokens={heldout_tokens}, max_length={max_length} leave nothing to "
            "train on: use train_tokens >= 1 (null for all), heldout_tokens >= 0 and max_length >= 2"
        )
    report = ReadReport()
    train, heldout = _Side(train_tokens), _Side(heldout_tokens)

    def side(group: str) -> _Side:
        return heldout if heldout_tokens > 0 and _score(group) < HELDOUT_SHARE else train

    for chat in encoded_chats(tokenizer, source, report, max_length, cache_dir):
        if side(chat.group).full():
            continue
        mine, other = (train, heldout) if side(chat.group) is train else (heldout, train)
        if chat.digest() in other.digests:
            report.drop("copy of a chat on the other side of the held-out split")
            continue
        mine.add(chat)
        report.kept += 1
        if train.full() and heldout.full():
            break
    if heldout_tokens > 0 and not (train.chats and heldout.chats):
        train.chats, heldout.chats = _split_few(train.chats + heldout.chats, report)
    if not train.chats:
        raise DraftwrightError(
            f"{source.place()} holds too few different conversations to hold some out: pass more, or heldout_tokens=0"
        )
    sequences = _sequences(train.chats)
    if train_tokens is not None and len(sequences.ids) < train_tokens:
        report.warnings.append(
            f"the data ended after {len(sequences.ids):,} of the {train_tokens:,} tokens to count or train on"
        )
    return Prepared(sequences, _sequences(heldout.chats), report, [chat.prompt for chat in heldout.chats])


def encoded_chats(
    tokenizer: PreTrainedTokenizerBase,
    source: Source,
    report: ReadReport,
    max_length: int,
    cache_dir: str | Path | None = None,
) -> Iterator[Chat]:
    """Encode the chats of a source; what cannot be used or is left out is counted in `report`.

    Raises DraftwrightError at the end of the source when no chat was usable at all.
    """
    rows_of_stem: Counter[str] = Counter()
    usable = False
    unsupervised: list[Message] | None = None
    encoder = Encoder(tokenizer, max_length, source.split_long)
    for row, encoded in encode_rows(encoder, chosen_rows(source, report), cache_dir):
        group, identity = _group(row, rows_of_stem)
        if encoded.reason:
            report.bad(encoded.reason, row.place)
        elif not encoded.pieces:
            unsupervised = unsupervised or row.messages
            report.drop("no supervised token within max_length", row.place)
        for number, piece in enumerate(encoded.pieces):
            usable = True
            turns = 0 if number else len(row.messages)
            yield Chat(group, identity, piece.ids, piece.loss_mask, _opening(row.messages, piece.start), turns)
    if not usable:
        raise _nothing_usable(tokenizer, source, report, max_length, unsupervised)


def _nothing_usable(
    tokenizer: PreTrainedTokenizerBase,
    source: Source,
    report: ReadReport,
    max_length: int,
    unsupervised: list[Message] | None,
) -> DraftwrightError:
    """The error for a source without a usable chat; shows a decoded one when masks are the reason."""
    counts = "; ".join([report.reasons() or "no rows", *report.warnings])
    if unsupervised is None:
        return DraftwrightError(
            f"{source.place()} holds no usable conversation ({counts}): pass rows with `messages` or `conversations` "
            "that hold an answered user turn"
        )
    first = unsupervised[: len(_opening(unsupervised)) + 1]
    text = tokenizer.decode(render(tokenizer, first, generation_prompt=False))
    return DraftwrightError(
        f"no conversation of {source.place()} has a supervised token ({counts}): raise max_length={max_length} "
        f"or check the chat template of the target, which makes of the first one: {text[:400]!r}"
    )


def _group(row: Row, rows_of_stem: Counter[str]) -> tuple[str, str]:
    """(what decides the side, the row's own identity)."""
    if row.id is not None:
        stem = _CHUNK.sub("", row.id)
        rows_of_stem[stem] += 1
        return (stem if rows_of_stem[stem] <= _MAX_CHUNKS else row.id), row.id
    first = next(message.content for message in row.messages if message.role == "user")
    return first, first


def _split_few(chats: list[Chat], report: ReadReport) -> tuple[list[Chat], list[Chat]]:
    """Split a data set so small that chance left one side empty: the group with the lowest score is held out."""
    key = attrgetter("group")
    if len({key(chat) for chat in chats}) < 2:  # one chat in chunks, or rows numbered like chunks
        key = attrgetter("identity")
    if len({key(chat) for chat in chats}) < 2:
        report.warnings.append("only one conversation, so none is held out")
        return chats, []
    out = min({key(chat) for chat in chats}, key=_score)
    heldout = [chat for chat in chats if key(chat) == out]
    digests = {chat.digest() for chat in heldout}
    return [chat for chat in chats if key(chat) != out and chat.digest() not in digests], heldout


def _score(group: str) -> float:
    """A number in [0, 1) that looks random but depends on the text alone."""
    return int.from_bytes(sha256(group.encode()).digest()[:8]) / 2**64


def _opening(messages: list[Message], start: int = 0) -> list[Message]:
    """The system turn, and the turns from `start` to the next answer."""
    system = [message for message in messages[:start] if message.role == "system"]
    return system + list(takewhile(lambda message: message.role != "assistant", messages[start:]))


def _sequences(chats: list[Chat]) -> Sequences:
    lengths = torch.tensor([0] + [len(chat.ids) for chat in chats])
    return Sequences(
        ids=torch.cat([torch.zeros(0, dtype=torch.int32), *(chat.ids for chat in chats)]),
        loss_mask=torch.cat([torch.zeros(0, dtype=torch.bool), *(chat.loss_mask for chat in chats)]),
        offsets=lengths.cumsum(0),
    )
