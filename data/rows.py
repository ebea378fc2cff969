"""The rows of a source that hold a chat, and those of them that are chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from data.filters import Contamination, Copies
from data.messages import Message, UnusableRow, parse_row
from data.readers import ReadReport
from data.sources import Source, open_rows


@dataclass(frozen=True)
class Row:
    """One usable row of a source. number: its place among the usable ones; place: in the source, like `line 3`; id: its
    name there, if it has one; finished: whether the last answer ends, rather than being cut (`data.regenerate` marks
    those)."""

    number: int
    place: str
    id: str | None
    messages: list[Message]
    finished: bool


def usable_rows(
    source: Source, report: ReadReport, parse: Callable[[object], list[Message]] = parse_row
) -> Iterator[Row]:
    """The rows of a source that hold a chat, or what else `parse` makes of a row; the others are counted in `report`.

    Raises DraftwrightError at the first of the others if the source is strict.
    """
    number = 0
    for row, place in open_rows(source, report):
        try:
            messages = parse(row)
        except UnusableRow as reason:
            report.bad(str(reason), place, reason.key)
            continue
        yield Row(number, place, _id(row), messages, row.get("finished") is not False)
        number += 1


def chosen_rows(source: Source, report: ReadReport) -> Iterator[Row]:
    """The usable rows that are neither copies nor hold prompts of benchmarks, as far as the source asks for that."""
    contamination, copies = Contamination(source.decontaminate or (), report), Copies(source.dedup)
    for row in usable_rows(source, report):
        if reason := contamination.found(row.messages) or copies.found(row.messages):
            report.drop(reason, row.place)
        else:
            yield row


def _id(row: dict[str, Any]) -> str | None:
    """The row's own name, whichever key holds it."""
    for key in ("id", "conversation_id", "prompt_id"):
        value = row.get(key)
        if isinstance(value, str | int) and str(value):
            return str(value)
    return None
