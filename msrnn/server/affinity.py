"""Which replica of a server a request goes to: the one that has its session, or has read how its prompt begins."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

BLOCK = 256  # characters of a prompt that are compared at once; a shorter beginning is read again anywhere in no time
MOST_BLOCKS = 2**18  # beginnings that are remembered, of all prompts together
SLACK = 4  # requests that the replica with the beginning may be behind the idlest one, beside twice its number


def owner(session: str, replicas: int) -> int:
    """The number of the replica that a conversation belongs to; a restart does not change it."""
    return zlib.crc32(session.encode(errors="surrogateescape")) % replicas  # a file may have any name


class Beginnings:
    """How prompts begin that replicas have read, in blocks; of each, the replica that has read it last."""

    def __init__(self) -> None:
        self._replica: OrderedDict[bytes, int] = OrderedDict()

    def add(self, blocks: Sequence[bytes], replica: int) -> None:
        for block in blocks:
            self._replica[block] = replica
            self._replica.move_to_end(block)
        while len(self._replica) > MOST_BLOCKS:
            self._replica.popitem(last=False)

    def find(self, blocks: Sequence[bytes]) -> int | None:
        """The replica that has read the longest beginning of a prompt with these blocks."""
        known = [self._replica[block] for block in blocks if block in self._replica]
        return known[-1] if known else None


def chosen(beginnings: Beginnings, blocks: Sequence[bytes], loads: Mapping[int, int]) -> int:
    """The replica for a prompt, of those that have a load (requests under way); their loads stay nearly even."""
    idlest = min(loads, key=lambda replica: loads[replica])
    found = beginnings.find(blocks)
    if found is None or found not in loads or loads[found] > 2 * loads[idlest] + SLACK:
        return idlest
    return found


def blocks_of(text: str, key_owner: str = "") -> list[bytes]:
    """A name for each beginning of the text that is a number of whole blocks; owners share none."""
    names, name = [], key_owner.encode()
    for start in range(0, len(text) - BLOCK + 1, BLOCK):
        name = blake2b(name + text[start : start + BLOCK].encode(errors="replace"), digest_size=16).digest()
        names.append(name)
    return names


def text_of(body: Any) -> str:
    """What is compared of the body of a request, whose fields may have any value."""
    if not isinstance(body, dict):
        return ""
    messages, prompt = body.get("messages"), body.get("prompt")
    if isinstance(messages, list):
        return "".join(f"{m.get('role')}:{_content(m.get('content'))}\n" for m in messages if isinstance(m, dict))
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    return prompt if isinstance(prompt, str) else str(prompt)


def _content(content: Any) -> str:
    parts: Sequence[Any] = content if isinstance(content, list) else [content]
    return "".join(str(part.get("text") if isinstance(part, dict) else part) for part in parts)
