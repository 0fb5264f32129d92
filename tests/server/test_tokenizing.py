"""What /tokenize counts is what a completion or a chat reads; /detokenize is the way back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from msrnn.engine.engine import Engine
from msrnn.server.limits import Limits
from msrnn.server.protocol import parse_chat, parse_completion
from msrnn.server.router import Router
from msrnn.server.server import Server
from tests.helpers.characters import BOS, THINKING, character_tokenizer
from tests.helpers.fake_executor import VOCABULARY, FakeExecutor
from tests.helpers.live_server import KEY, served_by
from tests.helpers.replicas_here import Local, with_router

TOKENIZER: Any = character_tokenizer()
TOKENIZER.chat_template = THINKING
HI: list[dict[str, str]] = [{"role": "user", "content": "hi"}]
HALF = [*HI, {"role": "assistant", "content": "so<end>"}]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(FakeExecutor(size=16), tokenizer=TOKENIZER)


def ask(engine: Engine, path: str, *bodies: Any, limits: Limits | None = None) -> Sequence[httpx.Response]:
    server = Server(engine, served_by(engine), limits or Limits())

    async def send() -> Sequence[httpx.Response]:
        transport = httpx.ASGITransport(server.app())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            return await asyncio.gather(*(client.post(path, content=json.dumps(body)) for body in bodies))

    return asyncio.run(send())


def tokenize(engine: Engine, **body: Any) -> dict[str, Any]:
    (found,) = ask(engine, "/tokenize", body)
    assert found.status_code == 200, found.text
    answer: dict[str, Any] = found.json()
    return answer


@pytest.mark.parametrize("prompt", ["hello", "", "a<end>b", " a", "\n"])
def test_a_prompt_has_the_tokens_that_a_completion_reads(engine: Engine, prompt: str) -> None:
    found = tokenize(engine, prompt=prompt)
    assert found["tokens"] == parse_completion({"prompt": prompt}, served_by(engine)).prompts[0]
    assert found["tokens"][0] == BOS
    assert (found["count"], found["max_model_len"], found["token_strs"]) == (len(found["tokens"]), 2000, None)
    bare = tokenize(engine, prompt=prompt, add_special_tokens=False, model="tiny")
    assert bare["tokens"] == found["tokens"][1:]


@pytest.mark.parametrize("messages", [HI, HALF, [{"role": "system", "content": "a"}, *HI]])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"add_generation_prompt": False},
        {"add_generation_prompt": True},
        {"reasoning_effort": "low"},
        {"chat_template_kwargs": {"mood": "glad"}, "add_special_tokens": False},
    ],
)
def test_messages_have_the_tokens_that_a_chat_reads(engine: Engine, messages: Any, fields: dict[str, Any]) -> None:
    found = tokenize(engine, messages=messages, **fields)["tokens"]
    assert found == parse_chat({"messages": messages, **fields}, served_by(engine)).prompts[0]
    if fields == {"add_generation_prompt": False}:
        assert TOKENIZER.decode(found).endswith("<end>\n")


def test_tokens_as_the_vocabulary_has_them(engine: Engine) -> None:
    assert tokenize(engine, prompt="ab", return_token_strs=True)["token_strs"] == ["<s>", "a", "b"]


@pytest.mark.parametrize("text", ["hello", "a<end>b", "\t \n"])
def test_the_way_back(engine: Engine, text: str) -> None:
    tokens = tokenize(engine, prompt=text)["tokens"]
    (found,) = ask(engine, "/detokenize", {"tokens": tokens, "model": "tiny"})
    assert found.json() == {"prompt": f"<s>{text}"}
    assert ask(engine, "/detokenize", {"tokens": []})[0].json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "prompt"),
        ({"prompt": "a", "messages": HI}, 400, "prompt"),
        ({"prompt": ["a"]}, 400, "prompt"),
        ({"prompt": "\ud800"}, 400, "prompt"),
        ({"prompt": "a", "model": "other"}, 404, "model"),
        ({"prompt": "a", "add_generation_prompt": False}, 400, "add_generation_prompt"),
        ({"prompt": "a", "reasoning_effort": "low"}, 400, "reasoning_effort"),
        ({"prompt": "a", "n": 1}, 400, "n"),
        ({"prompt": "a", "best_of": 1}, 400, "best_of"),
        ({"prompt": "a" * 20_000}, 400, "prompt"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user"}]}, 400, "messages[0].content"),
        ({"messages": HI, "add_special_tokens": True}, 400, "add_special_tokens"),
        ({"messages": HI, "continue_final_message": True}, 400, "continue_final_message"),
        ({"messages": [{"role": "user", "content": "a" * 20_000}]}, 400, "messages"),
        ([], 400, None),
    ],
)
def test_what_cannot_be_tokenized(engine: Engine, body: Any, status: int, param: str | None) -> None:
    (found,) = ask(engine, "/tokenize", body)
    assert (found.status_code, found.json()["error"]["param"]) == (status, param), found.text


@pytest.mark.parametrize(
    "tokens", [[VOCABULARY], [-1], [10**400], [True], ["1"], [1.0], 5, "a", [[1]], [1] * 2001, {"a": 1}]
)
def test_what_cannot_be_detokenized(engine: Engine, tokens: Any) -> None:
    (found,) = ask(engine, "/detokenize", {"tokens": tokens})
    error = found.json()["error"]
    assert (found.status_code, error["param"]) == (400, "tokens")
    assert len(error["message"]) < 300


def test_requests_are_limited_as_others_are(engine: Engine) -> None:
    found = ask(engine, "/tokenize", *[{"prompt": "a"}] * 40, limits=Limits(queue=1))
    assert {one.status_code for one in found} == {200, 429}
    assert [one.status_code for one in ask(engine, "/tokenize", {"prompt": "a"}, limits=Limits(body_bytes=5))] == [413]
    keyed = Limits(keys=[KEY])
    for path in ("/tokenize", "/detokenize"):
        assert ask(engine, path, {"prompt": "a"}, limits=keyed)[0].status_code == 401


def test_any_replica_tokenizes() -> None:
    async def test(router: Router, replicas: list[Local], client: httpx.AsyncClient) -> None:
        found = (await client.post("/tokenize", json={"prompt": "a"})).json()
        text = (await client.post("/detokenize", json={"tokens": found["tokens"]})).json()
        assert (found["count"], text) == (2, {"prompt": "<s>a"})
        assert sorted(path for replica in replicas for path in replica.asked) == ["/detokenize", "/tokenize"]

    with_router(test)
