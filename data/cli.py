"""`python -m data inspect`: Hydra configs in, plain Python values out."""

from __future__ import annotations

import sys
from itertools import islice
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from conf import launch
from data.inspect import print_chats
from data.prepare import encoded_chats
from data.readers import ReadReport
from data.sources import Source
from spec_decode.errors import DraftwrightError
from spec_decode.target_hf import open_tokenizer


def main() -> None:
    """Entry point of `python -m data`."""
    launch("data", {"inspect": ("data", run_inspect)}, sys.argv)


def run_inspect(config: DictConfig) -> None:
    """Print the first `limit` usable chats of a data set as the target's tokens."""
    if config.limit < 1 or config.max_length < 2:
        raise DraftwrightError(
            f"limit={config.limit} and max_length={config.max_length} leave nothing to print: use limit >= 1 and "
            "max_length >= 2"
        )
    values: Any = OmegaConf.to_container(config.dataset, resolve=True)
    tokenizer, report = open_tokenizer(config.target), ReadReport()
    chats = list(islice(encoded_chats(tokenizer, Source.from_config(values), report, config.max_length), config.limit))
    report.kept = len(chats)
    print_chats(Console(), tokenizer, chats, report)
