"""Chats with answers that the target writes itself: what a draft meets when it serves (`python -m data regenerate`).

System and user turns of every chat, answered or not, are kept; the target answers turn after turn, on its own earlier
answers. The output grows by whole lines, one chat each, in the order in which they end; `row` says which chat of the
source it is, so a run that was killed goes on where it stopped. The end of a run puts the lines in the source's order.
A chat ends at an answer that the limits cut: it is marked `"finished": false`, and training doesn't take its end for an
end of turn. It ends before an answer without text.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, TextIO

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import PreTrainedTokenizerBase

from conf.check import Between, Natural, NonNegative, Positive, Seed
from data.chat import encode_prompt
from data.messages import Message, UnusableRow, parse_questions
from data.readers import ReadReport
from data.rows import Row, usable_rows
from data.sources import Source
from spec_decode.checkpoint import write_atomically
from spec_decode.errors import DraftwrightError, first_line
from spec_decode.generate import Request, generate
from spec_decode.sampling import Sampling
from spec_decode.target_hf import HFTarget, TargetSource

_BEGIN = b'{"row": '  # of every line
WINDOW = 16  # chats for each slot that are sorted by length together, so that neighbours in the cache are alike


@dataclass(frozen=True)
class RegenerateSettings:
    """The keys of conf/regenerate.yaml."""

    target: TargetSource
    dataset: Source
    output: Path
    limit: Positive | None
    turns: Positive | None
    max_length: Annotated[int, Between(2)]
    max_new_tokens: Positive
    slots: Positive
    temperature: NonNegative
    top_k: Natural
    top_p: Annotated[float, Between(0, 1)]
    seed: Seed

    def __post_init__(self) -> None:
        _ = self.sampling  # refuses what can't be sampled from

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p)


@dataclass
class _Dialogue:
    """A chat on its way. asked: the source's turns; messages: what stands so far."""

    row: Row
    asked: deque[Message]
    messages: list[Message]

    def ask(self) -> bool:
        """Move on to behind the next user turn; False if there is none."""
        while self.asked:
            message = self.asked.popleft()
            if message.role != "assistant":
                self.messages.append(message)
            if message.role == "user":
                return True
        return False


def regenerate(
    target: HFTarget, tokenizer: PreTrainedTokenizerBase, settings: RegenerateSettings, report: ReadReport
) -> int:
    """Write what is missing of settings.output; returns the number of answer tokens written now.

    Raises DraftwrightError when the source is missing or holds no chat, when max_length exceeds the target's
    positions, or when the file can't be written or is another's.
    """
    if settings.max_length > target.spec.max_positions:
        raise DraftwrightError(
            f"max_length={settings.max_length} exceeds the {target.spec.max_positions} positions of target "
            f"'{target.spec.name}': use max_length={target.spec.max_positions} or less"
        )
    asked = usable_rows(settings.dataset, report, parse_questions)
    rows = islice(_some(asked, settings.dataset, report), settings.limit)
    done = read_done(settings.output)
    total = settings.limit
    tokens = 0
    try:
        settings.output.parent.mkdir(parents=True, exist_ok=True)
        with settings.output.open("a", encoding="utf-8") as file, _progress() as bar:
            task = bar.add_task("answering", total=total, completed=len(done), speed=0.0)
            for dialogue, answered in _answered(target, tokenizer, settings, rows, done, report):
                tokens += answered
                speed = tokens / max(1e-9, bar.tasks[task].elapsed or 0)
                bar.update(task, advance=dialogue is not None, speed=speed)
                if dialogue is not None:
                    _write(file, *dialogue)
                    report.kept += 1
        _sort(settings.output)
    except OSError as error:
        raise DraftwrightError(
            f"could not write to {settings.output} ({error}): free space, or choose another output=FILE; what it holds "
            "is kept"
        ) from error
    return tokens


def _some(rows: Iterator[Row], source: Source, report: ReadReport) -> Iterator[Row]:
    """The same rows; raises DraftwrightError at once if there are none."""
    first = next(rows, None)
    if first is None:
        raise DraftwrightError(
            f"{source.place()} holds no usable conversation ({report.reasons() or 'no rows'}): pass rows with "
            "`messages`, `conversations` or `prompt` that hold a user turn"
        )
    return chain([first], rows)


def read_done(path: Path) -> set[int]:
    """The rows that a file holds already; a last line that a kill has cut is removed.

    Raises DraftwrightError for a file that `regenerate` didn't write, which stays as it is.
    """
    if not path.exists():
        return set()
    done = set()
    end = 0
    try:
        with path.open("rb+") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    _check_torn(line)
                    file.truncate(end)
                    break
                done.add(_row_of(line))
                end += len(line)
    except OSError as error:
        raise DraftwrightError(f"{path} can't be continued ({error.strerror}): choose another output=FILE") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DraftwrightError(
            f"{path} can't be continued, line {len(done) + 1} isn't one that regenerate wrote "
            f"({first_line(error)}): choose another output=FILE"
        ) from error
    return done


