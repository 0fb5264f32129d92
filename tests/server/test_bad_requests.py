"""Bad requests: each is a clean 4xx that names the field, and the server answers the others as before."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import suppress
from typing import Any

import httpx
import pytest

import msrnn
from msrnn.engine.scheduler import Counts
from msrnn.hf.loading import Loaded
from msrnn.server.limits import Limits
from tests.helpers.bad_bodies import not_json, right_fields, wrong_fields
from tests.helpers.live_server import KEY, post, running
from tests.helpers.streams import streaming

HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{", 400, None),
        (b"[1]", 400, None),
        (b"[" * 100_000, 400, None),
        (b'{"prompt": "a", "temperature": NaN}', 400, None),
        ({"prompt": "a", "tools": []}, 400, "tools"),
        ({"prompt": "a", "response_format": {"type": "yaml"}}, 400, "response_format"),
        ({"prompt": "a", "model": "gpt-9"}, 404, "model"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": [1, "a"]}, 400, "prompt"),
        ({"prompt": [10**9]}, 400, "prompt"),
        ({}, 400, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": "a", "max_tokens": "9"}, 400, "max_tokens"),
        ({"prompt": "a", "max_tokens": 10**6}, 400, "max_tokens"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature"),
        ({"prompt": "a", "top_p": 2}, 400, "top_p"),
        ({"prompt": "a", "n": 100}, 400, "n"),
        ({"prompt": "a", "logprobs": True}, 400, "logprobs"),
        ({"prompt": "a", "logprobs": 99}, 400, "logprobs"),
        ({"prompt": "a", "stop": [""]}, 400, "stop"),
        ({"prompt": "a", "stop": 5}, 400, "stop"),
        ({"prompt": "a", "stop_token_ids": 5}, 400, "stop_token_ids"),
        ({"prompt": "a", "stop_token_ids": [-5]}, 400, "stop_token_ids"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias"),
        ({"prompt": "a", "logit_bias": [1]}, 400, "logit_bias"),
        ({"prompt": "a", "stream": "yes"}, 400, "stream"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options"),
        ({"prompt": "a", "ignore_eos": 1}, 400, "ignore_eos"),
        ({"prompt": "a", "session_id": "../x"}, 400, "session_id"),
        ({"prompt": ["a", "b"], "session_id": "x"}, 400, "prompt"),
        ({"prompt": ["a"] * 500}, 400, "prompt"),
        ({"prompt": "\ud800"}, 400, "prompt"),
        ({"prompt": "a", "\ud800": 1}, 400, "\\ud800"),
        ({"prompt": "a", "logit_bias": {"9" * 5000: 1}}, 400, "logit_bias"),
        ({"prompt": "a", "user": 7}, 400, "user"),
    ],
)
def test_bad_completions(address: str, body: Any, status: int, param: str | None) -> None:
    found = post(address, body)
    assert found.status_code == status
    error = found.json()["error"]
    assert error["param"] == param
    assert error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "max_completion_tokens": 1}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "a"}], "prompt": "a"}, "prompt"),
    ],
)
def test_bad_chats(address: str, body: Any, param: str) -> None:
    found = post(address, body, "/v1/chat/completions")
    assert found.status_code == 400
    assert found.json()["error"]["param"] == param


def check_shape(found: httpx.Response) -> None:
    """OpenAI's error, and no other field."""
    assert 400 <= found.status_code < 500, found.text
    error = found.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"] == "invalid_request_error"


def test_every_field_with_every_wrong_value(address: str, engine: msrnn.Engine) -> None:
    before = post(address, {"prompt": "The sea", "max_tokens": 5, "temperature": 0}).json()["choices"]
    counts: Counter[str] = Counter()
    with httpx.Client(base_url=address, headers=HEADERS, timeout=30) as client:
        for path, field, body in wrong_fields():
            found = client.post(path, content=body)
            assert found.status_code in (400, 404), f"{body[:200]!r}: {found.status_code} {found.text}"
            check_shape(found)
            counts[field] += 1
        for path, body in not_json(100, seed=5):
            found = client.post(path, content=body)
            assert found.status_code == 400, f"{body[:200]!r}: {found.status_code} {found.text}"
            check_shape(found)
            counts["not JSON"] += 1
    assert counts.total() > 1000
    assert len(counts) == 47
    assert post(address, {"prompt": "The sea", "max_tokens": 5, "temperature": 0}).json()["choices"] == before
    assert engine.counts == Counts(waiting=0, prefill=0, running=0)
    assert len(engine.sessions) == 0


