"""The one exception that entry points show to a person without a stack trace."""

from __future__ import annotations


class DraftwrightError(ValueError):
    """A user's mistake: one sentence that says what is wrong, where, and what to do."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, to quote inside a sentence."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
