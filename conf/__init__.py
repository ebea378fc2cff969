"""Hydra configs of all entry points, and the one way to start them: `python -m PACKAGE [verb] [overrides]`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import hydra
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from spec_decode.errors import DraftwrightError

Verb = tuple[str, Callable[[DictConfig], Any]]  # config name in conf/, function that runs it


def launch(package: str, verbs: dict[str, Verb], argv: list[str]) -> None:
    """Run the verb that argv names (the first of `verbs` when it names none) with its Hydra config.

    A DraftwrightError is printed as one sentence and ends the program with status 2.
    """
    first = argv[1] if len(argv) > 1 else ""
    named = first in verbs
    if first and not named and "=" not in first and first[0] not in "-+~":
        sys.exit(f"{package}: there is no verb '{first}'; choose from: {', '.join(verbs)}")
    config_name, run = verbs[first if named else next(iter(verbs))]
    overrides = argv[2:] if named else argv[1:]

    def task(config: DictConfig) -> Any:
        try:
            return run(config)
        except DraftwrightError as error:
            fail(package, error)
        except OmegaConfBaseException as error:
            fail(package, str(error).splitlines()[0])

    sys.argv = [f"python -m {package}{f' {first}' if named else ''}", *overrides]
    hydra.main(version_base="1.3", config_path="pkg://conf", config_name=config_name)(task)()


def fail(package: str, message: object) -> None:
    """Print one sentence on stderr and exit with status 2."""
    print(f"{package}: {message}", file=sys.stderr)
    sys.exit(2)
