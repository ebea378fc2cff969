"""Evaluation prompts: the first turns of benchmarks, from the hub, a copy of it, or a local JSON-lines file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from data.messages import Message, UnusableRow, parse_prompt
from data.sources import check_file, load_from_hub
from spec_decode.errors import DraftwrightError


@dataclass(frozen=True)
class Benchmark:
    """Where a benchmark lies on the hub and which field holds the prompt; `before` is put in front of it."""

    hub: str
    config: str | None
    split: str
    field: str
    before: str = ""


BENCHMARKS = {
    "mt_bench": Benchmark("HuggingFaceH4/mt_bench_prompts", None, "train", "prompt"),
    "humaneval": Benchmark("openai/openai_humaneval", None, "test", "prompt", "Complete this Python function.\n\n"),
    "gsm8k": Benchmark("openai/gsm8k", "main", "test", "question"),
    "math500": Benchmark("HuggingFaceH4/MATH-500", None, "test", "problem"),
    "mbpp": Benchmark("google-research-datasets/mbpp", "sanitized", "test", "prompt"),
}
_FIELDS = ("turns", "messages", "prompt")


def load_prompts(benchmark: str, path: str | None = None, limit: int | None = None) -> list[list[Message]]:
    """First turns of a benchmark (a key of BENCHMARKS, or `file`), at most `limit`.

    path: a local file, or a folder with a copy of the hub's data set; it wins over the hub. Raises DraftwrightError
    for an unknown benchmark, a file or row that cannot be used, and an unreachable hub.
    """
    if benchmark not in BENCHMARKS and benchmark != "file":
        raise DraftwrightError(f"there is no benchmark '{benchmark}': choose from {', '.join(BENCHMARKS)}, or file")
    if limit is not None and limit < 1:
        raise DraftwrightError(f"limit={limit} leaves no prompt: use 1 or more, or null for all")
    if path is not None and benchmark in BENCHMARKS and Path(path).expanduser().is_dir():
        prompts = _from_hub(BENCHMARKS[benchmark], path)
    elif path is not None:
        prompts = _from_file(check_file(Path(path).expanduser(), "path"))
    elif benchmark == "file":
        raise DraftwrightError("benchmark=file needs a file: pass path=FILE.jsonl")
    else:
        prompts = _from_hub(BENCHMARKS[benchmark], BENCHMARKS[benchmark].hub)
    found = list(islice(prompts, limit))
    if not found:
        raise DraftwrightError(f"there is no prompt in {path or benchmark}: it needs rows with {', '.join(_FIELDS)}")
    return found


def _from_file(path: Path) -> Iterator[list[Message]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield _prompt(json.loads(line.decode("utf-8")))
                except (ValueError, RecursionError) as error:
                    raise DraftwrightError(f"{path}, row {number}: is not JSON, correct or remove it") from error
                except UnusableRow as error:
                    raise DraftwrightError(f"{path}, row {number}: {error}, correct or remove it") from error


def _from_hub(benchmark: Benchmark, place: str) -> Iterator[list[Message]]:
    for row in load_from_hub(place, benchmark.config, benchmark.split, "path=FOLDER, or a file as path=FILE.jsonl"):
        if not isinstance(row, dict) or not row.get(benchmark.field):
            raise DraftwrightError(f"{place} holds a row without the field '{benchmark.field}': choose another path=…")
        value = row[benchmark.field]
        yield [Message("user", benchmark.before + (value[0] if isinstance(value, list) else value))]


def _prompt(row: object) -> list[Message]:
    """The first turn(s) of one row: `turns` (the first string), `messages`, or `prompt` (text or messages)."""
    values = [row[field] for field in _FIELDS if row.get(field)] if isinstance(row, dict) else []
    if not values:
        raise UnusableRow(f"has none of the fields {', '.join(_FIELDS)}")
    value = values[0]
    first = value[0] if isinstance(value, list) else value
    return parse_prompt(value if isinstance(first, dict) else [{"role": "user", "content": first}])
