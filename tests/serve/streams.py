"""Clients that stream beside a test; their answers must stay what they are."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from live_server import KEY, greedy

import msrnn

TOKENS = 24


class Stream(threading.Thread):
    """A client that streams the same greedy answer again and again, until it is told to end."""

    def __init__(self, address: str, prompt: list[int], expected: str) -> None:
        super().__init__(daemon=True)
        self._address, self._prompt, self._expected = address, prompt, expected
        self.ending, self.answers, self.wrong = False, 0, list[str]()

    def run(self) -> None:
        body = {"prompt": self._prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
        with httpx.Client(base_url=self._address, headers={"Authorization": f"Bearer {KEY}"}, timeout=300) as client:
            while not self.ending:
                with client.stream("POST", "/v1/completions", json=body) as reply:
                    lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
                texts = [json.loads(line)["choices"][0]["text"] for line in lines if "choices" in line]
                if lines[-1:] != ["[DONE]"] or "".join(texts) != self._expected:
                    self.wrong.append(f"{''.join(texts)!r}, {lines[-1:]}")
                self.answers += 1


@contextmanager
def streaming(address: str, rnn: msrnn.MultiStateRNN, tokenizer: Any, clients: int) -> Iterator[None]:
    """Run clients meanwhile; each one must have had at least one answer, and the greedy one every time."""
    prompts = [[1000 + 37 * client + 11 * place for place in range(3 + 5 * client)] for client in range(clients)]
    expected = [tokenizer.decode(greedy(rnn, prompt, TOKENS), skip_special_tokens=True) for prompt in prompts]
    streams = [Stream(address, *pair) for pair in zip(prompts, expected, strict=True)]
    for stream in streams:
        stream.start()
    try:
        yield
    finally:
        for stream in streams:
            stream.ending = True
        for stream in streams:
            stream.join()
    assert [stream.wrong for stream in streams] == [[]] * clients
    assert min(stream.answers for stream in streams) > 0
