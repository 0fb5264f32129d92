"""Prompts that are read together: on a GPU, several short ones take little longer than one.

Where all batch slots are in use, prompts begin one by one. The first ones then wait a few steps for others, which costs
little where there are many slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msrnn.engine.executor import Facts
from msrnn.engine.requests import Request

if TYPE_CHECKING:
    from msrnn.engine.prefill import Prefill

LONGEST = 512  # tokens that are left of a prompt; longer ones fill a GPU alone
MOST_STEPS = 8  # for which a prompt waits for others
SLOTS = 32  # of the batch for each prompt of a group: with fewer, one that waits costs more than reading together gains


class PromptGroups:
    """Chooses which prefills are read together, from those that are under way."""

    def __init__(self, facts: Facts) -> None:
        self._most = facts.together
        self._many_slots = facts.slots >= SLOTS * facts.together
        self._waited = 0  # steps

    def admits(self, request: Request, prefills: Sequence[Prefill]) -> bool:
        """Whether a request may begin so that it is read with the prefills that are under way."""
        width = _padded(len(request.prompt))
        if width > LONGEST or request.params.prompt_logprobs is not None or len(prefills) >= self._most:
            return False
        return all(_fits(prefill) and _padded(len(prefill.tokens)) == width for prefill in prefills)

    def choose(self, prefill: Prefill, prefills: Sequence[Prefill], may_wait: bool) -> list[Prefill]:
        """Those that are read with a prefill, itself among them; none where it waits for others in this step."""
        if self._most == 1 or not _fits(prefill):
            return [prefill]
        alike = [other for other in prefills if _fits(other) and _padded(other.left) == _padded(prefill.left)]
        if len(alike) >= self._most:
            self._waited = 0
            return alike[: self._most]
        if may_wait and self._many_slots and self._waited < MOST_STEPS:
            self._waited += 1
            return []
        return [prefill]

    def rest(self) -> None:
        """No prefill is under way."""
        self._waited = 0


def _fits(prefill: Prefill) -> bool:
    """Whether a prefill ends with one chunk that may be read with others: without recall, scores or protection."""
    if prefill.finished:
        return False
    end, recalling = prefill.end_of_chunk(LONGEST)
    whole = end == len(prefill.tokens) and recalling is None
    return whole and prefill.request.params.prompt_logprobs is None and prefill.done not in prefill.protect


def _padded(tokens: int) -> int:
    """The columns that they take in a batch: prompts are padded to powers of two."""
    return 1 << (tokens - 1).bit_length()
