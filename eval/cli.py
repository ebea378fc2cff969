"""`python -m eval checkpoint=FOLDER benchmark=mt_bench`: acceptance length and speedup of a draft."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import OmegaConf

from conf import Verb, fail, launch
from eval.compare import run as run_compare
from eval.run import run
from eval.simulate import run as run_simulate
from eval.toy import run as run_toy
from eval.tune import run as run_tune

VERBS: dict[str, Verb] = {
    "run": ("eval", run),
    "compare": ("compare", run_compare),
    "simulate": ("simulate", run_simulate),
    "toy": ("toy", run_toy),
    "tune": ("tune", run_tune),
}


def main() -> None:
    """Start the verb that the command line names."""
    OmegaConf.register_new_resolver("draft_name", draft_name, replace=True)
    launch("eval", VERBS, with_folders(sys.argv))


def with_folders(argv: list[str]) -> list[str]:
    """The command line with the folders that `compare` takes as words gathered in one override, folders=[…].

    A word is a folder where a file or folder has that name, and where it doesn't look like key=value. From the first
    option on (--cfg job) words are Hydra's.
    """
    if argv[1:2] != ["compare"]:
        return argv
    stop = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
    overrides = [word for word in argv[2:stop] if re.match(r"[+~]*[\w.]+=", word) and not os.path.exists(word)]
    folders = [word for word in argv[2:stop] if word not in overrides]
    if not folders:
        return argv
    if any(word.startswith("folders=") for word in overrides):
        fail("eval", "folders are given both as words and as folders=[…]: give all of them in one way")
    quoted = (QuotedString(word.replace("${", r"\${"), Quote.single).with_quotes() for word in folders)
    return [*argv[:2], f"folders=[{','.join(quoted)}]", *overrides, *argv[stop:]]


def draft_name(checkpoint: str | None) -> str:
    """What to call the draft in a folder: its name; for VARIANT/DATE/draft, as training writes it, VARIANT_DATE."""
    if not checkpoint:
        return "none"
    folder = Path(checkpoint).expanduser().resolve()
    return "_".join(folder.parts[-3:-1]) if folder.name == "draft" else folder.name
