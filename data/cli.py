"""`python -m data inspect | prepare | regenerate`: Hydra configs in, plain Python values out."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import islice
from typing import Annotated

from omegaconf import DictConfig
from rich.console import Console

from conf import Verb, launch, plain
from conf.check import Between, Positive, build
from data.inspect import print_chats
from data.prepare import encoded_chats
from data.readers import ReadReport
from data.regenerate import RegenerateSettings, open_answerer, regenerate
from data.sources import Source
from data.summary import PrepareSettings, prepare_all, summary_lines
from spec_decode.target_hf import TargetSource, open_tokenizer


@dataclass(frozen=True)
class InspectSettings:
    """The keys of conf/data.yaml."""

    target: TargetSource
    dataset: Source
    max_length: Annotated[int, Between(2)]
    limit: Positive


def main() -> None:
    """Entry point of `python -m data`."""
    verbs: dict[str, Verb] = {
        "inspect": ("data", run_inspect),
        "prepare": ("prepare", run_prepare),
        "regenerate": ("regenerate", run_regenerate),
    }
    launch("data", verbs, sys.argv)


def run_inspect(config: DictConfig) -> None:
    """Print the first `limit` usable chats of a data set as the target's tokens."""
    settings = build(InspectSettings, plain(config))
    tokenizer, report = open_tokenizer(settings.target), ReadReport()
    chats = encoded_chats(tokenizer, settings.dataset, report, settings.max_length)
    shown = list(islice(chats, settings.limit))
    report.kept = len(shown)
    print_chats(Console(), tokenizer, shown, report)


def run_prepare(config: DictConfig) -> None:
    """Encode all chats of a data set and print what is in them."""
    settings = build(PrepareSettings, plain(config))
    summary, file = prepare_all(open_tokenizer(settings.target), settings, ReadReport())
    for line in summary_lines(summary):
        print(line)
    print(f"written to {file}")


def run_regenerate(config: DictConfig) -> None:
    """Let the target answer the chats of a data set, here or on a server."""
    settings, report = build(RegenerateSettings, plain(config)), ReadReport()
    tokens = regenerate(*open_answerer(settings), settings, report)
    for line in report.lines():
        print(line)
    print(f"{tokens:,} tokens written to {settings.output}")
