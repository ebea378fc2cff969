"""`python -m train +variant=NAME`: train a draft; `export` and `import`: to and from the files of servers."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from conf import Verb, launch, no_variant
from spec_decode.errors import DraftwrightError
from train.sweep import recorded


def main() -> None:
    """Start the verb that the command line names."""
    verbs: dict[str, Verb] = {"fit": ("train", fit), "export": ("export", export), "import": ("import", import_)}
    launch("train", verbs, sys.argv)


def fit(cfg: DictConfig) -> float | None:
    """Train, alone or as one run of a sweep. Returns val/tau, which a sweep maximises; None if it wasn't measured."""
    hydra = HydraConfig.get()
    words = [word for word in hydra.overrides.task if not word.startswith("ckpt_path=")]
    if hydra.mode == RunMode.RUN:
        cfg.output_dir = hydra.run.dir  # Lightning's launcher hands the first process's folder to the others
        return _fit(cfg, words)
    cfg.output_dir = hydra.runtime.output_dir  # one folder for each run
    if "group" in cfg.logger:
        cfg.logger.group = Path(hydra.sweep.dir).name
    with recorded(Path(cfg.output_dir), words):
        return _fit(cfg, words)
    return None  # it failed


def export(cfg: DictConfig) -> None:
    """Write a draft in a server's format."""
    from train.publish import run_export  # transformers takes seconds to import; a typo shouldn't wait for it

    run_export(cfg)


def import_(cfg: DictConfig) -> None:
    """Read a published draft."""
    from train.importing import run_import  # as above

    run_import(cfg)


def _fit(cfg: DictConfig, words: list[str]) -> float | None:
    """Check the choice of variant, train, and turn a stop by signal into the shell's exit status."""
    check_variant(cfg)
    from train.callbacks import TrainingStopped  # Lightning takes seconds to import; a typo shouldn't wait for it
    from train.run import train

    try:
        return train(cfg)["metrics"].get("val/tau")
    except TrainingStopped as stop:
        if HydraConfig.get().mode == RunMode.RUN:
            advice = f"continue with: python -m train {shlex.join([*words, f'ckpt_path={stop.checkpoint}'])}"
        else:
            advice = "the same command continues a search with +sweep=optuna"
        print(f"train: {stop}; {advice}", file=sys.stderr)
        sys.exit(stop.status)


def check_variant(cfg: DictConfig) -> None:
    """Raise DraftwrightError unless exactly one variant was appended."""
    if "variant" not in cfg:
        raise DraftwrightError(no_variant())
    if not isinstance(HydraConfig.get().runtime.choices.get("variant"), str):
        raise DraftwrightError(f"several variants were given at once; {no_variant()}")
