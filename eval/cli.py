"""`python -m eval checkpoint=FOLDER benchmark=mt_bench`: acceptance length and speedup of a draft."""

from __future__ import annotations

import sys
from pathlib import Path

from omegaconf import OmegaConf

from conf import Verb, launch
from eval.run import run
from eval.simulate import run as run_simulate
from eval.toy import run as run_toy
from eval.tune import run as run_tune

VERBS: dict[str, Verb] = {
    "run": ("eval", run),
    "simulate": ("simulate", run_simulate),
    "toy": ("toy", run_toy),
    "tune": ("tune", run_tune),
}


def main() -> None:
    """Start the verb that the command line names."""
    OmegaConf.register_new_resolver("draft_name", draft_name, replace=True)
    launch("eval", VERBS, sys.argv)


def draft_name(checkpoint: str | None) -> str:
    """What to call the draft in a folder: its name; for VARIANT/DATE/draft, as training writes it, VARIANT_DATE."""
    if not checkpoint:
        return "none"
    folder = Path(checkpoint).expanduser().resolve()
    return "_".join(folder.parts[-3:-1]) if folder.name == "draft" else folder.name
