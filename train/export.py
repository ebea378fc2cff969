"""The finished draft's README: what it was trained on, how good it is, how to use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """What the README of a draft reports. covered: share of supervised tokens that the draft vocabulary holds;
    metrics: measured on held-out conversations."""

    variant: str
    target: str
    dataset: str
    documents: int
    tokens: int
    supervised_tokens: int
    steps: int
    covered: float
    command: str
    git_commit: str | None
    metrics: Mapping[str, float]

    def text(self) -> str:
        """The README in Markdown."""
        rows = "\n".join(f"| {name} | {value:.4g} |" for name, value in sorted(self.metrics.items()))
        return f"""# {self.variant} draft for {self.target}

A draft model for speculative decoding, trained with Draftwright. It proposes tokens for `{self.target}` and no other
target.

## Trained on

- data: {self.dataset}, {self.documents:,} conversations, {self.tokens:,} tokens, {self.supervised_tokens:,} supervised
- optimiser steps: {self.steps:,}
- the draft vocabulary holds {self.covered:.2%} of the supervised tokens
- command: `{self.command}`
- Draftwright commit: {self.git_commit or "unknown (not run from a git checkout)"}

## On held-out conversations

| metric | value |
|---|---|
{rows}

## Use

    python -m eval checkpoint=FOLDER benchmark=mt_bench
"""