def test_every_field_with_every_right_value(
    address: str, engine: msrnn.Engine, rnn: msrnn.MultiStateRNN, small: Loaded
) -> None:
    """They are answered, and nobody beside them is harmed."""
    count = 0
    with (
        streaming(address, rnn, small.tokenizer, clients=2),
        httpx.Client(base_url=address, headers=HEADERS, timeout=60) as client,
    ):
        for path, body in right_fields():
            found = client.post(path, content=json.dumps(body))  # a lone surrogate is escaped
            assert found.status_code == 200, f"{body}: {found.text}"
            assert '"error":{' not in found.text.replace(" ", "")
            count += 1
        assert client.get("/health").status_code == 200
        assert client.delete("/v1/sessions/x").status_code == 200
    assert count > 100


def test_paths_methods_and_keys(address: str) -> None:
    """A path that is not there is a 404, not a redirect."""
    paths = ["/v1", "/v1/", "/v1/model", "//v1/models", "/v1/embeddings", "/v1/sessions/%2e%2e%2fx", "/v1/%ff"]
    methods = {"/v1/completions": "POST", "/v1/chat/completions": "POST", "/v1/models": "GET", "/v1/sessions": "GET"}
    with httpx.Client(base_url=address, timeout=30) as client:
        for path in paths:
            for method in ("GET", "POST", "DELETE", "PATCH"):
                found = client.request(method, path, headers=HEADERS)
                assert found.status_code == 404, f"{method} {path}: {found.status_code}"
                check_shape(found)
        for path, allowed in {**methods, "/health": "GET", "/metrics": "GET"}.items():
            for method in {"GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"} - {allowed}:
                found = client.request(method, path, headers=HEADERS)
                assert found.status_code == 405, f"{method} {path}: {found.status_code}"
                check_shape(found)
        for key in (
            "",
            "Bearer",
            f"Basic {KEY}",
            KEY,
            f"Bearer {KEY}x",
            f"Bearer {KEY[:-1]}",
            "Bearer " + "x" * 9999,
        ):
            for path in methods:
                found = client.post(path, headers={"Authorization": key}, json={"prompt": "a"})
                assert found.status_code == 401
                check_shape(found)
        assert client.get("/v1/models", headers={"Authorization": f"bearer  {KEY}"}).status_code == 200


async def sent(address: str, *parts: bytes, pause: float = 0.0) -> httpx.Response:
    """The reply to bytes that are written as they are.

    A server that replies and closes, while more is on its way to it, resets the connection; on a busy machine this can
    overtake the reply, so it is asked again.
    """
    host, _, port = address.removeprefix("http://").partition(":")
    for _ in range(5):
        reader, writer = await asyncio.open_connection(host, int(port))
        for part in parts:
            writer.write(part)
            await asyncio.sleep(pause)
        with suppress(ConnectionResetError, BrokenPipeError):
            reply = await asyncio.wait_for(reader.read(), 30)
            break
    else:
        raise AssertionError("five times reset without a reply")
    writer.close()
    head, _, body = reply.partition(b"\r\n\r\n")
    return httpx.Response(int(head.split()[1]), content=body)


def test_large_bodies_and_slow_senders(rnn: msrnn.MultiStateRNN, small: Loaded) -> None:
    """Many at once, while others are answered."""
    engine = msrnn.Engine(rnn, slots=2, tokenizer=small.tokenizer)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    slow = (head + b"Content-Length: 50\r\n\r\n", b"{", b'"', b"p")
    chunks = [b"%x\r\n%s\r\n" % (4000, b"x" * 4000)] * 3
    large = [
        (head + b"Content-Length: 20000\r\n\r\n", b"x" * 20000),
        (head + b"Content-Length: 99999999999999999999\r\n\r\n",),
        (head + b"Transfer-Encoding: chunked\r\n\r\n", *chunks, b"0\r\n\r\n"),
    ]
    good = json.dumps({"prompt": "The sea", "max_tokens": 5, "temperature": 0}).encode()
    sound = (head + b"Content-Length: %d\r\n\r\n" % len(good), good)

    async def send_all(address: str) -> list[list[httpx.Response]]:
        slow_ones = asyncio.gather(*(sent(address, *slow, pause=0.05) for _ in range(60)))
        large_ones = asyncio.gather(*(sent(address, *parts) for parts in large * 20))
        return [await asyncio.gather(*(sent(address, *sound) for _ in range(10))), await large_ones, await slow_ones]

    with running(engine, Limits(body_bytes=10_000, body_seconds=1)) as address:
        answered, too_large, too_slow = asyncio.run(send_all(address))
        again = asyncio.run(sent(address, *sound))
    assert {(found.status_code, json.dumps(found.json()["choices"])) for found in answered} == {
        (200, json.dumps(again.json()["choices"]))
    }
    assert {found.status_code for found in too_large} == {413}
    assert {found.status_code for found in too_slow} == {408}
    for found in (*too_large, *too_slow):
        check_shape(found)
