"""compare.html: drafts side by side on one page that needs no other file, no script and no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from eval.html import ACCEPTANCE, TAU, document, figures, table
from eval.plots import acceptance_plot, comparison_plot

COLUMNS = (
    "Accepted % is the share of the drafts at each position that were accepted when all before them were. Parameters "
    "are those that a draft stores, without what it shares with the target. Milliseconds are those of one round: "
    "drafting, and verifying the tree. Training seconds are the time of fitting with its validations; capturing the "
    "target's states to disk beforehand is not in them."
)
PROMPTS = (
    "Benchmarks are compared by name: held_out are conversations that each run kept from its own data, and file is "
    "what path=… named, so their prompts are the same only where data and files were."
)


def page(
    head: Sequence[str], cells: Sequence[Sequence[str]], rows: Sequence[dict[str, Any]], remarks: Sequence[str]
) -> str:
    """The whole page as text. cells: the table's text, row by row; rows: what compare.json holds."""
    drafts = {row["draft"]: row["folder"] for row in rows}
    title = f"{len(drafts)} draft{'' if len(drafts) == 1 else 's'} compared"
    targets = " · ".join(dict.fromkeys(row["conditions"]["target"] for row in rows))
    body = "\n".join(
        [
            f"<h1>{escape(title)}</h1>",
            f'<p class="soft wide">drafting for {escape(targets)}</p>',
            *(f'<p class="wide"><strong>{escape(remark)}</strong></p>' for remark in remarks),
            f'<div class="words">{table(head, cells)}</div>',
            f"<p>{escape(TAU)} {escape(COLUMNS)} {escape(PROMPTS)}</p>",
            *(_benchmark(name, rows) for name in dict.fromkeys(row["benchmark"] for row in rows)),
            "<h2>Where the numbers come from</h2>",
            f'<div class="words">{table(("draft", "folder"), list(drafts.items()))}</div>',
        ]
    )
    return document(title, body)


def _benchmark(name: str, rows: Sequence[dict[str, Any]]) -> str:
    drafts = {row["draft"]: row for row in rows if row["benchmark"] == name}
    plots = figures(
        ("τ and speedup", "over plain decoding; the line is the speedup's 95% interval", comparison_plot(drafts)),
        (*ACCEPTANCE, acceptance_plot(drafts)),
    )
    return f"<h2>{escape(name)}</h2>{plots}"
