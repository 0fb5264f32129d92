"""Large requests are checked one after another, and neither hold up small ones nor fill the memory."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

import pytest
from starlette.requests import Request

import msrnn
from msrnn.hf.chat_template import encode
from msrnn.hf.loading import Loaded
from msrnn.server import limits, prompts
from msrnn.server.errors import ApiError
from msrnn.server.limits import Limits
from tests.helpers.live_server import live, post, wait_until

LARGE = "large " * 20_000


class Held:
    """Tokenizing a large text, held until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.most, self.now, self.let_go = threading.Event(), 0, 0, threading.Event()
        self._encode, self._lock = encode, threading.Lock()
        monkeypatch.setattr(prompts, "encode", self)

    def __call__(self, tokenizer: Any, text: str, begins: bool) -> Any:
        if len(text) < 1000:
            return self._encode(tokenizer, text, begins)
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        self.begun.set()
        assert self.let_go.wait(60)
        with self._lock:
            self.now -= 1
        return self._encode(tokenizer, text[:20_000], begins)


def test_small_requests_do_not_wait_for_large_ones(
    rnn: msrnn.MultiStateRNN, small: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    monkeypatch.setattr(limits, "PARSED_BYTES", 9 * len(json.dumps({"prompt": LARGE})))
    engine = msrnn.Engine(rnn, slots=2, tokenizer=small.tokenizer)
    with live(engine, Limits()) as server, ThreadPoolExecutor(32) as threads:
        large = [threads.submit(post, server.address, {"prompt": LARGE}) for _ in range(14)]
        assert held.begun.wait(60)
        refused = [found.result() for found in first_done(large, 5)]
        assert [found.status_code for found in refused] == [429] * 5  # nine of them take all the bytes
        assert all(found.headers["Retry-After"] for found in refused)
        for _ in range(3):
            assert post(server.address, {"prompt": "small", "max_tokens": 1}).status_code == 200
        held.let_go.set()
        codes = [found.result().status_code for found in large]
        assert server.server.parsing.count == server.server.parsing.bytes == 0
    assert sorted(codes) == [400] * 9 + [429] * 5  # too long for this server
    assert held.most == 1


def first_done(futures: list[Any], count: int) -> list[Any]:
    """The first of these that are done."""
    done: set[Any] = set()
    while len(done) < count:
        found, _ = wait([each for each in futures if each not in done], 60, FIRST_COMPLETED)
        assert found
        done |= found
    return [*done]


def test_a_full_queue_is_told_before_a_text_is_tokenized(
    rnn: msrnn.MultiStateRNN, small: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    engine = msrnn.Engine(rnn, slots=1, tokenizer=small.tokenizer)
    with live(engine, Limits(queue=1)) as server, ThreadPoolExecutor(2) as threads:
        large = [threads.submit(post, server.address, {"prompt": LARGE}) for _ in range(2)]
        wait_until(lambda: server.server.parsing.count == 2)
        assert post(server.address, {"prompt": "small", "max_tokens": 1}).status_code == 429
        held.let_go.set()
        assert [found.result().status_code for found in large] == [400, 400]
        assert post(server.address, {"prompt": "small", "max_tokens": 1}).status_code == 200


def test_one_large_request_alone_is_checked(
    rnn: msrnn.MultiStateRNN, small: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PARSED_BYTES", 10)
    engine = msrnn.Engine(rnn, slots=1, tokenizer=small.tokenizer)
    with live(engine, Limits()) as server:
        assert post(server.address, {"prompt": LARGE, "max_tokens": 1}).status_code == 400  # too long, and not 429


def post_to(body: list[bytes], seconds: float = 30, length: str | None = None) -> Request:
    """A request whose body arrives in these parts; after the last one, nothing does."""
    parts = [{"type": "http.request", "body": part, "more_body": True} for part in body[:-1]]
    parts += [{"type": "http.request", "body": part, "more_body": seconds < 1} for part in body[-1:]]

    async def receive() -> Any:
        if not parts:
            await asyncio.Event().wait()
        return parts.pop(0)

    named = {"content-type": "application/json", **({} if length is None else {"content-length": length})}
    encoded = [(name.encode(), value.encode()) for name, value in named.items()]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": encoded}, receive)


def test_a_body_in_parts() -> None:
    assert asyncio.run(limits.read_body(post_to([b"ab", b"", b"cd"]), Limits(body_bytes=4))) == b"abcd"


@pytest.mark.parametrize(
    ("request_", "status", "code"),
    [
        (post_to([b"abc", b"de"]), 413, "body_too_large"),
        (post_to([b"ab"], length="5"), 413, "body_too_large"),
        (post_to([b"ab"], seconds=0), 408, "body_too_slow"),
    ],
)
def test_bodies_that_are_refused(request_: Request, status: int, code: str) -> None:
    with pytest.raises(ApiError) as error:
        asyncio.run(limits.read_body(request_, Limits(body_bytes=4, body_seconds=0.01)))
    assert (error.value.status, error.value.code) == (status, code)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[NaN]", b"-Infinity", b"[" * 100_000])
def test_bodies_that_are_not_json(body: bytes) -> None:
    with pytest.raises(ApiError, match="the body is not JSON") as error:
        limits.parse_json(body)
    assert (error.value.status, error.value.code) == (400, "invalid_json")
    assert len(error.value.message) < 300


def test_a_small_body() -> None:
    assert limits.parse_small_json(b'{"to": "a"}') == {"to": "a"}
    with pytest.raises(ApiError) as error:
        limits.parse_small_json(b" " * (limits.SMALL_BODY + 1))
    assert error.value.status == 413
