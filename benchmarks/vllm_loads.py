"""The loads of `benchmarks.vllm`, and how an engine is measured under one: as it is after hours, but from the start.

Requests are at any point of their answers at once: what they have generated so far is part of their prompts. Either the
engine is full, and each request that ends is followed by another one, or requests arrive by chance at a given rate.
"""

from __future__ import annotations

import random
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import Any, NamedTuple, Protocol

LONG_PROMPT, SHARE_OF_LONG = 2048, 0.2  # of the mixed load
STALLED = 30  # steps in which no other request has begun: the engine is full
STEP = 0.05  # seconds, about: as many requests run at first as would if steps took that long
PATIENCE = 30  # seconds for the last first tokens


class Job(NamedTuple):
    """A request: tokens of its prompt and of its answer."""

    prompt: int
    answer: int


@dataclass(frozen=True)
class Load:
    prompt: int
    answer: int
    mixed: bool = False
    rate: float = 0  # requests that arrive per second; 0: the engine is always full

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


LOADS = {
    "long answers": Load(256, 3840),
    "mixed": Load(256, 512, mixed=True),
    "arrivals": Load(256, 512, mixed=True, rate=8),
}


class Served(NamedTuple):
    """What a step has brought."""

    tokens: int
    began: Sequence[Hashable]  # requests that got their first token
    ended: int


class Driver(Protocol):
    """An engine that is measured."""

    held: int | None  # the most tokens of a request that it keeps; None: all

    def count_slots(self, load: Load) -> int:
        """About as many requests as it can run at once."""
        ...

    def add(self, job: Job) -> Hashable:
        """Queue a request -> what `step` calls it."""
        ...

    def step(self) -> Served: ...

    def clear(self) -> None:
        """Abort all requests."""
        ...


def measure(driver: Driver, load: Load, seconds: float, most_filling: float) -> dict[str, Any]:
    """The figures of an engine under a load, over some seconds after it was filled for at most `most_filling`."""
    if load.rate:
        return _measure_arrivals(driver, load, 2 * seconds, most_filling)  # longer, since few requests begin
    return _measure_full(driver, load, seconds, most_filling)


def _measure_full(driver: Driver, load: Load, seconds: float, most_filling: float) -> dict[str, Any]:
    """Fill the engine, and count tokens while every request that ends is followed by another one."""
    chance, slots = random.Random(0), driver.count_slots(load)
    for _ in range(slots):
        driver.add(load.draw_running(chance, driver.held))
    began, running, stalled = time.perf_counter(), 0, 0
    while running < slots and stalled < STALLED and time.perf_counter() - began < most_filling:
        served = _step(driver, load, chance)
        running += len(served.began) - served.ended
        stalled = 0 if served.began else stalled + 1
    filled, tokens, steps, first, ended = time.perf_counter(), 0, 0, 0, 0
    while time.perf_counter() - filled < seconds:
        served = _step(driver, load, chance)
        tokens, steps = tokens + served.tokens, steps + 1
        first, ended = first + len(served.began), ended + served.ended
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


def _measure_arrivals(driver: Driver, load: Load, seconds: float, filling: float) -> dict[str, Any]:
    """Let requests arrive at random, and time the first tokens of those that come after the first `filling` seconds."""
    chance = random.Random(0)
    for _ in range(int(load.rate * load.answer * STEP)):
        driver.add(load.draw_running(chance, driver.held))
    began, next_arrival, tokens = time.perf_counter(), 0.0, 0
    end, arrived, waits = filling + seconds, dict[Hashable, float](), list[float]()
    while (now := time.perf_counter() - began) < end or (arrived and now < end + PATIENCE):
        while next_arrival <= min(now, end):
            arrived[driver.add(load.draw(chance))] = next_arrival
            next_arrival += chance.expovariate(load.rate)
        served = driver.step()
        now = time.perf_counter() - began
        tokens += served.tokens * (filling <= now < end)
        times = [arrived.pop(request) for request in served.began if request in arrived]
        waits += [now - arrival for arrival in times if arrival >= filling]
    late = sum(arrival >= filling for arrival in arrived.values())
    driver.clear()
    cuts = quantiles(waits, n=100)
    return {
        "tokens_per_second": round(tokens / seconds, 1),
        "first_token_p50_ms": round(1000 * cuts[49]),
        "first_token_p99_ms": round(1000 * cuts[98]),
        "requests": len(waits),
        "without_first_token": late,
        "rate": load.rate,
    }


def _step(driver: Driver, load: Load, chance: random.Random) -> Served:
    served = driver.step()
    for _ in range(served.ended):
        driver.add(load.draw(chance))
    return served