def _row_of(line: bytes) -> int:
    """The row of a line of ours; any other one raises ValueError, KeyError or TypeError."""
    content = json.loads(line)
    if type(content["row"]) is not int or type(content["finished"]) is not bool or not content["messages"]:
        raise ValueError("row, finished or messages has a wrong value")
    return content["row"]


def _check_torn(line: bytes) -> None:
    """Raise ValueError unless the line without an end begins like ours."""
    if line[: len(_BEGIN)] != _BEGIN[: len(line)]:
        raise ValueError("it has no end")


def _sort(path: Path) -> None:
    """Put the lines in the source's order: which chats are held out, or trained on first, may depend on it."""
    with path.open("rb") as file:
        lines = [(_row_of(line), line) for line in file]
    ordered = sorted(lines)
    if ordered != lines:
        write_atomically(path, lambda new: new.write_bytes(b"".join(line for _, line in ordered)))


def _answered(
    target: HFTarget,
    tokenizer: PreTrainedTokenizerBase,
    settings: RegenerateSettings,
    rows: Iterator[Row],
    done: set[int],
    report: ReadReport,
) -> Iterator[tuple[tuple[_Dialogue, bool] | None, int]]:
    """After every answer: (the chat and whether it is finished, if it ended with it, and the answer's tokens)."""
    dialogues: dict[int, _Dialogue] = {}
    waiting: deque[Request] = deque()
    fresh = (row for row in rows if row.number not in done)

    def request(dialogue: _Dialogue) -> Request:
        prompt = encode_prompt(tokenizer, dialogue.messages)
        if len(prompt) >= settings.max_length:
            raise UnusableRow("prompt of max_length tokens or more")
        turn = sum(message.role == "assistant" for message in dialogue.messages)
        seed = settings.seed + 1_000_003 * dialogue.row.number + turn
        return Request(dialogue.row.number, torch.tensor(prompt), seed)

    def take() -> Request | None:
        while not waiting and (window := list(islice(fresh, WINDOW * settings.slots))):
            for row in window:
                dialogue = _Dialogue(row, _first_turns(row.messages, settings.turns), [])
                dialogue.ask()
                try:
                    waiting.append(request(dialogue))
                except UnusableRow as reason:
                    report.drop(str(reason))
                    continue
                dialogues[row.number] = dialogue
            ordered = sorted(waiting, key=lambda one: one.prompt.numel())
            waiting.clear()
            waiting.extend(ordered)
        return waiting.popleft() if waiting else None

    def next_turn(dialogue: _Dialogue) -> bool:
        """Queue the next user turn, if there is one that fits."""
        try:
            if dialogue.ask():
                waiting.appendleft(request(dialogue))
                return True
        except UnusableRow:
            pass
        return False

    answers = generate(
        target,
        take,
        slots=settings.slots,
        room=settings.max_length,
        max_new_tokens=settings.max_new_tokens,
        sampling=settings.sampling,
    )
    for answer in answers:
        dialogue, text = dialogues[answer.key], _text(tokenizer, answer)
        if text:
            dialogue.messages.append(Message("assistant", text))
            if answer.finished and next_turn(dialogue):
                yield None, len(answer.tokens)
                continue
        del dialogues[answer.key]
        while dialogue.messages and dialogue.messages[-1].role != "assistant":
            dialogue.messages.pop()
        if dialogue.messages:
            yield (dialogue, answer.finished or not text), len(answer.tokens)
        else:
            report.drop("answer without text")
            yield None, len(answer.tokens)


def _text(tokenizer: PreTrainedTokenizerBase, answer: Request) -> str:
    """What the target wrote, without its end of turn and without a last character that a limit cut; empty for blanks
    alone."""
    tokens = answer.tokens[:-1] if answer.finished else answer.tokens
    text = str(tokenizer.decode(tokens, skip_special_tokens=True))
    text = text if answer.finished else text.rstrip("\ufffd")
    return text if text.strip() else ""


def _first_turns(messages: list[Message], turns: int | None) -> deque[Message]:
    """The messages up to the given number of user turns."""
    users = [index for index, message in enumerate(messages) if message.role == "user"]
    stop = len(messages) if turns is None or turns >= len(users) else users[turns]
    return deque(messages[:stop])


def _write(file: TextIO, dialogue: _Dialogue, finished: bool) -> None:
    line: dict[str, Any] = {"row": dialogue.row.number, "finished": finished}  # as _BEGIN has it
    if dialogue.row.id is not None:
        line["id"] = dialogue.row.id
    line["messages"] = [{"role": message.role, "content": message.content} for message in dialogue.messages]
    file.write(json.dumps(line, ensure_ascii=False) + "\n")
    file.flush()


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("chats, {task.fields[speed]:.0f} tokens/s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
