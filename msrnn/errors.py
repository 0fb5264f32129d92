"""Errors for bad input."""

from __future__ import annotations


class UsageError(ValueError):
    """Bad input: the message names what was wrong, the value, and what to do.

    The command line shows it as one line. Any other error is a bug, and keeps its traceback.
    """


class SessionError(UsageError):
    """A session cannot go on, or cannot be stored; `code` tells programs why."""

    def __init__(self, message: str, code: str = "session_error") -> None:
        super().__init__(message)
        self.code = code
