"""`python -m train +variant=NAME`: train a draft."""

from __future__ import annotations

import shlex
import sys
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from conf import launch, no_variant
from spec_decode.errors import DraftwrightError


def main() -> None:
    """Start the verb that the command line names."""
    launch("train", {"fit": ("train", fit)}, sys.argv)


def fit(cfg: DictConfig) -> Any:
    """Check the choice of variant, train, and turn a stop by signal into the shell's exit status."""
    check_variant(cfg)
    from train.callbacks import TrainingStopped  # Lightning takes seconds to import; a typo shouldn't wait for it
    from train.run import train

    if HydraConfig.get().mode == RunMode.MULTIRUN:
        cfg.output_dir = HydraConfig.get().runtime.output_dir  # one folder for each job
    try:
        return train(cfg)
    except TrainingStopped as stop:
        words = [word for word in HydraConfig.get().overrides.task if not word.startswith("ckpt_path=")]
        command = f"python -m train {shlex.join([*words, f'ckpt_path={stop.checkpoint}'])}"
        print(f"train: {stop}; continue with: {command}", file=sys.stderr)
        sys.exit(stop.status)


def check_variant(cfg: DictConfig) -> None:
    """Raise DraftwrightError unless exactly one variant was appended."""
    if "variant" not in cfg:
        raise DraftwrightError(no_variant())
    if not isinstance(HydraConfig.get().runtime.choices.get("variant"), str):
        raise DraftwrightError(f"several variants were given at once; {no_variant()}")
