"""Tries on toys what a run will need, so that a wrong value shows before the slow work begins."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, get_type_hints

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import nn

from conf.check import convert_all
from spec_decode.errors import DraftwrightError, first_line
from spec_decode.target import TargetSpec
from spec_decode.target_hf import TargetSource
from train.losses import build_loss
from train.module import PRECISIONS, DraftModule
from train.settings import TrainSettings
from train.sharding import ShardedStrategy

_OF_THE_RUN = ("draft_vocab_size", "target", "tokenizer")  # fields of a draft's config that are no draft.KEY
_ANY_TARGET = TargetSpec(
    name="", hidden_size=64, vocab_size=2**31, num_layers=1000, num_heads=1, num_kv_heads=1, head_dim=64,
    intermediate_size=64, rms_norm_eps=1e-6, rope_parameters={"rope_theta": 1e4}, max_positions=2**31, eos_token_ids=(),
)  # fmt: skip


def check_module(kind: type, options: Mapping[str, Any]) -> None:
    """Check a module's section against its constructor; draft and target come later."""
    known = {name: hint for name, hint in _parameters(kind).items() if name not in ("draft", "target")}
    convert_all(options, known, "module")
    if missing := sorted(known.keys() - options.keys()):
        raise DraftwrightError(f"the config key 'module.{missing[0]}' is missing: pass module.{missing[0]}=…")


def _parameters(kind: type) -> dict[str, Any]:
    """The constructor's parameters and their annotations, those of the class above included where it passes on
    **options."""
    found: dict[str, Any] = {}
    for cls in kind.__mro__:
        if "__init__" not in vars(cls):
            continue
        hints = get_type_hints(cls.__init__, include_extras=True)  # type: ignore[misc]
        parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]  # type: ignore[misc]
        found |= {one.name: hints.get(one.name) for one in parameters if one.kind != one.VAR_KEYWORD}
        if all(one.kind != one.VAR_KEYWORD for one in parameters):
            break
    return found


def check_draft(kind: type, options: Mapping[str, Any], spec: TargetSpec | None = None, **sizes: int) -> None:
    """Check a draft's section against its config dataclass, without a target as far as that goes.

    sizes: fields of the config that the run decides, such as draft_vocab_size.
    """
    config: Any = get_type_hints(kind.__init__)["config"]  # type: ignore[misc]
    about_target = inspect.signature(config.for_target).parameters
    special = get_type_hints(config.for_target)
    hints = get_type_hints(config, include_extras=True)
    names = [field.name for field in dataclasses.fields(config) if field.name not in _OF_THE_RUN]
    values = convert_all(options, {name: special.get(name, hints[name]) for name in names}, "draft")
    if spec is None:
        values = {name: value for name, value in values.items() if name not in about_target}
    config.for_target(spec or _ANY_TARGET, **sizes, **values)


def check_fit(settings: TrainSettings, kind: type, options: Mapping[str, Any], spec: TargetSpec) -> None:
    """Check what depends on the sizes of the target."""
    if settings.max_length > spec.max_positions:
        raise DraftwrightError(
            f"max_length={settings.max_length} exceeds the {spec.max_positions} positions of target '{spec.name}': "
            f"use max_length={spec.max_positions} or less"
        )
    check_draft(kind, options, spec, draft_vocab_size=settings.draft_vocab_size or spec.vocab_size)


def try_optimizer(module_factory: Any) -> None:
    """Build the optimiser and the schedule of a module (a partial) once."""
    toy = nn.Sequential(nn.Linear(2, 2), nn.RMSNorm(2))
    try:
        optimizer = module_factory.keywords["optimizer"](toy.named_parameters(), lr=module_factory.keywords["lr"])
        build_loss(module_factory.keywords["loss"])
        module_factory.keywords["schedule"](optimizer, total_steps=1)
    except DraftwrightError:
        raise
    except (TypeError, ValueError) as error:
        raise DraftwrightError(
            f"module.optimizer or module.schedule has a wrong value ({first_line(error)}): correct it"
        ) from error


def try_trainer(trainer_factory: Any) -> Trainer:
    """A trainer (from a partial) that is only looked at: Lightning checks its arguments and finds the device."""
    precision = trainer_factory.keywords.get("precision")
    if precision not in PRECISIONS:
        raise DraftwrightError(f"trainer.precision={precision} is not possible: choose {' or '.join(PRECISIONS)}")
    try:
        return trainer_factory(max_epochs=1, logger=False, callbacks=[])
    except (TypeError, ValueError, RuntimeError, ImportError, MisconfigurationException) as error:
        raise DraftwrightError(
            f"no trainer can be made from the keys trainer.* ({first_line(error)}): correct them, or use trainer=cpu"
        ) from error


def check_strategy(trainer: Trainer, module: type[DraftModule]) -> None:
    """Raise DraftwrightError for a way to share the work in which training would fail or be wrong."""
    strategy = trainer.strategy
    if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy | ShardedStrategy):
        raise DraftwrightError(
            f"trainer.strategy={type(strategy).__name__} is not supported: use trainer=ddp, or trainer=fsdp to shard "
            "the draft"
        )
    if isinstance(strategy, ShardedStrategy) and not module.shardable:
        raise DraftwrightError(
            f"{module.__name__} trains weights of the target, which trainer=fsdp doesn't shard: use trainer=ddp"
        )


def place(source: TargetSource, trainer: Trainer) -> TargetSource:
    """The target on the trainer's device; raises DraftwrightError if target.device names another."""
    device = str(trainer.strategy.root_device)
    if source.device not in ("auto", device, device.partition(":")[0]):
        raise DraftwrightError(
            f"target.device={source.device} but the trainer runs on {device}: leave target.device out, or choose "
            "another trainer=…"
        )
    return dataclasses.replace(source, device=device)
