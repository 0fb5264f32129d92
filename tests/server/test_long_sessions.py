"""Conversations past the training length over HTTP: they are converted, go on, and can be looked at and forked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch

import msrnn
from msrnn.engine.lanes import LongEngine
from msrnn.hf.loading import Loaded
from tests.helpers.live_server import KEY, greedy, post, running
from tests.helpers.serving import metrics
from tests.helpers.step_orders import both_orders
from tests.helpers.tiny import build, llama

pytestmark = both_orders

LENGTH = 64
HEADERS = {"Authorization": f"Bearer {KEY}"}
LONG = [*range(100, 190)]


Pair = tuple[msrnn.MultiStateRNN, msrnn.MultiStateRNN]


@pytest.fixture(scope="module")
def pair(small: Loaded) -> Pair:
    config = llama(vocab_size=len(small.tokenizer), eos_token_id=None, max_position_embeddings=LENGTH)
    model = build(config, "cpu")
    longer = msrnn.MultiStateRNN(model, "tova+1~64", 16, positions="compressed")
    return msrnn.MultiStateRNN(model, "tova", 16), longer


@pytest.fixture(scope="module")
def long_engine(pair: Pair, small: Loaded, overlaps: bool) -> LongEngine:
    return LongEngine(*pair, LENGTH, slots=4, tokenizer=small.tokenizer)


@pytest.fixture(scope="module")
def long_address(long_engine: LongEngine) -> Iterator[str]:
    with running(long_engine) as found:
        yield found


def get(address: str, path: str) -> Any:
    return httpx.get(f"{address}/v1/{path}", headers=HEADERS, timeout=30).json()


def said(address: str, prompt: list[int], **more: Any) -> str:
    reply = post(address, {"prompt": prompt, "temperature": 0, "max_tokens": 6, **more})
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def test_prompts_on_both_sides_of_the_length(pair: Pair, long_address: str, small: Loaded) -> None:
    before = metrics(long_address)["long_requests_total"]
    for prompt, rnn in ((LONG[:9], pair[0]), (LONG, pair[1]), (LONG[:9], pair[0])):
        assert said(long_address, prompt) == small.tokenizer.decode(greedy(rnn, prompt, 6))
    counts = metrics(long_address)
    assert counts["long_requests_total"] == before + 1
    assert counts["num_batch_slots"] == 5
    assert counts["prefix_cache_misses_total"] >= 2


def test_a_session_that_crosses(pair: Pair, long_address: str, small: Loaded, overlaps: bool) -> None:
    """Its answer is that of a state that was read with original positions, and then converted."""
    first, second = LONG[:40], LONG[40:60]
    said(long_address, first, session_id="one", max_tokens=1)
    assert get(long_address, "sessions/one")["positions"] == "original"
    answer = said(long_address, second, session_id="one")
    assert get(long_address, "sessions/one")["positions"] == "compressed:lnln"

    rnn, longer = pair
    state = rnn.state()
    (token,) = rnn.read(torch.tensor([first]), state, last_only=True)[0].argmax(-1).tolist()
    if overlaps:  # a step that overlaps the last one has read its token
        rnn.step(torch.tensor([[token]]), state)
    state = longer.convert_state(state)
    ids = torch.tensor([second if overlaps else [token, *second]])
    expected = longer.generate(ids, state=state, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
    assert answer == small.tokenizer.decode(expected)

    memory = get(long_address, "sessions/one/memory")
    assert memory["tokens"] == 67
    held = [position for position, _ in memory["held"]]
    assert min(held) == 0 or min(held) >= memory["seen"] - 64
    assert post(long_address, {"to": "two"}, "/v1/sessions/one/fork").status_code == 201
    assert get(long_address, "sessions/two")["positions"] == "compressed:lnln"
    both = [said(long_address, [7, 8], session_id=name) for name in ("one", "two")]
    assert both[0] == both[1]


def test_more_answers_than_there_are_rows_for_long_texts(long_address: str) -> None:
    reply = post(long_address, {"prompt": LONG, "n": 2, "max_tokens": 2})
    assert reply.status_code == 400
    assert "n=2: the engine has 1 batch slots for texts that may pass 64 tokens" in reply.json()["error"]["message"]


def test_the_model_tells_where_positions_change(long_address: str) -> None:
    (model,) = get(long_address, "models")["data"]
    assert model["positions"] == "original"
    assert model["long"] == {"above": LENGTH, "policy": "tova+1~64", "positions": "compressed:lnln"}
