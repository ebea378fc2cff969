"""Hydra configs of all entry points, and the one way to start them: `python -m PACKAGE [verb] [overrides]`."""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import hydra
import psutil
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from conf.check import build
from spec_decode.errors import DraftwrightError
from spec_decode.tree_file import read_tree

Verb = tuple[str, Callable[[DictConfig], Any]]  # config name in conf/, function that runs it

# What a person did wrong; anything else is a defect and shows its stack trace.
MISTAKES = (DraftwrightError, HydraException, OmegaConfBaseException, OSError)
_NOT_WRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EEXIST}
_PLUGINS = {
    "hydra/launcher/joblib": "hydra-joblib-launcher",
    "hydra/launcher/submitit_slurm": "hydra-submitit-launcher",
}


def if_bfloat16(then: str, otherwise: str) -> str:
    """`then` on a machine that multiplies in bfloat16. In YAML: ${if_bfloat16:bfloat16,float32}."""
    from spec_decode.hardware import multiplies_bfloat16  # torch takes seconds, and most configs don't ask

    return then if multiplies_bfloat16() else otherwise


def started(pattern: str) -> str:
    """The time; under torchrun or srun that of the parent's start, so that the processes of one machine share a folder
    (conf/trainer/multinode.yaml is for several machines). In YAML: ${started:%Y}."""
    together = "TORCHELASTIC_RUN_ID" in os.environ or int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1
    if not together:
        return datetime.now().strftime(pattern)
    return datetime.fromtimestamp(psutil.Process(os.getppid()).create_time()).strftime(pattern)


OmegaConf.register_new_resolver("if_bfloat16", if_bfloat16, replace=True)
OmegaConf.register_new_resolver("started", started, replace=True, use_cache=True)  # equal wherever a config asks


def launch(package: str, verbs: dict[str, Verb], argv: list[str]) -> None:
    """Run the verb that argv names (the first of `verbs` when it names none) with its Hydra config.

    A user's mistake is printed as one sentence and ends the program with status 2, Ctrl-C with 130.
    """
    first = argv[1] if len(argv) > 1 else ""
    named = first in verbs
    if first and not named and "=" not in first and first[0] not in "-+~":
        fail(package, f"there is no verb '{first}'; choose from: {', '.join(verbs)}")
    config_name, run = verbs[first if named else next(iter(verbs))]
    try:
        words = [word for given in (argv[2:] if named else argv[1:]) for word in expand_tree(expand_home(given))]
        refuse_additions(words)
    except DraftwrightError as error:
        fail(package, str(error))
    sys.argv = [f"python -m {package}{f' {first}' if named else ''}", *words]
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra then raises instead of printing several lines

    mistakes: list[Exception] = []

    @functools.wraps(run)
    def job(cfg: DictConfig) -> Any:
        try:
            return run(cfg)
        except MISTAKES as error:  # kept from Hydra, which would print lines of its own; a sweep goes on
            mistakes.append(error)

    try:
        hydra.main(version_base="1.3", config_path="pkg://conf", config_name=config_name)(job)()
    except KeyboardInterrupt:
        print(f"{package}: interrupted; finished files are kept, and the next run uses them", file=sys.stderr)
        sys.exit(130)
    except MISTAKES as error:
        mistakes.append(error)
    if mistakes:
        fail(package, *(one_sentence(package, error) for error in mistakes))


def fail(package: str, *messages: str) -> NoReturn:
    """Print sentences on stderr and exit with status 2."""
    for message in messages:
        print(f"{package}: {message}", file=sys.stderr)
    sys.exit(2)


def expand_home(word: str) -> str:
    """An override whose value starts with ~, as the shell expands it elsewhere (Hydra can't even parse it)."""
    key, equals, value = word.partition("=")
    return f"{key}={os.path.expanduser(value)}" if equals and value.startswith("~") else word


def expand_tree(word: str) -> list[str]:
    """tree=FILE.json as the choice of a sparse tree with the paths that the file holds."""
    key, _, value = word.partition("=")
    if key != "tree" or not value.endswith(".json"):
        return [word]
    tree = read_tree(Path(value))
    return [
        "tree=sparse",
        f"tree.paths={json.dumps(tree.paths, separators=(',', ':'))}",
        f"tree.siblings={tree.siblings}",
    ]


def refuse_additions(overrides: Iterable[str]) -> None:
    """Raise DraftwrightError for +key=… that adds no choice of a group and no key to a section.

    What is added to a section is judged by what reads the section: +trainer.strategy=ddp is Lightning's business.
    """
    for word in overrides:
        if (match := re.match(r"\+([^+=@.]+)=", word)) and not options(match[1]):
            raise DraftwrightError(f"'{word}' adds a key that nothing reads: override existing keys, without +")


def plain(cfg: DictConfig) -> dict[str, Any]:
    """The composed config as plain values; raises OmegaConf's MissingMandatoryValue for a key without a value."""
    return OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)  # type: ignore[return-value]


def build_section(section: dict[str, Any], name: str) -> Any:
    """The dataclass that a section names as its `_target_`; raises DraftwrightError that names a wrong key."""
    values = dict(section)
    return build(get_class(values.pop("_target_")), values, name)


def options(group: str) -> list[str]:
    """The choices of a config group; Hydra has already shut down when composing failed."""
    if GlobalHydra.instance().is_initialized():
        return list(GlobalHydra.instance().config_loader().get_group_options(group))
    with initialize_config_module("conf", version_base="1.3"):
        return list(GlobalHydra.instance().config_loader().get_group_options(group))


def one_sentence(package: str, error: Exception) -> str:
    """What a person should read instead of a Hydra or operating-system error; re-raises what isn't a user's mistake."""
    if isinstance(error, DraftwrightError):
        return str(error)
    if isinstance(error.__cause__, DraftwrightError):  # raised by what Hydra instantiated
        return str(error.__cause__)
    text = " ".join((str(error) or str(error.__cause__)).split())
    if isinstance(error, MissingConfigException) and error.missing_cfg_file in _PLUGINS:
        plugin = _PLUGINS[error.missing_cfg_file]
        return f"this launcher needs the package {plugin}: run `pip install {plugin}` first"
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, option = (error.missing_cfg_file or "").rpartition("/")
        return f"there is no {group} '{option}'; choose from: {', '.join(error.options)}"
    if isinstance(error, OSError) and not isinstance(error, HydraException):
        if error.errno not in _NOT_WRITABLE:
            raise error
        place = error.filename or "the disk"
        return f"could not write to {place} ({error.strerror}): free space or choose another output_dir=FOLDER"
    if isinstance(error, MissingMandatoryValue):
        return f"the config key '{error.full_key}' has no value: pass {error.full_key}=…"
    if "module appears more than once" in text:
        return f"several variants were given at once; {no_variant()}"
    if "variant.name" in text or "'variant'" in text:
        return no_variant()
    if "does not support sweep type" in text:
        return "interval(…) leaves a value to a search: add +sweep=optuna, or list values: key=a,b"
    match = re.search(r"Could not override '([^']+)'", text)
    if match and any(re.match(r"\+[^=]+=.*[,(]", word) for word in sys.argv):
        return f"'{match[1]}' comes with what the sweep varies: write {match[1]}=choice(VALUE)"
    if match:
        return f"there is no config key '{match[1]}'; python -m {package} --cfg job shows all keys"
    return text


def no_variant() -> str:
    """The sentence that lists the variants."""
    return f"choose a variant with +variant=NAME, where NAME is one of: {', '.join(options('variant'))}"
