"""What a session remembers of how it began: digests of the tools and instructions that it has read."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

_SEPARATOR = "."


class Beginning(NamedTuple):
    """Digests; empty where there was nothing."""

    tools: str = ""
    instructions: str = ""

    @classmethod
    def parse(cls, name: str) -> Beginning:
        """The parts of `Session.beginning`."""
        tools, _, instructions = name.partition(_SEPARATOR)
        return cls(tools, instructions)

    @property
    def name(self) -> str:
        return f"{self.tools}{_SEPARATOR}{self.instructions}" if self.instructions else self.tools


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]
