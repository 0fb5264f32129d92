from __future__ import annotations

import json
import math
from typing import Any

import pytest

from msrnn.engine.engine import Engine
from msrnn.engine.requests import Event, Logprobs, Request
from msrnn.server.protocol import Served, parse_chat, parse_completion
from msrnn.server.replies import ChatReply, Reply, format_error
from tests.helpers.characters import END, character_tokenizer
from tests.helpers.fake_executor import FakeExecutor

TOKENIZER: Any = character_tokenizer()
A, B = TOKENIZER("ab", add_special_tokens=False)["input_ids"]
SCORED = Logprobs(-0.5, [(B, -0.25), (A, -0.5)])
HELLO = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def served() -> Served:
    return Served("tiny", TOKENIZER, 16, 200, Engine(FakeExecutor(), tokenizer=TOKENIZER).sessions)


def answer(reply: Reply, text: str = "a", **more: Any) -> None:
    """Give every answer this text."""
    for request in reply.requests:
        for one in request.answers:
            one.text, one.tokens, one.finish_reason = (
                text,
                TOKENIZER(text, add_special_tokens=False)["input_ids"],
                "length",
            )
            for name, value in more.items():
                setattr(one, name, value)


def completion(served: Served, **body: Any) -> Reply:
    job = parse_completion({"prompt": "a", **body}, served)
    return Reply(job, [Request(prompt, job.params) for prompt in job.prompts], "tiny", TOKENIZER)


def chat(served: Served, **body: Any) -> ChatReply:
    job = parse_chat({**HELLO, **body}, served)
    return ChatReply(job, [Request(prompt, job.params) for prompt in job.prompts], "tiny", TOKENIZER)


def data(chunks: list[bytes]) -> list[Any]:
    assert all(chunk.startswith(b"data: ") and chunk.endswith(b"\n\n") for chunk in chunks)
    return [json.loads(chunk[6:]) for chunk in chunks if chunk != b"data: [DONE]\n\n"]


def test_a_whole_completion(served: Served) -> None:
    reply = completion(served, prompt=["a", "ab"], n=2)
    answer(reply)
    found = reply.complete()
    assert (found["object"], found["model"], found["id"][:5]) == ("text_completion", "tiny", "cmpl-")
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    assert found["choices"][0] == {"index": 0, "text": "a", "logprobs": None, "finish_reason": "length"}
    assert found["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 4,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_cached_tokens_are_at_most_those_of_the_prompt(served: Served) -> None:
    reply = completion(served)
    reply.requests[0].cached_tokens = 99
    assert reply.usage()["prompt_tokens_details"]["cached_tokens"] == 2


def test_log_probabilities_of_a_completion(served: Served) -> None:
    """Infinity is no JSON number; the stop token that ended the answer counts."""
    reply = completion(served, logprobs=2)
    answer(reply, "ab", logprobs=[SCORED, Logprobs(-math.inf, [])], ending=(END, SCORED))
    assert reply.complete()["choices"][0]["logprobs"] == {
        "tokens": ["a", "b", "<end>"],
        "token_logprobs": [-0.5, -9999.0, -0.5],
        "top_logprobs": [{"b": -0.25, "a": -0.5}, {"b": -9999.0}, {"b": -0.25, "a": -0.5, "<end>": -0.5}],
        "text_offset": [0, 1, 2],
    }


def test_a_prompt_that_is_sent_back(served: Served) -> None:
    reply = completion(served, echo=True, logprobs=0)
    answer(reply, "b", logprobs=[Logprobs(-1.0, [])])
    reply.requests[0].prompt_logprobs = [None, Logprobs(-2.0, [])]
    choice = reply.complete()["choices"][0]
    assert choice["text"] == "ab"
    assert choice["logprobs"]["token_logprobs"] == [None, -2.0, -1.0]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1]


def test_the_chunks_of_a_completion(served: Served) -> None:
    reply = completion(served, stream=True, echo=True, stream_options={"include_usage": True})
    request = reply.requests[0]
    first = Event(request, 0, A, "a", None, None)
    assert reply.echoes_now(first)
    chunks = [*reply.first_chunks(), *reply.chunks(first)]
    assert [chunk["choices"][0]["text"] for chunk in data(chunks)] == ["a", "a"]
    assert not reply.echoes_now(first)
    assert reply.chunks(Event(request, 0, B, "", None, None)) == []  # text that is held back
    (last,) = data(reply.chunks(Event(request, 0, None, "b", None, "stop")))
    assert last["choices"][0] == {"index": 0, "text": "b", "logprobs": None, "finish_reason": "stop"}
    ends = reply.last_chunks()
    assert ends[-1] == b"data: [DONE]\n\n"
    (usage,) = data(ends)
    assert (usage["choices"], usage["usage"]["prompt_tokens"]) == ([], 2)


def test_usage_in_every_chunk(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for wanted in ({}, options):
        reply = completion(served, stream=True, stream_options=wanted)
        (chunk,) = data(reply.chunks(Event(reply.requests[0], 0, A, "a", None, None)))
        assert ("usage" in chunk) is bool(wanted)


def test_offsets_of_a_stream_continue(served: Served) -> None:
    reply = completion(served, stream=True, logprobs=0)
    events = [Event(reply.requests[0], 0, token, text, SCORED, None) for token, text in ((A, "a"), (B, "b"))]
    found = [data(reply.chunks(event))[0]["choices"][0]["logprobs"]["text_offset"] for event in events]
    assert found == [[0], [1]]


def test_a_whole_chat(served: Served) -> None:
    reply = chat(served, logprobs=True, top_logprobs=2, n=2)
    answer(reply, logprobs=[SCORED])
    found = reply.complete()
    assert (found["object"], found["id"][:9]) == ("chat.completion", "chatcmpl-")
    assert [choice["index"] for choice in found["choices"]] == [0, 1]
    assert found["choices"][1]["message"] == {"role": "assistant", "content": "a"}
    (content,) = found["choices"][0]["logprobs"]["content"]
    assert (content["token"], content["logprob"], content["bytes"]) == ("a", -0.5, [97])
    assert [top["token"] for top in content["top_logprobs"]] == ["b", "a"]


def test_the_chunks_of_a_chat(served: Served) -> None:
    reply = chat(served, stream=True, n=2)
    opening = data(reply.first_chunks())
    assert [chunk["choices"][0]["index"] for chunk in opening] == [0, 1]
    assert opening[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    (chunk,) = data(reply.chunks(Event(reply.requests[0], 1, A, "a", None, None)))
    assert chunk["object"] == "chat.completion.chunk"
    assert chunk["choices"][0] == {"index": 1, "delta": {"content": "a"}, "logprobs": None, "finish_reason": None}
    (chunk,) = data(reply.chunks(Event(reply.requests[0], 1, None, "", None, "stop")))
    assert chunk["choices"][0] == {"index": 1, "delta": {}, "logprobs": None, "finish_reason": "stop"}


def test_an_error_of_a_stream_keeps_its_letters() -> None:
    assert format_error({"error": {"message": "é"}}) == 'data: {"error": {"message": "é"}}\n\n'.encode()
