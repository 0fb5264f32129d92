"""The id of a session: its name, and the owner that it belongs to."""

from __future__ import annotations

import re
from typing import NamedTuple

from msrnn.errors import UsageError

NAME_PATTERN = "^[A-Za-z0-9_-]{1,64}$"
_NAME = re.compile(NAME_PATTERN)
_OWNER = re.compile(r"[0-9a-f]{16}")


class SessionId(NamedTuple):
    """A session belongs to an owner, such as an API key; owners do not see each other's names."""

    name: str
    owner: str = ""

    @classmethod
    def of(cls, session: str | SessionId) -> SessionId:
        """Checked; a plain name is a session without an owner."""
        found = session if isinstance(session, SessionId) else cls(session)
        found.check()
        return found

    def __repr__(self) -> str:
        """As in error messages, which clients read."""
        return f"session {self.name!r}"

    def check(self) -> None:
        """Names are parts of file names, so they are plain."""
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise UsageError(f"session {self.name!r:.80}: must be 1 to 64 letters, digits, hyphens and underscores")
        if self.owner and not _OWNER.fullmatch(self.owner):
            raise UsageError(f"owner {self.owner!r:.80} of a session: must be 16 hexadecimal digits")


def is_owner(text: str) -> bool:
    return _OWNER.fullmatch(text) is not None
