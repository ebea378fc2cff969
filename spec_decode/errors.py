"""The one exception that entry points show to a person without a stack trace."""


class DraftwrightError(ValueError):
    """A user's mistake: one sentence that says what is wrong, where, and what to do."""
