"""Structured output over HTTP, as clients ask for it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

import msrnn
from tests.helpers.byte_tokenizer import byte_model, byte_tokenizer
from tests.helpers.live_server import KEY, live, post

CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["é", "b"]}}, "required": ["a"], "additionalProperties": False}
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 300, "seed": 1}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    engine = msrnn.Engine(msrnn.MultiStateRNN(byte_model(), "tova", 16), slots=4, tokenizer=byte_tokenizer())
    with live(engine) as found:
        yield found.address


@pytest.fixture
def client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=KEY)


class Pet(pydantic.BaseModel):
    kind: Literal["cat", "dog"]
    age: Literal[1, 2, 3]
    toys: list[Literal["ball", "bone"]] = pydantic.Field(max_length=2)


def test_openai_parses_answers_into_a_class(client: openai.OpenAI) -> None:
    found = client.chat.completions.parse(
        model="tiny", messages=[{"role": "user", "content": "a pet"}], response_format=Pet, max_tokens=300, seed=0
    )
    assert isinstance(found.choices[0].message.parsed, Pet)


def test_openai_parses_streams(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="tiny", messages=[{"role": "user", "content": "a pet"}], response_format=Pet, max_tokens=300, seed=0
    ) as stream:
        assert sum(event.type == "content.delta" for event in stream) > 3
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Pet)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": {"type": "json_object"}, "max_tokens": 40}, r"\{.*"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, "json"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            "json",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "description": None, "strict": None},
                }
            },
            "json",
        ),
        ({"response_format": {"type": "json_object", "json_schema": None}, "max_tokens": 40}, r"\{.*"),
        ({"guided_json": SCHEMA}, "json"),
        ({"guided_json": json.dumps(SCHEMA)}, "json"),
        ({"guided_regex": r"[ab]{2}\d"}, r"[ab]{2}\d"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'start: "x" /[0-9]/ "y"'}, r"x\dy"),
        ({"structured_outputs": {"json": SCHEMA}}, "json"),
        ({"structured_outputs": {"json_object": True}, "max_tokens": 40}, r"\{.*"),
        ({"structured_outputs": {"regex": "[xy]{3}", "json_object": False}}, "[xy]{3}"),
        ({"structured_outputs": {"choice": ["up", "down"]}, "response_format": {"type": "text"}}, "up|down"),
        ({"structured_outputs": {"grammar": 'start: "x"'}}, "x"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_every_form(address: str, fields: dict[str, Any], pattern: str, stream: bool) -> None:
    reply = post(address, {**BODY, **fields, "stream": stream}, CHAT)
    assert reply.status_code == 200, reply.text
    if stream:
        chunks = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    else:
        text = reply.json()["choices"][0]["message"]["content"]
    if pattern == "json":
        assert json.loads(text)["a"] in ("é", "b")
    else:
        assert re.fullmatch(pattern, text, re.DOTALL), text


def test_completions_and_several_answers(address: str) -> None:
    body = {"prompt": ["one", "two"], "n": 2, "guided_regex": "[a-z]{4}", "max_tokens": 9}
    texts = [choice["text"] for choice in post(address, body).json()["choices"]]
    assert len(texts) == 4
    assert all(re.fullmatch("[a-z]{4}", text) for text in texts)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format", "must be an object"),
        ({"response_format": "json"}, "response_format", "must be an object"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
            "response_format",
            'response_format: this json cannot be followed \\(Unimplemented keys: \\["not"\\]\\)',
        ),
        (
            {"response_format": {"type": "json_object", "json_schema": {"name": "x", "schema": SCHEMA}}},
            "response_format",
            "json_schema with type json_object",
        ),
        ({"guided_regex": "("}, "guided_regex", "guided_regex: this regex cannot be followed"),
        ({"guided_regex": "a" * 70_000}, "guided_regex", "70,000 bytes"),
        ({"guided_choice": []}, "guided_choice", "a list of 1 to 1,000 texts"),
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"guided_grammar": "start: x"}, "guided_grammar", "guided_grammar: this grammar cannot be followed"),
        ({"structured_outputs": {}}, "structured_outputs", "give one of json, json_object"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs", "must be an object with one of the fields"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "give one of them"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "give one of them"),
        ({"guided_regex": "a", "ignore_eos": True}, "guided_regex", "guided_regex: .*leave ignore_eos out"),
        ({"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend", "is not supported"),
    ],
)
def test_what_is_refused(address: str, fields: dict[str, Any], param: str, message: str) -> None:
    reply = post(address, {**BODY, **fields}, CHAT)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    assert re.search(message, error["message"]), error["message"]


def test_an_answer_that_is_cut_says_so(address: str) -> None:
    body = {**BODY, "guided_regex": "a{50}", "max_tokens": 5}
    choice = post(address, body, CHAT).json()["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "aaaaa")


def test_a_message_that_is_continued_follows_it_as_a_whole(address: str) -> None:
    def ask(begun: str) -> Any:
        messages = [*BODY["messages"], {"role": "assistant", "content": begun}]
        return post(
            address, {**BODY, "messages": messages, "guided_json": SCHEMA, "continue_final_message": True}, CHAT
        )

    text = ask('{"a": ').json()["choices"][0]["message"]["content"]
    assert json.loads('{"a": ' + text)["a"] in ("é", "b")
    assert "does not allow the beginning" in ask("Sure: ").json()["error"]["message"]
