"""Plain config values -> frozen dataclasses. The annotations are the checks:

    epochs: Positive                    a whole number of at least 1
    train_tokens: Positive | None       the same, or null
    features: Literal["cache", "online"]
    benchmark: str | tuple[str, ...]    text, or a list of text with at least one entry
    target: TargetSource                a section, itself a dataclass

What isn't understood here (a Protocol, a Callable) is taken as it is.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from spec_decode.errors import DraftwrightError

Settings = TypeVar("Settings")


@dataclasses.dataclass(frozen=True)
class Between:
    """A range for `Annotated`, both ends included."""

    low: float
    high: float = math.inf

    def __str__(self) -> str:
        return f"of at least {self.low}" if self.high == math.inf else f"from {self.low} to {self.high}"


Positive = Annotated[int, Between(1)]
Natural = Annotated[int, Between(0)]
NonNegative = Annotated[float, Between(0)]
Share = Annotated[float, Between(0, 1)]
Seed = Annotated[int, Between(0, 2**32 - 1)]
Dtype = Literal["float32", "bfloat16", "float16", "float64"]


class _Unfit(Exception):
    """A value that an annotation doesn't allow."""


def build(kind: type[Settings], values: Mapping[str, Any], section: str = "") -> Settings:
    """The dataclass `kind` from a config section; raises DraftwrightError naming an unknown, missing or wrong key."""
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    optional = {
        name
        for name, field in fields.items()
        if field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    }
    hints = get_type_hints(kind, include_extras=True)
    if missing := sorted(fields.keys() - optional - values.keys()):
        name = _join(section, missing[0])
        raise DraftwrightError(f"the config key '{name}' is missing: pass {name}=…")
    return kind(**convert_all(values, {name: hints[name] for name in fields}, section))


def convert_all(values: Mapping[str, Any], hints: Mapping[str, Any], section: str) -> dict[str, Any]:
    """Values converted to their annotations; raises DraftwrightError for a key without one and for a wrong value."""
    for key in sorted(values.keys() - hints.keys()):
        raise DraftwrightError(
            f"there is no config key '{_join(section, key)}': choose from {', '.join(sorted(hints))}"
        )
    return {key: convert(value, hints[key], _join(section, key)) for key, value in values.items()}


def convert(value: Any, hint: Any, key: str) -> Any:
    """The value as `hint` asks for it (a list as a tuple, an int as a float); raises DraftwrightError naming `key`."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return build(hint, value, key)
    try:
        return _fit(value, hint)
    except _Unfit:
        raise DraftwrightError(f"{key}={_shown(value)} is not possible: it must be {_words(hint)}") from None


def _fit(value: Any, hint: Any) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        fitted = _fit(value, arguments[0])
        if all(bound.low <= fitted <= bound.high for bound in arguments[1:]):
            return fitted
    elif origin in (Union, UnionType):
        for arm in arguments:
            try:
                return _fit(value, arm)
            except _Unfit:
                continue
    elif origin is Literal:
        if value in arguments:
            return value
    elif origin is tuple:
        if isinstance(value, list | tuple) and value:
            return tuple(_fit(entry, arguments[0]) for entry in value)
    elif origin is dict:
        if isinstance(value, dict):
            return value
    elif hint is float:
        if type(value) in (int, float) and math.isfinite(value):
            return float(value)
    elif hint is Path:
        if isinstance(value, str):
            return Path(value).expanduser()
    elif hint in (int, str, bool, NoneType):
        if type(value) is hint:
            return value
    elif not dataclasses.is_dataclass(hint):
        return value
    raise _Unfit


def _words(hint: Any) -> str:
    """An annotation as a person says it."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return " ".join([_words(arguments[0]), *map(str, arguments[1:])])
    if origin in (Union, UnionType):
        return " or ".join(map(_words, sorted(arguments, key=lambda arm: arm is not NoneType)))
    if origin is Literal:
        return " or ".join(map(str, arguments))
    if origin is tuple:
        return f"a list with at least one entry, each {_words(arguments[0])}"
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", NoneType: "null"}
    return names.get(hint, "a path" if hint is Path else "a section with keys")


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _join(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key
