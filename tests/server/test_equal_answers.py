"""Requests that arrive at random from the real `openai` client: their answers are those of `rnn.generate`."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import openai
import pytest

import msrnn
from msrnn.hf.loading import Loaded
from tests.helpers.live_server import KEY, greedy, running
from tests.helpers.step_orders import second_order_slow

pytestmark = second_order_slow

COUNT, TOKENS = 20, 5


def prompts(seed: int = 1) -> list[list[int]]:
    """Every fourth one begins with another one."""
    draw = random.Random(seed)
    found: list[list[int]] = []
    for i in range(COUNT):
        new = [draw.randrange(1000, 40000) for _ in range(draw.randint(1, 60))]
        found.append([*found[i - 2], *new] if i % 4 == 3 else new)
    return found


def answers(engine: msrnn.Engine, asked: list[list[int]], sessions: bool = False) -> list[tuple[str, int]]:
    """The text of each answer, and how many tokens of its prompt were kept."""
    draw = random.Random(2)

    async def ask(client: openai.AsyncOpenAI, i: int) -> tuple[str, int]:
        await asyncio.sleep(draw.random() / 4)
        more: dict[str, Any] = {"session_id": f"s{i}"} if sessions else {}
        found = await client.completions.create(
            model="tiny", prompt=asked[i], max_tokens=TOKENS, temperature=0, extra_body=more
        )
        assert found.usage is not None
        details = found.usage.prompt_tokens_details
        return found.choices[0].text, (details and details.cached_tokens) or 0

    async def ask_all(address: str) -> list[tuple[str, int]]:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(len(asked))))

    with running(engine) as address:
        return asyncio.run(ask_all(address))


class Expected:
    """What `rnn.generate` answers."""

    def __init__(self, rnn: msrnn.MultiStateRNN, tokenizer: Any) -> None:
        self.rnn, self.tokenizer = rnn, tokenizer
        self._known: dict[tuple[int, ...], list[int]] = {}

    def tokens(self, prompt: list[int]) -> list[int]:
        key = tuple(prompt)
        self._known[key] = self._known.get(key) or greedy(self.rnn, prompt, TOKENS)
        return self._known[key]

    def __call__(self, asked: list[list[int]]) -> list[str]:
        return [self.tokenizer.decode(self.tokens(prompt)) for prompt in asked]


@pytest.fixture(scope="module")
def expected(rnn: msrnn.MultiStateRNN, small: Loaded) -> Expected:
    return Expected(rnn, small.tokenizer)


@pytest.mark.parametrize("memory", [pytest.param(0, marks=pytest.mark.slow), 2**26])
def test_with_and_without_kept_states(rnn: msrnn.MultiStateRNN, expected: Expected, memory: int) -> None:
    engine = msrnn.Engine(
        rnn, slots=5, tokenizer=expected.tokenizer, prompt_tokens=16, prefix_bytes=memory, prefix_host_bytes=0
    )
    found = answers(engine, prompts()) + answers(engine, prompts())
    assert [text for text, _ in found] == expected(prompts()) * 2
    assert any(kept for _, kept in found) == bool(memory)


def test_kept_states_in_files_and_after_a_restart(rnn: msrnn.MultiStateRNN, expected: Expected, tmp_path: Path) -> None:
    """Nothing is kept in memory."""
    options: dict[str, Any] = {"prefix_bytes": 0, "prefix_host_bytes": 0, "prefix_folder": tmp_path}
    first = answers(msrnn.Engine(rnn, slots=5, tokenizer=expected.tokenizer, **options), prompts())
    assert [text for text, _ in first] == expected(prompts())
    longer = [[*prompt, 5000] for prompt in prompts()]
    after = answers(msrnn.Engine(rnn, slots=5, tokenizer=expected.tokenizer, **options), longer)
    assert [text for text, _ in after] == expected(longer)
    assert sum(kept == len(prompt) for (_, kept), prompt in zip(after, prompts(), strict=True)) > COUNT // 4


@pytest.mark.parametrize("folder", [pytest.param(False, marks=pytest.mark.slow), True])
def test_sessions(rnn: msrnn.MultiStateRNN, expected: Expected, tmp_path: Path, folder: bool) -> None:
    """Two turns each; with a folder by two servers, of which the second has room for one session in memory."""
    engine = msrnn.Engine(rnn, slots=5, tokenizer=expected.tokenizer, sessions=tmp_path if folder else None)
    first = answers(engine, prompts(), sessions=True)
    assert [text for text, _ in first] == expected(prompts())
    if folder:
        engine = msrnn.Engine(rnn, slots=5, tokenizer=expected.tokenizer, sessions=tmp_path)
        engine.sessions._memory = rnn.state().nbytes
    second = answers(engine, prompts(seed=3), sessions=True)
    histories = [[*one, *expected.tokens(one), *other] for one, other in zip(prompts(), prompts(seed=3), strict=True)]
    assert [text for text, _ in second] == expected(histories)
