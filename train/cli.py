"""`python -m train +variant=NAME`: train a draft."""

from __future__ import annotations

import errno
import os
import re
import sys
from typing import Any

from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from conf import fail, launch
from spec_decode.errors import DraftwrightError

_NOT_WRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EEXIST}


def main() -> None:
    """Start the verb that the command line names; every user's mistake is one sentence and a non-zero exit."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra then raises instead of printing several lines
    try:
        launch("train", {"fit": ("train", fit)}, sys.argv)
    except (HydraException, OmegaConfBaseException, OSError) as error:
        fail("train", one_sentence(error))


def fit(cfg: DictConfig) -> Any:
    """Check the choice of variant, train, and turn a stop by signal into the shell's exit status."""
    check_choices(cfg)
    from train.callbacks import TrainingStopped  # Lightning takes seconds to import; a typo shouldn't wait for it
    from train.run import train

    if HydraConfig.get().mode == RunMode.MULTIRUN:
        cfg.output_dir = HydraConfig.get().runtime.output_dir  # one folder for each job
    try:
        return train(cfg)
    except TrainingStopped as stop:
        words = [word for word in HydraConfig.get().overrides.task if not word.startswith("ckpt_path=")]
        command = " ".join(["python -m train", *words, f"ckpt_path={stop.checkpoint}"])
        print(f"train: {stop}; continue with: {command}", file=sys.stderr)
        sys.exit(stop.status)
    except KeyboardInterrupt:
        print("train: interrupted outside training; complete cache files are reused by the next run", file=sys.stderr)
        sys.exit(130)


def check_choices(cfg: DictConfig) -> None:
    """Raise DraftwrightError unless exactly one variant was appended, and nothing else but experiments."""
    for word in HydraConfig.get().overrides.task:
        if (match := re.match(r"\+{1,2}([^=@]+)", word)) and match[1] not in ("variant", "experiment"):
            raise DraftwrightError(f"'{word}' adds a key that nothing reads: override existing keys, without +")
    if "variant" not in cfg:
        raise DraftwrightError(no_variant())
    if not isinstance(HydraConfig.get().runtime.choices.get("variant"), str):
        raise DraftwrightError(f"several variants were given at once; {no_variant()}")


def no_variant() -> str:
    """The sentence that lists the variants."""
    return f"choose a variant with +variant=NAME, where NAME is one of: {', '.join(_options('variant'))}"


def one_sentence(error: Exception) -> str:
    """What a person should read instead of a Hydra or operating-system error; re-raises what isn't a user's mistake."""
    text = " ".join((str(error) or str(error.__cause__)).split())
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, option = (error.missing_cfg_file or "").partition("/")
        return f"there is no {group} '{option}'; choose from: {', '.join(error.options)}"
    if isinstance(error, OSError) and not isinstance(error, HydraException):
        if error.errno not in _NOT_WRITABLE:
            raise error
        place = error.filename or "the disk"
        return f"could not write to {place} ({error.strerror}): free space or choose another output_dir=FOLDER"
    if "variant.name" in text or "'variant'" in text:
        return no_variant()
    if match := re.search(r"Could not override '([^']+)'", text):
        return f"there is no config key '{match[1]}'; python -m train +variant=NAME --cfg job shows all keys"
    return text


def _options(group: str) -> list[str]:
    """Names in a config group; Hydra has already shut down when composing failed."""
    if GlobalHydra.instance().is_initialized():
        return list(GlobalHydra.instance().config_loader().get_group_options(group))
    with initialize_config_module("conf", version_base="1.3"):
        return list(GlobalHydra.instance().config_loader().get_group_options(group))
