"""A search for the values with the best objective, on Optuna's ask and tell; it continues where it was stopped.

    module.lr=interval(0.001,0.1)              a number in between; tag(log,interval(…)) on a logarithmic scale
    tree.depth=int(interval(1,8))              a whole number
    module.loss=kl,lk   or  choice(kl,lk)      one of them
    module.decay=0.8                           fixed

Trial n is the job in FOLDER/n; the study is in FOLDER/optuna.db, which one process at a time may work on.
hydra-optuna-sweeper 1.3 isn't used: it wants Optuna 2, whose storage fails with SQLAlchemy 2, and the same command
run again starts at job 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, Quote, QuotedString
from hydra.plugins.launcher import Launcher
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from spec_decode.errors import DraftwrightError
from train.resume import LAST

Trial = tuple[int, dict[str, Any]]  # number, values


class Search:
    """Trials in `folder` of what `words`, Hydra overrides, fix and leave open; of two for one key the later counts."""

    def __init__(self, folder: Path, words: Sequence[str], seed: int) -> None:
        overrides = {word.get_key_element(): word for word in OverridesParser.create().parse_overrides(list(words))}
        self.folder = folder
        self.space = {key: distribution(word) for key, word in overrides.items() if word.is_sweep_override()}
        self.fixed = [f"{k}={w.get_value_element_as_str()}" for k, w in overrides.items() if k not in self.space]
        self.study = open_study(folder, sorted(str(word.input_line) for word in overrides.values()))
        # A seed alone would draw the first trials again after an interruption.
        self.study.sampler = optuna.samplers.TPESampler(seed=seed + len(self.study.trials))

    def run(self, launcher: Launcher, *, n_trials: int, n_jobs: int) -> None:
        """Run what `n_trials` trials in all still lack, n_jobs at once, beginning with those that were interrupted."""
        waiting = [(trial.number, trial.params) for trial in in_state(self.study, TrialState.RUNNING)]
        while waiting or len(self.study.trials) < n_trials:
            while len(waiting) < n_jobs and len(self.study.trials) < n_trials:
                trial = self.study.ask(self.space)
                waiting.append((trial.number, trial.params))
            batch, waiting = waiting[:n_jobs], waiting[n_jobs:]
            self.launch(launcher, batch)
            if not in_state(self.study, TrialState.COMPLETE):
                print(f"no run in {self.folder} has worked so far, so the search ends here")
                return

    def launch(self, launcher: Launcher, batch: Sequence[Trial]) -> None:
        """Run trials at once and tell the study what they returned; None is a failed trial."""
        jobs = [self.words(trial) for trial in batch]
        for (number, _), job in zip(batch, launcher.launch(jobs, initial_job_idx=batch[0][0]), strict=True):
            if job.return_value is None:
                self.study.tell(number, state=TrialState.FAIL)
            else:
                self.study.tell(number, job.return_value)

    def words(self, trial: Trial) -> list[str]:
        """The overrides of a trial's job; an interrupted one continues from its checkpoint."""
        number, values = trial
        words = [*self.fixed, *(f"{key}={value}" for key, value in values.items()), f"hydra.sweep.subdir={number}"]
        checkpoint = self.folder / str(number) / LAST
        if checkpoint.exists():
            words.append(f"ckpt_path={QuotedString(str(checkpoint), Quote.single).with_quotes()}")
        return words


def distribution(word: Override) -> BaseDistribution:
    """What Optuna draws a value from: an interval, or the words that a choice lists."""
    value = word.value()
    if not isinstance(value, IntervalSweep):
        return CategoricalDistribution(list(word.sweep_string_iterator()))
    low, high = value.start, value.end
    kind: Any = IntDistribution if isinstance(low, int) else FloatDistribution
    try:
        return kind(low, high, log="log" in value.tags)
    except ValueError as error:
        raise DraftwrightError(f"{word.input_line} is no range to search ({error}): correct its ends") from error


def open_study(folder: Path, words: list[str]) -> optuna.Study:
    """The study in `folder`; a new one where there is none, or none of these words with a trial worth keeping.

    Raises DraftwrightError where other words have led to results.
    """
    folder.mkdir(parents=True, exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = optuna.storages.RDBStorage(f"sqlite:///{folder / 'optuna.db'}")
    study = optuna.create_study(study_name=folder.name, storage=storage, direction="maximize", load_if_exists=True)
    before = study.user_attrs.get("words", words)
    if before != words:
        if in_state(study, TrialState.COMPLETE):
            then, now = (" ".join(sorted(set(one) - set(other))) for one, other in ((before, words), (words, before)))
            raise DraftwrightError(
                f"the search in {folder} was started with {then or 'less'}, now it's {now or 'without'}: repeat the "
                "command that started it, or start another search with hydra.sweep.dir=FOLDER"
            )
        optuna.delete_study(study_name=folder.name, storage=storage)
        return open_study(folder, words)
    study.set_user_attr("words", words)
    return study


def in_state(study: optuna.Study, state: TrialState) -> list[FrozenTrial]:
    return study.get_trials(deepcopy=False, states=(state,))
