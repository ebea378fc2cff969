"""Hydra configs of all entry points, and the one way to start them: `python -m PACKAGE [verb] [overrides]`."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import hydra
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from spec_decode.errors import DraftwrightError

Verb = tuple[str, Callable[[DictConfig], Any]]  # config name in conf/, function that runs it

_NOT_WRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EEXIST}


def launch(package: str, verbs: dict[str, Verb], argv: list[str]) -> None:
    """Run the verb that argv names (the first of `verbs` when it names none) with its Hydra config.

    A user's mistake is printed as one sentence and ends the program with status 2.
    """
    first = argv[1] if len(argv) > 1 else ""
    named = first in verbs
    if first and not named and "=" not in first and first[0] not in "-+~":
        fail(package, f"there is no verb '{first}'; choose from: {', '.join(verbs)}")
    config_name, run = verbs[first if named else next(iter(verbs))]
    sys.argv = [f"python -m {package}{f' {first}' if named else ''}", *(argv[2:] if named else argv[1:])]
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra then raises instead of printing several lines
    try:
        hydra.main(version_base="1.3", config_path="pkg://conf", config_name=config_name)(run)()
    except DraftwrightError as error:
        fail(package, error)
    except (HydraException, OmegaConfBaseException, OSError) as error:
        fail(package, one_sentence(package, error))


def fail(package: str, message: object) -> NoReturn:
    """Print one sentence on stderr and exit with status 2."""
    print(f"{package}: {message}", file=sys.stderr)
    sys.exit(2)


def options(group: str) -> list[str]:
    """The choices of a config group; Hydra has already shut down when composing failed."""
    if GlobalHydra.instance().is_initialized():
        return list(GlobalHydra.instance().config_loader().get_group_options(group))
    with initialize_config_module("conf", version_base="1.3"):
        return list(GlobalHydra.instance().config_loader().get_group_options(group))


def one_sentence(package: str, error: Exception) -> str:
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
    if isinstance(error, MissingMandatoryValue):
        return f"the config key '{error.full_key}' has no value: pass {error.full_key}=…"
    if "variant.name" in text or "'variant'" in text:
        return no_variant()
    if match := re.search(r"Could not override '([^']+)'", text):
        return f"there is no config key '{match[1]}'; python -m {package} --cfg job shows all keys"
    return text


def no_variant() -> str:
    """The sentence that lists the variants."""
    return f"choose a variant with +variant=NAME, where NAME is one of: {', '.join(options('variant'))}"
