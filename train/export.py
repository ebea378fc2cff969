"""The finished draft's README: what it was trained on, how good it is, how to use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from spec_decode.checkpoint import write_folder


@dataclass(frozen=True)
class Card:
    """What the README of a draft reports. choose_target: the words that choose the target on the command line;
    source: where the data came from; covered: share of supervised tokens that the draft vocabulary holds;
    metrics: measured on held-out conversations, empty while they aren't; tuned: whether the target was trained, too."""

    variant: str
    target: str
    choose_target: str
    dataset: str
    source: str
    conversations: int
    tokens: int
    supervised_tokens: int
    steps: int
    covered: float
    command: str
    git_commit: str | None
    metrics: Mapping[str, float]
    tuned: bool = False

    def text(self) -> str:
        """The README in Markdown."""
        rows = [f"| {name} | {value:.4g} |" for name, value in sorted(self.metrics.items())]
        proposes_for = f"`{self.target}` and no other\ntarget"
        if self.tuned:
            proposes_for = (
                f"a version of `{self.target}` that was\ntuned together with it. **The output is that of the tuned "
                f"target, not that of\n`{self.target}`**: serve what `{self.choose_target}` names"
            )
        table = "\n".join(["| metric | value |", "|---|---|", *rows]) if rows else "Not measured."
        return f"""# {self.variant} draft for {self.target}

A draft model for speculative decoding, trained with Draftwright. It proposes tokens for {proposes_for}.

## Trained on

- data: {self.dataset} ({self.source})
- {self.conversations:,} conversations, {self.tokens:,} tokens, {self.supervised_tokens:,} of them supervised
- optimiser steps: {self.steps:,}
- the draft vocabulary holds {self.covered:.2%} of the supervised tokens
- command: `{self.command}`
- Draftwright commit: {self.git_commit or "unknown (not run from a git checkout)"}

## On held-out conversations

{table}

## Use

    python -m eval checkpoint=FOLDER {self.choose_target} benchmark=mt_bench

FOLDER is the folder of this file.
"""


def write_readme(folder: Path, card: Card) -> None:
    """Replace the README of a draft folder, atomically."""
    write_folder(folder, {"README.md": lambda path: path.write_text(card.text(), encoding="utf-8")})
