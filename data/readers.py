"""Reading JSON and JSON-lines files as users really have them: cut off, mixed, misnamed, half broken.

Nothing here loads a whole file: arrays and pretty-printed objects are streamed with ijson, JSON lines are split on
\\n alone (str.splitlines would break rows at a U+2028 inside a string).
"""

from __future__ import annotations

import codecs
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import ijson

_FIRST_LINE = 1 << 20  # bytes looked at to tell JSON lines from an array
_BUFFER = 4096  # bytes ijson reads at once; also how exactly a broken place inside a file is known
_PLACES = 5  # places named for each reason


@dataclass
class ReadReport:
    """What became of the rows: kept and dropped by reason, with the first places, and warnings about the file."""

    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def drop(self, reason: str, place: str = "") -> None:
        """Count one dropped row."""
        self.dropped[reason] += 1
        places = self.places.setdefault(reason, [])
        if place and len(places) < _PLACES:
            places.append(place)

    def reasons(self) -> str:
        """The dropped rows on one line: `12 × no answered user turn, 1 × broken JSON (line 3)`."""
        parts = []
        for reason, count in sorted(self.dropped.items(), key=lambda item: (-item[1], item[0])):
            places = self.places.get(reason, [])
            more = ", …" if places and count > len(places) else ""
            parts.append(f"{count} × {reason}" + (f" ({', '.join(places)}{more})" if places else ""))
        return ", ".join(parts)

    def lines(self) -> list[str]:
        """The report for printing, one fact a line."""
        dropped = f": {self.reasons()}" if self.dropped else ""
        return [
            f"{self.kept} conversations kept, {self.dropped.total()} rows dropped{dropped}",
            *(f"warning: {warning}" for warning in self.warnings),
        ]


def read_json(path: str, report: ReadReport) -> Iterator[dict[str, Any]]:
    """Rows of a local file, whatever its name says: JSON lines, one array, or pretty-printed objects.

    A bare list of messages is yielded as {"messages": list}. Broken lines are counted in `report` with their
    numbers; a broken array yields its whole rows and leaves a warning with the byte where it breaks.
    """
    with Path(path).open("rb") as file:
        start = 3 if file.read(3) == codecs.BOM_UTF8 else 0
        file.seek(start)
        layout = _layout(file)
        file.seek(start)
        rows = _lines(file, report) if layout == "lines" else _streamed(file, layout, report)
        for row, place in rows:
            if isinstance(row, dict):
                yield row
            elif isinstance(row, list):
                yield {"messages": row}
            else:
                report.drop("row is not an object", place)


def _layout(file: BinaryIO) -> str:
    """`lines`, or the ijson prefix of the rows: `item` for one array, the empty string for whole objects."""
    first = file.readline(_FIRST_LINE)
    while first.isspace():
        first = file.readline(_FIRST_LINE)
    second = file.readline(_FIRST_LINE)
    if first.lstrip().startswith(b"["):
        return "lines" if second.strip() and _is_json(first) else "item"
    # Inside an object, a line starts with space or with a quoted key; a JSON line starts with a brace.
    inside_object = first.endswith(b"\n") and second[:1] in (b" ", b"\t", b'"')
    if first.lstrip().startswith(b"{") and inside_object and not _is_json(first):
        return ""
    return "lines"


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _lines(file: BinaryIO, report: ReadReport) -> Iterator[tuple[object, str]]:
    for number, line in enumerate(file, 1):  # a binary file splits on \n alone
        place = f"line {number}"
        if not line.strip():
            continue
        try:
            yield json.loads(line.decode("utf-8")), place
        except (ValueError, RecursionError) as error:
            report.drop("line is not UTF-8" if isinstance(error, UnicodeDecodeError) else "line is not JSON", place)
            if not line.endswith(b"\n"):
                report.warnings.append(f"{file.name} is cut off at byte {file.tell()}, within line {number}")


def _streamed(file: BinaryIO, prefix: str, report: ReadReport) -> Iterator[tuple[object, str]]:
    count = 0
    try:
        for row in ijson.items(file, prefix, use_float=True, multiple_values=not prefix, buf_size=_BUFFER):
            count += 1
            yield row, f"row {count}"
    except (ijson.JSONError, UnicodeDecodeError) as error:
        byte = file.tell()
        cut_off = not file.read(1) and "EOF" in str(error)
        where = f"is cut off at byte {byte}" if cut_off else f"is broken within the {_BUFFER} bytes before byte {byte}"
        report.warnings.append(f"{file.name} {where}; its {count} whole rows before that were read")
