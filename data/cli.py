"""`python -m data inspect | regenerate`: Hydra configs in, plain Python values out."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import islice
from typing import Annotated

from omegaconf import DictConfig
from rich.console import Console

from conf import launch, plain
from conf.check import Between, Positive, build
from data.inspect import print_chats
from data.prepare import encoded_chats
from data.readers import ReadReport
from data.regenerate import RegenerateSettings, regenerate
from data.sources import Source
from spec_decode.target_hf import TargetSource, open_target, open_tokenizer


@dataclass(frozen=True)
class InspectSettings:
    """The keys of conf/data.yaml."""

    target: TargetSource
    dataset: Source
    max_length: Annotated[int, Between(2)]
    limit: Positive


def main() -> None:
    """Entry point of `python -m data`."""
    launch("data", {"inspect": ("data", run_inspect), "regenerate": ("regenerate", run_regenerate)}, sys.argv)


def run_inspect(config: DictConfig) -> None:
    """Print the first `limit` usable chats of a data set as the target's tokens."""
    settings = build(InspectSettings, plain(config))
    tokenizer, report = open_tokenizer(settings.target), ReadReport()
    chats = encoded_chats(tokenizer, settings.dataset, report, settings.max_length)
    shown = list(islice(chats, settings.limit))
    report.kept = len(shown)
    print_chats(Console(), tokenizer, shown, report)


def run_regenerate(config: DictConfig) -> None:
    """Let the target answer the chats of a data set."""
    settings, report = build(RegenerateSettings, plain(config)), ReadReport()
    target, tokenizer = open_target(settings.target)
    tokens = regenerate(target, tokenizer, settings, report)
    for line in report.lines():
        print(line)
    print(f"{tokens:,} tokens written to {settings.output}")
