"""The end of a server: running answers finish, or end with an error, and new requests get 503."""

from __future__ import annotations

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

import msrnn
from msrnn.hf.loading import Loaded
from msrnn.server.limits import Limits
from tests.helpers.live_server import live, post, slow_down, wait_until
from tests.helpers.serving import metrics

HOLD = 0.5  # seconds of a step; what runs goes on for longer than a test needs, until it is told to be fast
LONG = {"prompt": "a", "max_tokens": 30, "ignore_eos": True, "temperature": 0}
FOREVER = {"max_tokens": 1900, "stream": True}


@pytest.fixture
def engine(rnn: msrnn.MultiStateRNN, small: Loaded, monkeypatch: pytest.MonkeyPatch) -> msrnn.Engine:
    engine = msrnn.Engine(rnn, slots=1, tokenizer=small.tokenizer)
    slow_down(engine, monkeypatch)
    return engine


def test_draining(engine: msrnn.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """After SIGTERM, what runs and what waits is answered in full."""
    with live(engine, Limits()) as found:
        url = f"{found.address}/v1/completions"
        expected = post(found.address, LONG).json()["choices"][0]["text"]
        fast = slow_down(engine, monkeypatch, HOLD)
        assert httpx.get(f"{found.address}/health").status_code == 200
        with (
            httpx.stream("POST", url, json={**LONG, "stream": True}, timeout=60) as running,
            httpx.stream("POST", url, json={**LONG, "stream": True}, timeout=60) as waiting,
        ):
            lines = running.iter_lines()
            next(lines)
            found.http.handle_exit(signal.SIGTERM, None)
            health = httpx.get(f"{found.address}/health")
            assert (health.status_code, health.json()) == (503, {"status": "shutting down"})
            refused = post(found.address, LONG)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            assert httpx.get(f"{found.address}/v1/models").status_code == 503
            fast.set()
            for rest in (lines, waiting.iter_lines()):
                chunks = [httpx.Response(200, content=line[6:]).json() for line in rest if line.startswith("data: {")]
                text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
                assert expected.endswith(text)
                assert len(text) > len(expected) / 2
                assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        for _ in range(6000):
            try:
                httpx.get(f"{found.address}/health")
            except httpx.TransportError:
                return
            time.sleep(0.01)
        pytest.fail("the server has not ended")


def turns_of(engine: msrnn.Engine) -> dict[str, int]:
    return {info.name: info.turns for info in engine.sessions.infos()}


@pytest.mark.parametrize("by", ["timeout", "signal"])
def test_draining_ends_with_an_error(engine: msrnn.Engine, by: str) -> None:
    """At its limit of time, or with a second signal: streams end with an error, and whole answers with 503."""
    with live(engine, Limits()) as found, ThreadPoolExecutor(1) as pool:
        url = f"{found.address}/v1/completions"
        assert post(found.address, {**LONG, "max_tokens": 2, "session_id": "talk"}).status_code == 200
        with httpx.stream("POST", url, json={**LONG, **FOREVER, "session_id": "talk"}, timeout=60) as cut:
            lines = cut.iter_lines()
            next(lines)
            whole = pool.submit(post, found.address, {**LONG, "max_tokens": 1900, "session_id": "new"})
            while found.server.active < 2:
                time.sleep(0.01)
            found.http._seconds = 0.1 if by == "timeout" else 1000
            found.http.handle_exit(signal.SIGTERM, None)
            if by == "signal":
                found.http.handle_exit(signal.SIGTERM, None)
            *_, last = [line for line in lines if line]
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
            refused = whole.result()
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert found.http.should_exit == (by == "signal")
    assert (found.server.active, turns_of(engine)) == (0, {"talk": 1})


def test_the_time_in_the_queue(engine: msrnn.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = slow_down(engine, monkeypatch, HOLD)
    body = {**LONG, "max_tokens": 10, "stream": True}
    with live(engine, Limits()) as found:
        url = f"{found.address}/v1/completions"
        with httpx.stream("POST", url, json=body) as first:
            lines = first.iter_lines()  # if nothing held it, the connection would be closed
            next(lines)
            with httpx.stream("POST", url, json=body) as second:
                wait_until(lambda: engine.counts.waiting == 1)
                time.sleep(0.06)
                fast.set()
                second.read()
        counts = metrics(found.address)
    assert counts["request_queue_time_seconds_count"] == 2
    assert 0.05 < counts["request_queue_time_seconds_sum"] < counts["time_to_first_token_seconds_sum"]
    expected = {"num_requests_running", "num_requests_waiting", "prompt_tokens_total", "generation_tokens_total"}
    expected |= {f"{name}_seconds_count" for name in ("time_to_first_token", "inter_token_latency")}
    expected |= {
        "e2e_request_latency_seconds_count",
        "num_batch_slots",
        "prefix_cache_hits_total",
        "prefix_cache_misses_total",
    }
    assert expected <= counts.keys()
