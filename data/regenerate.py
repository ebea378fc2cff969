"""Chats with answers that the target writes itself: what a draft meets when it serves (`python -m data regenerate`).

System and user turns of every chat are kept; the target answers turn after turn, on its own earlier answers. The
output grows by whole lines, one chat each, in the order in which they end; `row` says which chat of the source it is,
so a run that was killed goes on where it stopped. A chat ends at an answer that the limits cut: it is marked
`"finished": false`, and training doesn't take its end for an end of turn.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TextIO

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import PreTrainedTokenizerBase

from conf.check import Between, Natural, NonNegative, Positive, Seed
from data.chat import encode_prompt
from data.messages import Message, UnusableRow
from data.prepare import Row, usable_rows
from data.readers import ReadReport
from data.sources import Source
from spec_decode.errors import DraftwrightError
from spec_decode.generate import Request, generate
from spec_decode.sampling import Sampling
from spec_decode.target_hf import HFTarget, TargetSource

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

    Raises DraftwrightError when the source is missing or empty, or the file can't be written or is another's.
    """
    done = read_done(settings.output)
    rows = islice(usable_rows(settings.dataset, report), settings.limit)
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
    except OSError as error:
        raise DraftwrightError(
            f"could not write to {settings.output} ({error}): free space, or choose another output=FILE; what it holds "
            "is kept"
        ) from error
    return tokens


def read_done(path: Path) -> set[int]:
    """The rows that a file holds already; a last line that a kill has cut is removed.

    Raises DraftwrightError for a file that `regenerate` didn't write.
    """
    if not path.exists():
        return set()
    try:
        with path.open("rb+") as file:
            done = set()
            end = 0
            for line in file:
                if not line.endswith(b"\n"):
                    break
                done.add(int(json.loads(line)["row"]))
                end += len(line)
            file.truncate(end)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DraftwrightError(
            f"{path} can't be continued, it isn't a file that regenerate wrote ({error}): choose another output=FILE"
        ) from error
    return done


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
        if not waiting:
            for row in islice(fresh, WINDOW * settings.slots):
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
        dialogue = dialogues[answer.key]
        text = str(tokenizer.decode(answer.tokens, skip_special_tokens=True))
        dialogue.messages.append(Message("assistant", text))
        if answer.finished and next_turn(dialogue):
            yield None, len(answer.tokens)
            continue
        del dialogues[answer.key]
        while dialogue.messages[-1].role != "assistant":
            dialogue.messages.pop()
        yield (dialogue, answer.finished), len(answer.tokens)


def _first_turns(messages: list[Message], turns: int | None) -> deque[Message]:
    """The messages up to the given number of user turns."""
    users = [index for index, message in enumerate(messages) if message.role == "user"]
    stop = len(messages) if turns is None or turns >= len(users) else users[turns]
    return deque(messages[:stop])


def _write(file: TextIO, dialogue: _Dialogue, finished: bool) -> None:
    line: dict[str, Any] = {"row": dialogue.row.number, "finished": finished}
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
