"""Odd but legal requests harm nobody: they are answered, and so is everyone beside them, token for token."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from live_server import KEY, greedy, running
from odd_requests import requests

import msrnn
from msrnn.hf.loading import Loaded

HEADERS = {"Authorization": f"Bearer {KEY}"}
CLIENTS, TOKENS = 8, 24


class Stream(threading.Thread):
    """A client that streams the same greedy answer again and again, until it is told to end."""

    def __init__(self, address: str, prompt: list[int], expected: str) -> None:
        super().__init__(daemon=True)
        self._address, self._prompt, self._expected = address, prompt, expected
        self.ending, self.answers, self.wrong = False, 0, list[str]()

    def run(self) -> None:
        body = {"prompt": self._prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
        with httpx.Client(base_url=self._address, headers=HEADERS, timeout=300) as client:
            while not self.ending:
                with client.stream("POST", "/v1/completions", json=body) as reply:
                    lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
                texts = [json.loads(line)["choices"][0]["text"] for line in lines if "choices" in line]
                if lines[-1:] != ["[DONE]"] or "".join(texts) != self._expected:
                    self.wrong.append(f"{''.join(texts)!r}, {lines[-1:]}")
                self.answers += 1


@pytest.fixture
def address(rnn: msrnn.MultiStateRNN, small: Loaded) -> Iterator[str]:
    with running(msrnn.Engine(rnn, rows=12, tokenizer=small.tokenizer)) as found:
        yield found


def check(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    found = client.post(path, json=body)
    assert found.status_code == 200, found.text
    assert "error" not in found.text.partition("choices")[0], found.text
    if body.get("stream"):
        assert found.text.endswith("data: [DONE]\n\n"), found.text[-300:]
    else:
        prompts = body.get("prompt", "")
        many = isinstance(prompts, list) and not isinstance(prompts[0], int)
        assert len(found.json()["choices"]) == body.get("n", 1) * (len(prompts) if many else 1)


@pytest.mark.parametrize("count", [80, pytest.param(2000, marks=pytest.mark.slow)])
def test_odd_requests_beside_streams(
    address: str, rnn: msrnn.MultiStateRNN, small: Loaded, count: int, overlaps: bool
) -> None:
    prompts = [[1000 + 37 * client + 11 * place for place in range(3 + 5 * client)] for client in range(CLIENTS)]
    expected = [small.tokenizer.decode(greedy(rnn, prompt, TOKENS), skip_special_tokens=True) for prompt in prompts]
    streams = [Stream(address, *pair) for pair in zip(prompts, expected, strict=True)]
    for stream in streams:
        stream.start()
    with httpx.Client(base_url=address, headers=HEADERS, timeout=300) as client:

        @settings(max_examples=count, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck])
        @given(requests())
        def odd(request: tuple[str, dict[str, Any]]) -> None:
            check(client, *request)

        try:
            odd()
        finally:
            for stream in streams:
                stream.ending = True
            for stream in streams:
                stream.join()
        assert client.get("/health").status_code == 200
    assert [stream.wrong for stream in streams] == [[]] * CLIENTS
    assert min(stream.answers for stream in streams) > 0
