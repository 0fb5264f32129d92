"""The loads of `benchmarks.vllm`, and how an engine is kept busy with one: as it is after hours, but from the start.

Requests are at any point of their answers at once: what they have generated so far is part of their prompts.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

LONG_PROMPT, SHARE_OF_LONG = 2048, 0.2  # of the mixed load
STALLED = 30  # steps in which no other request has begun: the engine is full


class Job(NamedTuple):
    """A request: tokens of its prompt and of its answer."""

    prompt: int
    answer: int


@dataclass(frozen=True)
class Load:
    prompt: int
    answer: int
    mixed: bool = False

    def draw(self, chance: random.Random) -> Job:
        long = self.mixed and chance.random() < SHARE_OF_LONG
        return Job(LONG_PROMPT if long else self.prompt, self.answer)

    def draw_running(self, chance: random.Random, held: int | None) -> Job:
        """One at any point of its answer. An engine that holds at most `held` tokens need not read more of them."""
        prompt, answer = self.draw(chance)
        done = chance.randrange(answer)
        return Job(min(prompt + done, held or prompt + done), answer - done)

    @property
    def mean_context(self) -> float:
        prompt = self.prompt + SHARE_OF_LONG * (LONG_PROMPT - self.prompt) * self.mixed
        return prompt + self.answer / 2


LOADS = {"long answers": Load(256, 3840), "mixed": Load(256, 512, mixed=True)}


class Served(NamedTuple):
    """What a step has brought."""

    tokens: int
    began: int  # requests that got their first token
    ended: int


class Driver(Protocol):
    """An engine that is measured."""

    held: int | None  # the most tokens of a request that it keeps; None: all

    def count_slots(self, load: Load) -> int:
        """About as many requests as it can run at once."""
        ...

    def add(self, job: Job) -> None: ...

    def step(self) -> Served: ...

    def clear(self) -> None:
        """Abort all requests."""
        ...


def measure(driver: Driver, load: Load, seconds: float, most_filling: float) -> dict[str, Any]:
    """Fill the engine, and count tokens over some seconds while every request that ends is followed by another one."""
    chance, slots = random.Random(0), driver.count_slots(load)
    for _ in range(slots):
        driver.add(load.draw_running(chance, driver.held))
    began, running, stalled = time.perf_counter(), 0, 0
    while running < slots and stalled < STALLED and time.perf_counter() - began < most_filling:
        served = _step(driver, load, chance)
        running += served.began - served.ended
        stalled = 0 if served.began else stalled + 1
    filled, tokens, steps, first, ended = time.perf_counter(), 0, 0, 0, 0
    while time.perf_counter() - filled < seconds:
        served = _step(driver, load, chance)
        tokens, steps = tokens + served.tokens, steps + 1
        first, ended = first + served.began, ended + served.ended
    took = time.perf_counter() - filled
    driver.clear()
    return {
        "tokens_per_second": round(tokens / took, 1),
        "ms_per_step": round(1000 * took / max(1, steps), 2),
        "tokens_per_step": round(tokens / max(1, steps), 1),
        "prompts_read": first,
        "answers_ended": ended,
        "requests": slots,
        "fill_seconds": round(filled - began, 1),
        "window_seconds": round(took, 1),
        "full": running >= slots or stalled >= STALLED,
    }


def _step(driver: Driver, load: Load, chance: random.Random) -> Served:
    served = driver.step()
    for _ in range(served.ended):
        driver.add(load.draw(chance))
    return served
