"""Hydra sweeper for `+sweep=optuna`: Hydra takes sweepers from the package `hydra_plugins` alone.

Every Hydra program in the environment imports this file, so what takes long to import comes late.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from spec_decode.errors import DraftwrightError


class OptunaSweeper(Sweeper):
    """Searches for the values with the best val/tau (train/search.py).

    n_trials: in all, earlier and failed ones included; n_jobs: launched at once; params: key to value or range, which
    the command line overrides.
    """

    def __init__(self, n_trials: int, n_jobs: int, seed: int, params: Mapping[str, Any]) -> None:
        self.n_trials, self.n_jobs, self.seed, self.params = n_trials, n_jobs, seed, params

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        if not config.heldout_tokens:
            raise DraftwrightError("heldout_tokens=0 leaves nothing to measure val/tau on: raise it for a search")
        self.folder = Path(config.hydra.sweep.dir)
        self.jobs = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        try:
            from train.search import Search
        except ModuleNotFoundError as error:
            if error.name != "optuna":
                raise
            raise DraftwrightError("+sweep=optuna needs Optuna: run `pip install optuna` first") from error
        words = [*(f"{key}={value}" for key, value in self.params.items()), *arguments]
        Search(self.folder, words, self.seed).run(self.jobs, n_trials=self.n_trials, n_jobs=self.n_jobs)
