"""Chats that are left out though they can be read: copies of earlier ones, and prompts of benchmarks.

Equal chats have the same turns. Nearly equal ones have an estimated Jaccard similarity of 0.8 or more between their
runs of five words (MinHash). A chat holds a benchmark's prompt if one of its user turns shares 13 words in a row with
it (as in GPT-3, arXiv:2005.14165, appendix C); a shorter prompt must be the whole turn. Case and punctuation don't
count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from hashlib import sha256

from rensa import RMinHash, RMinHashDeduplicator

from data.messages import Message
from data.prompts import BENCHMARKS, load_prompts
from data.readers import ReadReport
from spec_decode.errors import DraftwrightError

_RUN = 13
_SHINGLE = 5
_SEED = 42
_WORD = re.compile(r"\w+")


class Copies:
    """Finds copies of chats seen before. kind: `exact`, `near` or `none`."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._digests: set[bytes] = set()
        self._near = RMinHashDeduplicator(0.8, 128, use_lsh=True, num_bands=16, seed=_SEED)

    def found(self, messages: list[Message]) -> str:
        """Why this chat is a copy, or the empty string for a new one, which is remembered."""
        if self._kind == "none":
            return ""
        digest = sha256(repr(messages).encode()).digest()
        if digest in self._digests:
            return "copy of an earlier chat"
        self._digests.add(digest)
        if self._kind == "near":
            words = [word for message in messages for word in _words(message.content)]
            sketch = RMinHash(128, _SEED)
            sketch.update([" ".join(run) for run in _runs(words, _SHINGLE)])
            if not self._near.add(digest.hex(), sketch):
                return "near copy of an earlier chat"
        return ""


class Contamination:
    """Finds prompts of benchmarks. names: keys of BENCHMARKS, or files as `data.prompts` reads them.

    What the hub doesn't give is left out, and `report` says so in one line. Raises DraftwrightError for a file that
    can't be used.
    """

    def __init__(self, names: Iterable[str], report: ReadReport) -> None:
        self._runs: dict[int, str] = {}
        missing: list[str] = []
        for name in names:
            if missing and name in BENCHMARKS:  # the hub was asked once
                missing.append(name)
                continue
            try:
                prompts = load_prompts(name) if name in BENCHMARKS else load_prompts("file", name)
            except DraftwrightError:
                if name not in BENCHMARKS:
                    raise
                missing.append(name)
                continue
            for prompt in prompts:
                if words := _words(prompt[-1].content):
                    self._runs |= dict.fromkeys(map(hash, _runs(words, _RUN)), name)
        if missing:
            report.warnings.append(
                f"chats were not searched for prompts of {', '.join(missing)}, since the hub can't be read: pass files "
                "with prompts as dataset.decontaminate=[FILE.jsonl]"
            )

    def found(self, messages: list[Message]) -> str:
        """Why this chat is left out, or the empty string."""
        for message in messages if self._runs else ():
            if message.role == "user":
                for run in _runs(_words(message.content), _RUN):
                    if (name := self._runs.get(hash(run))) is not None:
                        return f"prompt of the benchmark {name}"
        return ""


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _runs(words: list[str], length: int) -> Iterator[tuple[str, ...]]:
    """All runs of this many words; a shorter text is one run."""
    if len(words) <= length:
        yield tuple(words)
    else:
        yield from zip(*(words[start:] for start in range(length)), strict=False)
