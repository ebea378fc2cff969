"""Rows -> token ids and loss masks, in blocks that several processes encode and the disk keeps.

A block is named by a hash of all that its content depends on: the chats in it, tokenizer, template and lengths. So an
edited file, another tokenizer, template or length never finds the blocks of an old one; budgets share them; and what
was killed goes on behind its last whole block.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import torch
from datasets import Dataset, Features, List, Value
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data.chat import encode_pieces
from data.messages import Message, UnusableRow
from data.rows import Row
from spec_decode.errors import DraftwrightError
from spec_decode.target_hf import tokenizer_fingerprint

BLOCK = 1_024  # rows; smaller blocks aren't worth the start of processes
_VERSION = 1  # of what this module makes of a row: another one names other blocks
_COLUMNS = Features(
    row=Value("int32"), start=Value("int32"), ids=List(Value("int32")), mask=List(Value("bool")), reason=Value("string")
)


@dataclass(frozen=True)
class Piece:
    """A chat, or a part of one that is longer than max_length. start: its first turn; ids: int32 [T]; loss_mask:
    bool [T]."""

    start: int
    ids: Tensor
    loss_mask: Tensor


@dataclass(frozen=True)
class Encoded:
    """What became of one row: pieces with supervised tokens, or none, and the reason if the template refused it."""

    pieces: list[Piece]
    reason: str


@dataclass(frozen=True)
class Encoder:
    """How rows become tokens. split: whether a chat goes on behind max_length as another piece."""

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    split: bool

    def folder(self, cache_dir: str | Path) -> Path:
        """Where blocks lie that are encoded like this."""
        special = {name: str(token) for name, token in self.tokenizer.special_tokens_map.items()}
        parts = [_VERSION, tokenizer_fingerprint(self.tokenizer), special, self.max_length, self.split]
        name = sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
        return Path(cache_dir).expanduser() / "prepared" / name

    def encode(self, messages: list[Message], ends: bool) -> Encoded:
        """Encode one chat; ends: whether its last answer is complete."""
        pieces = encode_pieces(self.tokenizer, messages, self.max_length, ends=ends, split=self.split)
        try:
            return Encoded([_piece(*piece) for piece in pieces], "")
        except UnusableRow as reason:
            return Encoded([], str(reason))


def encode_rows(encoder: Encoder, rows: Iterator[Row], cache_dir: str | Path | None) -> Iterator[tuple[Row, Encoded]]:
    """Rows with what became of them, in their order. Without a cache_dir one by one, in this process.

    Raises DraftwrightError if the folder can't be written.
    """
    if cache_dir is None:
        yield from ((row, encoder.encode(row.messages, row.finished)) for row in rows)
        return
    folder = encoder.folder(cache_dir)
    columns = SpinnerColumn(), TextColumn("encoding chats: {task.completed:,.0f}"), TimeElapsedColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        while block := list(islice(rows, BLOCK)):
            yield from zip(block, _encode_block(encoder, block, folder), strict=True)
            bar.advance(task, len(block))


def _encode_block(encoder: Encoder, rows: list[Row], folder: Path) -> list[Encoded]:
    chats = [json.dumps([[vars(message) for message in row.messages], row.finished]) for row in rows]
    name = sha256("\n".join(chats).encode()).hexdigest()[:32]
    datasets.disable_progress_bars()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        block = Dataset.from_dict({"row": list(range(len(rows))), "chat": chats}).map(
            partial(_encode_batch, encoder),
            batched=True,
            batch_size=64,
            remove_columns=["chat"],
            features=_COLUMNS,
            num_proc=os.cpu_count() if len(rows) == BLOCK else None,
            cache_file_name=str(folder / f"{name}.arrow"),
            new_fingerprint=name,
        )
    except OSError as error:
        raise DraftwrightError(
            f"could not write encoded chats to {folder} ({error.strerror}): free space, or set cache_dir=FOLDER"
        ) from error
    found = [Encoded([], "") for _ in rows]
    for part in block.with_format("arrow").iter(BLOCK):
        for row, start, ids, mask, reason in zip(*(part[column] for column in _COLUMNS), strict=True):
            place = row.as_py()
            if reason.as_py():
                found[place] = Encoded([], reason.as_py())
            elif len(ids):
                found[place].pieces.append(_piece(start.as_py(), ids.values.to_numpy(), mask.as_py()))
    return found


def _encode_batch(encoder: Encoder, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """One line for each piece, or one without ids."""
    columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
    for row, chat in zip(batch["row"], batch["chat"], strict=True):
        messages, ends = json.loads(chat)
        encoded = encoder.encode([Message(**message) for message in messages], ends)
        for piece in encoded.pieces or [_piece(0, [], [])]:
            line = (row, piece.start, piece.ids.numpy(), piece.loss_mask.numpy(), encoded.reason)
            for name, value in zip(columns, line, strict=True):
                columns[name].append(value)
    return columns


def _piece(start: int, ids: Any, mask: Any) -> Piece:
    return Piece(start, torch.tensor(ids, dtype=torch.int32), torch.tensor(mask, dtype=torch.bool))
