"""Clients that stream beside a test; their answers must stay what they are."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx

import msrnn
from tests.helpers.live_server import KEY, greedy

TOKENS = 24


class Answer(NamedTuple):
    text: str
    tokens: list[str]
    last: str  # line of its stream


class Stream(threading.Thread):
    """A client that streams the same greedy answer again and again, until it is told to end."""

    def __init__(self, address: str, prompt: list[int], expected: Answer) -> None:
        super().__init__(daemon=True)
        self._address, self._prompt, self._expected = address, prompt, expected
        self.ending, self.answers, self.wrong = False, 0, list[str]()

    def run(self) -> None:
        try:
            self._ask_again_and_again()
        except Exception as error:  # which would end the thread, and nobody would know
            self.wrong.append(repr(error))

    def _ask_again_and_again(self) -> None:
        ask = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": 0, "stream": True}
        body = {"prompt": self._prompt, **ask}
        with httpx.Client(base_url=self._address, headers={"Authorization": f"Bearer {KEY}"}, timeout=300) as client:
            while not self.ending:
                with client.stream("POST", "/v1/completions", json=body) as reply:
                    lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
                choices = [json.loads(line)["choices"][0] for line in lines if '"choices"' in line]
                tokens = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["tokens"]]
                found = Answer("".join(choice["text"] for choice in choices), tokens, lines[-1])
                if found != self._expected:
                    self.wrong.append(repr(found))
                self.answers += 1


def _answer(ids: list[int], tokenizer: Any) -> Answer:
    return Answer(tokenizer.decode(ids, skip_special_tokens=True), [tokenizer.decode([id_]) for id_ in ids], "[DONE]")


@contextmanager
def streaming(address: str, rnn: msrnn.MultiStateRNN, tokenizer: Any, clients: int) -> Iterator[None]:
    """Run clients meanwhile; each one must have had at least one answer, and the greedy one every time."""
    prompts = [[1000 + 37 * client + 11 * place for place in range(3 + 5 * client)] for client in range(clients)]
    streams = [Stream(address, prompt, _answer(greedy(rnn, prompt, TOKENS), tokenizer)) for prompt in prompts]
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
