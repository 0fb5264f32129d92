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


def longest_together(prompt_tokens: int, together: int) -> int:
    """The most tokens of each of `together` prompts in one batch, if a step reads at most `prompt_tokens` in all."""
    return min(LONGEST, prompt_tokens // together)


class PromptGroups:
    """Chooses which prefills are read together, from those that are under way."""

    def __init__(self, facts: Facts) -> None:
        self._most, self._longest = facts.together, LONGEST
        self._many_slots = facts.slots >= SLOTS * facts.together
        self._waited = 0  # steps
        self._open = True  # others may join; not once one was read, or they could overtake those behind for ever

    def limit(self, prompt_tokens: int) -> None:
        """Let no batch of prompts have more than `prompt_tokens` tokens in all."""
        self._longest = longest_together(prompt_tokens, self._most)

    def begin(self) -> None:
        """Begin with the first prefill of a group, while no other is under way."""
        self._waited, self._open = 0, True

    def admits(self, request: Request, prefills: Sequence[Prefill]) -> bool:
        """Whether a request may begin so that it is read with the prefills that are under way."""
        width = _width_of(len(request.prompt))
        if not self._open or width > self._longest or request.params.prompt_logprobs is not None:
            return False
        alike = all(self._fits(prefill) and _width_of(len(prefill.tokens)) == width for prefill in prefills)
        return alike and len(prefills) < self._most

    def choose(self, prefill: Prefill, prefills: Sequence[Prefill], may_wait: bool) -> list[Prefill]:
        """Those that are read with a prefill, itself among them; none where it waits for others in this step."""
        fitting = [other for other in prefills if self._fits(other)]
        alike = [other for other in fitting if _width_of(other.left) == _width_of(prefill.left)]
        if self._most > 1 and prefill in fitting:
            if len(alike) < self._most and may_wait and self._can_wait and len(fitting) == len(prefills):
                self._waited += 1
                return []
            self._open = False
            if len(alike) >= self._most:
                return alike[: self._most]
        return [prefill]

    @property
    def _can_wait(self) -> bool:
        return self._open and self._many_slots and self._waited < MOST_STEPS

    def _fits(self, prefill: Prefill) -> bool:
        """Whether a prefill ends with one chunk that may be read with others: without recall, scores or protection."""
        if prefill.finished or _width_of(prefill.left) > self._longest:
            return False
        end, recalling = prefill.end_of_chunk(self._longest)
        whole = end == len(prefill.tokens) and recalling is None
        return whole and prefill.request.params.prompt_logprobs is None and prefill.done not in prefill.protect


def _width_of(tokens: int) -> int:
    """The columns that they take in a batch: prompts are padded to powers of two."""
    return 1 << (tokens - 1).bit_length()
