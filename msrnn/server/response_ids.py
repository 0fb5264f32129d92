"""Ids of responses: the session that keeps the conversation, and the turn of it that the response is."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from typing import NamedTuple

_ID = re.compile(r"(resp_[0-9a-f]{32})_([1-9][0-9]{0,17})")


class ResponseId(NamedTuple):
    session: str
    turn: int

    def __str__(self) -> str:
        return f"{self.session}_{self.turn}"


def parse_response_id(text: str) -> ResponseId | None:
    """The parts of an id; None if no response that can be continued has it."""
    found = _ID.fullmatch(text)
    return ResponseId(found[1], int(found[2])) if found else None


def make_session_name(owns: Callable[[str], bool]) -> str:
    """A name for a new conversation, among those that belong to this server where several share a folder."""
    while not owns(name := f"resp_{uuid.uuid4().hex}"):
        pass
    return name
