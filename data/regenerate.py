"""Chats with answers that the target writes itself: what a draft meets when it serves (`python -m data regenerate`).

System and user turns of every chat, answered or not, are kept; the target answers turn after turn, on its own earlier
answers, in this process (`data.answer_target`) or on a server (`data.answer_server`). The output grows line by line
(`data.answer_file`), and the end of a run puts it in the source's order. A chat ends at an answer that the limits cut:
it is marked `"finished": false`, and training doesn't take its end for an end of turn. It ends before an answer without
text and before a question that doesn't fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import file_digest
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from conf.check import Between, Natural, NonNegative, Positive, Seed
from data.answer_file import AnswerFile, only_writer
from data.answer_server import Server, ServerAnswerer
from data.answer_target import TargetAnswerer
from data.dialogue import Answer, Answerer, Dialogue
from data.messages import Message, parse_questions
from data.readers import ReadReport
from data.rows import Row, usable_rows
from data.sources import Source, local_file
from spec_decode.errors import DraftwrightError
from spec_decode.packed_linear import pack_linears
from spec_decode.sampling import Sampling
from spec_decode.target_hf import TargetSource, open_target, tokenizer_fingerprint


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
    server: str | None = None
    model: str | None = None
    concurrency: Positive = 64
    timeout: Annotated[float, Between(1)] = 600

    def __post_init__(self) -> None:
        _ = self.sampling  # refuses what can't be sampled from

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p)

    def fingerprint(self) -> dict[str, Any]:
        """What the answers depend on, whoever gives them."""
        names = ("turns", "max_length", "max_new_tokens", "temperature", "top_k", "top_p", "seed")
        return {name: getattr(self, name) for name in names} | {"dataset": _identity(self.dataset)}


def open_answerer(settings: RegenerateSettings) -> tuple[Answerer, dict[str, Any]]:
    """What answers, and what identifies it. Raises DraftwrightError if it can't."""
    if settings.server is not None:
        server = Server(settings.server, settings.model, settings.concurrency, settings.timeout)
        answerer = ServerAnswerer(
            server,
            room=settings.max_length,
            max_new_tokens=settings.max_new_tokens,
            sampling=settings.sampling,
            seed=settings.seed,
        )
        return answerer, {"server": server.base, "model": answerer.model}
    target, tokenizer = open_target(settings.target)
    identity = {"target": f"{target.spec.name} {target.identity()[:16]}", "tokenizer": tokenizer_fingerprint(tokenizer)}
    pack_linears(target.model)
    return TargetAnswerer(
        target,
        tokenizer,
        slots=settings.slots,
        room=settings.max_length,
        max_new_tokens=settings.max_new_tokens,
        sampling=settings.sampling,
        seed=settings.seed,
    ), identity


def regenerate(answerer: Answerer, identity: dict[str, Any], settings: RegenerateSettings, report: ReadReport) -> int:
    """Write what is missing of settings.output; returns the number of answer tokens written now.

    Raises DraftwrightError when the source is missing or holds no chat, when no chat was answered, or when the file
    can't be written, is another's or was written with other settings.
    """
    asked = usable_rows(settings.dataset, report, parse_questions)
    rows = islice(_some(asked, settings.dataset, report), settings.limit)
    try:
        with only_writer(settings.output):
            file = AnswerFile(settings.output, identity | settings.fingerprint())
            with file:
                tokens = _answer(answerer, rows, file, settings, report)
            file.sort()
    except OSError as error:
        raise DraftwrightError(
            f"could not write to {settings.output} ({error}): free space, or choose another output=FILE; what it holds "
            "is kept"
        ) from error
    if report.dropped and not settings.output.stat().st_size:
        raise DraftwrightError(
            f"no chat of {settings.dataset.place()} was answered ({'; '.join([report.reasons(), *report.warnings])}): "
            "correct the settings or the chats that these reasons name"
        )
    return tokens


def _answer(
    answerer: Answerer, rows: Iterator[Row], file: AnswerFile, settings: RegenerateSettings, report: ReadReport
) -> int:
    """Answer the rows that the file lacks; returns the number of tokens."""
    tokens = 0
    with _progress() as bar:
        task = bar.add_task("answering", total=_total(settings), completed=len(file.done), speed=0.0)
        fresh = (Dialogue(row, settings.turns) for row in rows if row.number not in file.done)
        for answer in answerer(fresh):
            tokens += answer.tokens
            ended = _take(answer, file, report)
            speed = tokens / max(1e-9, bar.tasks[task].elapsed or 0)
            bar.update(task, advance=ended, speed=speed)
    return tokens


def _take(answer: Answer, file: AnswerFile, report: ReadReport) -> bool:
    """Give an answer to its dialogue, and write the dialogue if it ended, which is returned."""
    dialogue = answer.dialogue
    if answer.text:
        dialogue.answer(Message("assistant", answer.text, reasoning=answer.reasoning), finished=answer.finished)
        if dialogue.open:
            return False
    dialogue.close()
    if dialogue.messages and not answer.retry:
        file.add(dialogue, answer.finished or not answer.text)
        report.kept += 1
        return True
    reason = answer.refused or "answer without text"
    if answer.detail and reason not in report.dropped:
        report.warnings.append(f"{reason}: {answer.detail}")
    report.drop(reason, dialogue.row.place)
    if not answer.retry:
        file.drop(dialogue, reason)
    return True


def _some(rows: Iterator[Row], source: Source, report: ReadReport) -> Iterator[Row]:
    """The same rows; raises DraftwrightError at once if there are none."""
    first = next(rows, None)
    if first is None:
        raise DraftwrightError(
            f"{source.place()} holds no usable conversation ({report.reasons() or 'no rows'}): pass rows with "
            "`messages`, `conversations` or `prompt` that hold a user turn"
        )
    return chain([first], rows)


def _total(settings: RegenerateSettings) -> int | None:
    """Number of chats in the end, to tell the time left; a data set on the hub isn't read twice for that."""
    if local_file(settings.dataset) is None:
        return settings.limit
    rows = usable_rows(settings.dataset, ReadReport(), parse_questions)
    return sum(1 for _ in islice(rows, settings.limit))


def _identity(source: Source) -> str:
    """Equal for sources with the same rows: a local file's content, or a data set's name and split."""
    path = local_file(source)
    if path is None:
        return f"{source.hub} {source.split}"
    with path.open("rb") as file:
        return f"{path.name} {file_digest(file, 'sha256').hexdigest()[:16]}"


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("chats, {task.fields[speed]:.0f} tokens/s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
