"""Reading JSON and JSON-lines files as users really have them: cut off, mixed, misnamed, half broken.

Nothing here loads a whole file: arrays and pretty-printed objects are streamed with ijson, JSON lines are split on
\\n alone (str.splitlines would break rows at a U+2028 inside a string). All of them may be packed with gzip.
"""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import ijson

from spec_decode.errors import DraftwrightError

_FIRST_LINE = 1 << 20  # bytes looked at to tell JSON lines from an array
_BUFFER = 4096  # bytes ijson reads at once; also how exactly a broken place inside a file is known
_PLACES = 5  # places named for each reason
_GZIP = b"\x1f\x8b"
_NOT_UTF8 = "\ufdd0"  # stands where a byte is no UTF-8: a code point that no text may use


def _mark(error: UnicodeError) -> tuple[str, int]:
    """What a decoder makes of bytes that are no UTF-8."""
    return _NOT_UTF8, cast(UnicodeDecodeError, error).end


codecs.register_error("draftwright.mark", _mark)


@dataclass
class ReadReport:
    """What became of the rows: kept and dropped by reason, with the first places, and warnings about the file.

    strict: the source whose first bad row stops everything; empty to drop bad rows and go on.
    """

    strict: str = ""
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

    def bad(self, reason: str, place: str, key: str = "") -> None:
        """Count one row that cannot be used; key: what is wrong in it. Raises DraftwrightError if the source is
        strict."""
        if self.strict:
            at = f"{place}, key '{key}'" if key else place
            raise DraftwrightError(f"{self.strict}, {at}: {reason}; correct or remove it, or use dataset.strict=false")
        self.drop(reason, place)

    def broken(self, warning: str) -> None:
        """Note that a file ends early. Raises DraftwrightError if the source is strict."""
        if self.strict:
            raise DraftwrightError(f"{warning}: correct the file, or use dataset.strict=false")
        self.warnings.append(warning)

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


def read_json(path: str, report: ReadReport) -> Iterator[tuple[dict[str, Any], str]]:
    """(row, place) of a local file, whatever its name says: JSON lines, one array, or pretty-printed objects.

    The place is like `line 3` or `row 3`. A bare list of messages is yielded as {"messages": list}. Broken lines are
    counted in `report`; a broken array yields its whole rows and leaves a warning with the byte where it breaks.
    """
    count = 0
    with _open(Path(path)) as file:
        try:
            start = 3 if file.read(3) == codecs.BOM_UTF8 else 0
            file.seek(start)
            layout = _layout(file)
            file.seek(start)
            for row, place in _lines(file, report) if layout == "lines" else _streamed(file, layout, report):
                count += 1
                if isinstance(row, dict):
                    yield row, place
                elif isinstance(row, list):
                    yield {"messages": row}, place
                else:
                    report.bad("row is not an object", place)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            report.broken(f"{path} is damaged ({error}); its {count} whole rows before that were read")


def _open(path: Path) -> BinaryIO:
    with path.open("rb") as file:
        packed = file.read(2) == _GZIP
    return cast(BinaryIO, gzip.open(path)) if packed else path.open("rb")


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
            report.bad("line is not UTF-8" if isinstance(error, UnicodeDecodeError) else "line is not JSON", place)
            if not line.endswith(b"\n"):
                report.broken(f"{file.name} is cut off at byte {file.tell()}, within line {number}")


class _Marked:
    """The bytes of a file, with _NOT_UTF8 where they are no UTF-8, so that ijson goes on behind them."""

    def __init__(self, file: BinaryIO) -> None:
        self._reader = codecs.getreader("utf-8")(file, "draftwright.mark")
        self.seen = False  # whether there was any

    def read(self, size: int = -1) -> bytes:
        text = self._reader.read(size)
        self.seen = self.seen or _NOT_UTF8 in text
        return text.encode()


def _streamed(file: BinaryIO, prefix: str, report: ReadReport) -> Iterator[tuple[object, str]]:
    count, marked = 0, _Marked(file)
    options = {"use_float": True, "multiple_values": not prefix, "buf_size": _BUFFER}
    try:
        for row in ijson.items(marked, prefix, **options):
            count += 1
            place = f"row {count}"
            if marked.seen and _NOT_UTF8 in json.dumps(row, ensure_ascii=False):
                report.bad("row is not UTF-8", place)
            else:
                yield row, place
    except (ijson.JSONError, UnicodeDecodeError) as error:
        byte = file.tell()
        cut_off = not file.read(1) and "EOF" in str(error)
        where = f"is cut off at byte {byte}" if cut_off else f"is broken within the {_BUFFER} bytes before byte {byte}"
        report.broken(f"{file.name} {where}; its {count} whole rows before that were read")
