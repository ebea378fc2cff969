"""The file of `python -m data regenerate`: whole lines, one chat each, in the order in which they end.

    OWN.jsonl       {"row": 3, "finished": true, "id": …, "messages": […]}
    OWN.jsonl.run   {"settings": {…}}        what the answers depend on
                    {"row": 4, "dropped": "answer without text"}
    OWN.jsonl.lock  held by the run that writes; empty

`row` says which chat of the source it is, so that a run that was killed goes on where it stopped. A chat that was
dropped isn't asked again: with these settings, another run would fare no better.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from filelock import FileLock, Timeout

from data.dialogue import Dialogue
from spec_decode.checkpoint import as_text, write_atomically
from spec_decode.errors import DraftwrightError, first_line

_BEGIN = b'{"row": '  # of every line but the settings


@contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Keeps other runs from `path`. The lock is the system's, so it ends with this process, however that ends.

    Raises DraftwrightError if another run has it, and OSError if there can be no lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.with_name(f"{path.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise DraftwrightError(
            f"another run is writing {path}: wait until it has ended, or choose another output=FILE"
        ) from error
    try:
        yield
    finally:
        lock.release()


class AnswerFile:
    """The file at `path`, opened for adding; `done` are the rows that need no answer any more.

    settings: what the answers depend on, as JSON values. Raises DraftwrightError if the file is another's or was
    written with other settings, and OSError if it can't be written.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        beside = path.with_name(f"{path.name}.run")
        self.done = read_rows(path, chat_row)
        if self.done:
            _check_settings(path, beside, settings)
        else:
            write_atomically(beside, as_text(json.dumps({"settings": settings}, ensure_ascii=False) + "\n"))
        self.done |= read_rows(beside, _dropped_row, skip=1)
        self._chats, self._dropped = path.open("a", encoding="utf-8"), beside.open("a", encoding="utf-8")

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._chats.close()
        self._dropped.close()

    def add(self, dialogue: Dialogue, finished: bool) -> None:
        """Add a chat; finished: whether the model ended its last answer itself."""
        line: dict[str, Any] = {"row": dialogue.row.number, "finished": finished}  # as _BEGIN has it
        if dialogue.row.id is not None:
            line["id"] = dialogue.row.id
        line["messages"] = [
            {"role": message.role, "content": message.content}
            | ({"reasoning_content": message.reasoning} if message.reasoning else {})
            for message in dialogue.messages
        ]
        _write(self._chats, line)

    def drop(self, dialogue: Dialogue, reason: str) -> None:
        """Note that a chat can have no answer."""
        _write(self._dropped, {"row": dialogue.row.number, "dropped": reason})

    def sort(self) -> None:
        """Put the lines in the source's order: which chats are held out, or trained on first, may depend on it."""
        with self.path.open("rb") as file:
            lines = [(chat_row(line), line) for line in file]
        ordered = sorted(lines)
        if ordered != lines:
            write_atomically(self.path, lambda new: new.write_bytes(b"".join(line for _, line in ordered)))


def _write(file: TextIO, line: dict[str, Any]) -> None:
    file.write(json.dumps(line, ensure_ascii=False) + "\n")
    file.flush()


def _check_settings(path: Path, beside: Path, settings: dict[str, Any]) -> None:
    """Raise DraftwrightError that names the first setting that differs from those of the run so far."""
    try:
        before = json.loads(beside.read_bytes().split(b"\n", 1)[0])["settings"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DraftwrightError(
            f"{path} can't be continued, since {beside.name}, which says what it was written with, can't be read "
            f"({first_line(error)}): choose another output=FILE"
        ) from error
    for name in sorted(before.keys() | settings.keys()):
        old, new = before.get(name), settings.get(name)
        if old != new:
            raise DraftwrightError(
                f"{path} was written with {name}={_shown(old)}, not {_shown(new)}: answers of both would be mixed; "
                "use the old setting, or choose another output=FILE"
            )


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def read_rows(path: Path, row_of: Callable[[bytes], int], skip: int = 0) -> set[int]:
    """The rows that a file holds behind its first `skip` lines; a last line that a kill has cut is removed.

    Raises DraftwrightError for a file with lines that `row_of` refuses, which stays as it is.
    """
    if not path.exists():
        return set()
    rows = set()
    number = end = 0
    try:
        with path.open("rb+") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    _check_torn(line)
                    file.truncate(end)
                    break
                if number > skip:
                    rows.add(row_of(line))
                end += len(line)
    except OSError as error:
        raise DraftwrightError(f"{path} can't be continued ({error.strerror}): choose another output=FILE") from error
    except (ValueError, LookupError, TypeError) as error:
        raise DraftwrightError(
            f"{path} can't be continued, line {number} isn't one that regenerate wrote ({first_line(error)}): choose "
            "another output=FILE"
        ) from error
    return rows


def chat_row(line: bytes) -> int:
    """The row of a chat's line; any other one raises ValueError, LookupError or TypeError."""
    content = json.loads(line)
    if type(content["row"]) is not int or type(content["finished"]) is not bool or not content["messages"]:
        raise ValueError("row, finished or messages has a wrong value")
    return content["row"]


def _dropped_row(line: bytes) -> int:
    return int(json.loads(line)["row"])


def _check_torn(line: bytes) -> None:
    """Raise ValueError unless the line without an end begins like ours."""
    if line[: len(_BEGIN)] != _BEGIN[: len(line)]:
        raise ValueError("it has no end")
