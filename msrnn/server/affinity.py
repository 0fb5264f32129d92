"""The affinity of requests to replicas: a session has one replica, and prompts with a common prefix share one.

That replica has the prefix in its prefix cache.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

BLOCK = 256  # characters of a prompt that are compared at once; a shorter prefix takes little time to read again
MOST_BLOCKS = 2**18  # prefixes that are remembered, of all prompts together
SLACK = 4  # affinity is ignored when the preferred replica has more than 2 * idlest + SLACK requests


def assign_replica(session: str, replicas: int) -> int:
    """The number of the replica that a session belongs to; a restart does not change it."""
    return zlib.crc32(session.encode(errors="surrogateescape")) % replicas  # a file may have any name


class SeenPrefixes:
    """Prefixes of prompts, in blocks, and the replica that has read each of them last."""

    def __init__(self) -> None:
        self._replica: OrderedDict[bytes, int] = OrderedDict()

    def add(self, blocks: Sequence[bytes], replica: int) -> None:
        for block in blocks:
            self._replica[block] = replica
            self._replica.move_to_end(block)
        while len(self._replica) > MOST_BLOCKS:
            self._replica.popitem(last=False)

    def find(self, blocks: Sequence[bytes]) -> int | None:
        """The replica that has read the longest prefix of a prompt with these blocks."""
        known = [self._replica[block] for block in blocks if block in self._replica]
        return known[-1] if known else None


def choose_replica(prefixes: SeenPrefixes, blocks: Sequence[bytes], loads: Mapping[int, int]) -> int:
    """The replica for a prompt, among those with a load (their running requests). Loads stay nearly even."""
    idlest = min(loads, key=lambda replica: loads[replica])
    found = prefixes.find(blocks)
    if found is None or found not in loads or loads[found] > 2 * loads[idlest] + SLACK:
        return idlest
    return found


def blocks_of(text: str, key_owner: str = "") -> list[bytes]:
    """A digest of each prefix of whole blocks of the text; different owners have different digests."""
    names, name = [], key_owner.encode()
    for start in range(0, len(text) - BLOCK + 1, BLOCK):
        name = blake2b(name + text[start : start + BLOCK].encode(errors="replace"), digest_size=16).digest()
        names.append(name)
    return names


def text_of(body: Any) -> str:
    """The text of a request's prompt, to compare prefixes. The fields of the body may have any value."""
    if not isinstance(body, dict):
        return ""
    messages, prompt = body.get("messages", body.get("input")), body.get("prompt")
    if isinstance(messages, str):  # the input of a response
        messages = [{"role": "user", "content": messages}]
    if isinstance(messages, list):
        if "instructions" in body:
            messages = [{"role": "system", "content": body["instructions"]}, *messages]
        return "".join(f"{m.get('role')}:{_content(m.get('content'))}\n" for m in messages if isinstance(m, dict))
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    return prompt if isinstance(prompt, str) else str(prompt)


def _content(content: Any) -> str:
    parts: Sequence[Any] = content if isinstance(content, list) else [content]
    return "".join(str(part.get("text") if isinstance(part, dict) else part) for part in parts)
