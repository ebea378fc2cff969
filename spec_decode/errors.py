"""The exceptions that public functions raise for arguments and that entry points show without a stack trace."""

from __future__ import annotations

from typing import Any


class DraftwrightError(ValueError):
    """A user's mistake: one sentence that says what is wrong, where, and what to do."""


def check_type(name: str, value: object, kind: Any, wanted: str) -> None:
    """Raise TypeError unless `value` is a `kind`; a bool is no number."""
    if not isinstance(value, kind) or isinstance(value, bool):
        raise type_error(name, value, wanted)


def check_positive(**values: int) -> None:
    """Raise TypeError or DraftwrightError that names the argument unless each is an int of at least 1."""
    for name, value in values.items():
        check_type(name, value, int, "an int")
        if value < 1:
            raise DraftwrightError(f"{name} must be at least 1, got {value}")


def type_error(name: str, value: object, wanted: str) -> TypeError:
    """The error for an argument of the wrong type."""
    return TypeError(f"{name} must be {wanted}, not {type(value).__name__}")


def first_line(error: BaseException) -> str:
    """The first line of an error's text, to quote inside a sentence."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
