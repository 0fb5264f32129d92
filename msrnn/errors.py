"""Errors that users and programs meet: their kind is a type, and what they are about are fields.

Code decides by type and field, never by the words of a message.
"""

from __future__ import annotations

import os
import reprlib
from enum import Enum
from typing import Any

_SHOWN = 100  # characters of a value


class Absent(Enum):
    """Not given, where None is a value; one object in every process, also in an error that another one has sent."""

    ABSENT = 0


ABSENT = Absent.ABSENT


class UsageError(ValueError):
    """Bad input. Its text is `name=value: message; advice`, of what is given.

    message  what is wrong
    name     the argument, option or field at fault
    value    what it was; an error about a relation between values may have none
    advice   what to do

    The command line shows it as one line. Any other error is a bug, and keeps its traceback.
    """

    def __init__(
        self, message: str, *, name: str | None = None, value: Any = ABSENT, advice: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.name, self.value, self.advice = message, name, value, advice

    @property
    def subject(self) -> str:
        """The beginning of the text: the name and value at fault; may be empty."""
        if self.name is None or self.value is ABSENT:
            return self.name or ""
        return f"{self.name}={show(self.value)}"

    @property
    def problem(self) -> str:
        """The text after the subject."""
        return self.message if self.advice is None else f"{self.message}; {self.advice}"

    def __str__(self) -> str:
        return f"{self.subject}: {self.problem}" if self.subject else self.problem

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.message, self.__dict__)


def _restore(kind: type[UsageError], message: str, fields: dict[str, Any]) -> UsageError:
    error = kind.__new__(kind, message)
    error.__dict__.update(fields)
    return error


class FileError(UsageError):
    """A file that cannot be used, or a problem with what it holds. Its text is `path: message; advice`."""

    def __init__(self, message: str, path: str | os.PathLike[str] | None, *, advice: str | None = None) -> None:
        super().__init__(message, advice=advice)
        self.path = "None" if path is None else os.fspath(path)

    @property
    def subject(self) -> str:
        return self.path


class DoesNotFitError(UsageError, MemoryError):
    """An allocation needs more bytes than a device has free; the text says what would fit."""


class SessionError(UsageError):
    """A session cannot continue: it has changed, or there is none. Its text is `session: message; advice`.

    `code` is the reason, for programs.
    """

    code = "session_error"

    def __init__(self, message: str, session: object, *, advice: str | None = None) -> None:
        super().__init__(message, advice=advice)
        self.session = session

    @property
    def subject(self) -> str:
        return repr(self.session)


class SessionInUseError(SessionError):
    """A session is answering another request."""

    code = "session_in_use"


class SessionStorageFullError(SessionError):
    """A session does not fit with those that are in use."""

    code = "session_storage_full"


class SessionUnreadableError(SessionError):
    """The file of a session cannot be read."""

    code = "session_unreadable"


class SessionUnwritableError(SessionError):
    """The file of a session cannot be written."""

    code = "session_unwritable"


class LostRankError(RuntimeError):
    """Another process of the job has ended, or does not answer in time."""


def show(value: Any) -> str:
    """A value in an error: at most 100 characters, and a large collection is not written out first."""
    return _repr.repr(value)[:_SHOWN]


class _Repr(reprlib.Repr):
    """Short values as `repr` has them."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother, self.maxlong = 4, _SHOWN + 20, _SHOWN + 20, _SHOWN + 20
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = 40

    def repr_int(self, x: int, level: int) -> str:
        try:
            return super().repr_int(x, level)
        except ValueError:  # Python writes no number of more digits than a few thousand
            return f"a number of {x.bit_length():,} bits"


_repr = _Repr()
