"""The error for bad input."""

from __future__ import annotations


class UsageError(ValueError):
    """Bad input: the message names what was wrong, the value, and what to do.

    The command line shows it as one line. Any other error is a bug, and keeps its traceback.
    """
