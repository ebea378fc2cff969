"""All chats of a source encoded into the cache, and what is in them (`python -m data prepare`)."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

from transformers import PreTrainedTokenizerBase

from conf.check import Between
from data.encoding import Encoder
from data.prepare import encoded_chats
from data.readers import ReadReport
from data.sources import Source
from spec_decode.checkpoint import as_text, write_folder
from spec_decode.target_hf import TargetSource

_BAR = 40  # characters


@dataclass(frozen=True)
class PrepareSettings:
    """The keys of conf/prepare.yaml."""

    target: TargetSource
    dataset: Source
    max_length: Annotated[int, Between(2)]
    cache_dir: Path


def prepare_all(
    tokenizer: PreTrainedTokenizerBase, settings: PrepareSettings, report: ReadReport
) -> tuple[dict[str, Any], Path]:
    """Encode a whole source; returns its summary, and the file beside the encoded chats that holds it.

    Raises DraftwrightError when no chat is usable or the folder can't be written.
    """
    source = settings.dataset
    totals: Counter[str] = Counter()
    lengths: Counter[int] = Counter()
    for chat in encoded_chats(tokenizer, source, report, settings.max_length, settings.cache_dir):
        report.kept += chat.turns > 0
        totals += Counter(
            sequences=1, turns=chat.turns, tokens=len(chat.ids), supervised_tokens=int(chat.loss_mask.sum())
        )
        lengths[max(32, 1 << (len(chat.ids) - 1).bit_length())] += 1
    summary = {
        "source": source.place(),
        "tokenizer": tokenizer.name_or_path,
        "max_length": settings.max_length,
        "rows": report.kept + report.dropped.total(),
        "conversations": report.kept,
        **totals,
        "lengths_up_to": dict(sorted(lengths.items())),
        "dropped": {
            reason: {"rows": count, "first": next(iter(report.places.get(reason, [])), None)}
            for reason, count in report.dropped.most_common()
        },
        "warnings": report.warnings,
    }
    folder = Encoder(tokenizer, settings.max_length, source.split_long).folder(settings.cache_dir)
    name = f"{source.name}-{sha256(repr(asdict(source)).encode()).hexdigest()[:8]}.json"
    write_folder(folder, {name: as_text(json.dumps(summary, indent=2, ensure_ascii=False))})
    return summary, folder / name


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """A summary for printing."""
    share = summary["supervised_tokens"] / summary["tokens"]
    lines = [
        f"{summary['rows']:,} rows, {summary['conversations']:,} conversations kept in {summary['sequences']:,} "
        "sequences",
        f"{summary['turns']:,} turns, {summary['tokens']:,} tokens, {summary['supervised_tokens']:,} ({share:.1%}) "
        "supervised",
        "tokens in a sequence:",
    ]
    most = max(summary["lengths_up_to"].values())
    for length, count in summary["lengths_up_to"].items():
        lines.append(f"  up to {length:>7,}  {count:>9,}  {'█' * round(_BAR * count / most)}")
    for reason, dropped in summary["dropped"].items():
        lines.append(f"dropped: {dropped['rows']:,} × {reason}, first {dropped['first']}")
    return lines + [f"warning: {warning}" for warning in summary["warnings"]]
