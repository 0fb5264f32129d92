"""Responses over HTTP, as agents ask for them with OpenAI's client: each is the answer of the chat that it is."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pydantic
import pytest

from msrnn.server.call_detection import find_format
from msrnn.server.limits import Limits
from tests.helpers.live_server import KEY, Live, live, post, slow_down, wait_until
from tests.helpers.responses import LETTERS, TOOL, make_engine, user
from tests.helpers.said import say

RESPONSES, CHAT = "/v1/responses", "/v1/chat/completions"
NESTED = {"type": "function", "function": {**{k: v for k, v in TOOL.items() if k != "type"}, "strict": True}}
SAME: dict[str, Any] = {"seed": 7, "temperature": 1}
TEXT = {"text": {"format": {"type": "json_schema", "name": "x", "schema": LETTERS}}, "max_output_tokens": 200, **SAME}
FORMAT = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": LETTERS}},
    "max_tokens": 200,
    **SAME,
}


@pytest.fixture(scope="module")
def served() -> Iterator[Live]:
    engine = make_engine()
    with live(engine, calls=find_format(engine.tokenizer)) as found:
        yield found


@pytest.fixture
def address(served: Live) -> str:
    return served.address


def connect(address: str, key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)


@pytest.fixture
def client(address: str) -> openai.OpenAI:
    return connect(address)


def respond(address: str, **fields: Any) -> Any:
    """The response, or the error."""
    found = post(address, {"input": "hello", **TEXT, **fields}, RESPONSES).json()
    return found.get("error") or found


def chat(address: str, messages: list[Any], **fields: Any) -> str:
    found = post(address, {"messages": messages, **FORMAT, **fields}, CHAT).json()
    return str(found["choices"][0]["message"]["content"])


def text_of(response: Any) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


def test_a_response_is_the_answer_of_the_chat(address: str) -> None:
    history = [user("hello"), {"role": "assistant", "content": "so"}, user("and?")]
    found = respond(address, instructions="be brief", input=history)
    expected = chat(address, [{"role": "system", "content": "be brief"}, *history])
    assert text_of(found) == expected
    assert text_of(respond(address, instructions="be brief", input=history, store=False)) == expected
    assert text_of(respond(address, input=history)) != expected
    parts = [{"type": "input_text", "text": "hel"}, {"type": "input_text", "text": "lo"}]
    for same in ("hello", [user("hello")], [{"type": "message", "role": "user", "content": parts}]):
        assert text_of(respond(address, input=same)) == chat(address, [user("hello")])
    assert (found["status"], found["object"], found["instructions"]) == ("completed", "response", "be brief")
    prompt = post(address, {"messages": [{"role": "system", "content": "be brief"}, *history]}, "/tokenize").json()
    assert found["usage"]["input_tokens"] == prompt["count"]
    assert found["usage"]["total_tokens"] == prompt["count"] + found["usage"]["output_tokens"]


def test_a_conversation_is_a_session(address: str) -> None:
    first = respond(address, instructions="be brief")
    texts = [text_of(first)]
    expected = [chat(address, [{"role": "system", "content": "be brief"}, user("hello")], session_id="same")]
    latest = first
    for words, again in (("more", {}), ("and?", {"instructions": "be brief"})):
        latest = respond(address, input=words, previous_response_id=latest["id"], **again)
        texts.append(text_of(latest))
        expected.append(chat(address, [user(words)], session_id="same"))
    assert texts == expected
    assert len({*texts}) == 3
    assert text_of(respond(address, input="and?")) != texts[2]
    session, _, turn = latest["id"].rpartition("_")
    assert turn == "3"
    assert post_get(address, f"/v1/sessions/{session}")["turns"] == 3


def post_get(address: str, path: str) -> Any:
    return httpx.get(address + path, headers={"Authorization": f"Bearer {KEY}"}).json()


def test_only_the_newest_response_can_be_continued(address: str) -> None:
    first = respond(address)
    second = respond(address, previous_response_id=first["id"])
    for old, words in ((first["id"], second["id"]), ("resp_x", "cannot be found"), (f"{second['id']}0", "not stored")):
        error = respond(address, previous_response_id=old)
        assert (error["code"], error["param"]) == ("previous_response_not_found", "previous_response_id")
        assert words in error["message"]
    assert respond(address, previous_response_id=second["id"])["status"] == "completed"


def test_what_is_not_stored_is_not_kept(address: str, client: openai.OpenAI) -> None:
    before = len(post_get(address, "/v1/sessions?limit=1000")["data"])
    found = client.responses.create(model="tiny", input="hello", store=False, max_output_tokens=3)
    assert found.to_dict()["store"] is False
    assert len(post_get(address, "/v1/sessions?limit=1000")["data"]) == before
    with pytest.raises(openai.BadRequestError, match="not stored"):
        client.responses.create(model="tiny", input="more", previous_response_id=found.id)
    kept = client.responses.create(model="tiny", input="hello", max_output_tokens=3)
    with pytest.raises(openai.BadRequestError, match="store=false with previous_response_id"):
        client.responses.create(model="tiny", input="more", previous_response_id=kept.id, store=False)


def test_deleting_and_reading(address: str, client: openai.OpenAI) -> None:
    first = client.responses.create(model="tiny", input="hello", max_output_tokens=3)
    second = client.responses.create(model="tiny", input="more", max_output_tokens=3, previous_response_id=first.id)
    with pytest.raises(openai.NotFoundError, match="without its text"):
        client.responses.retrieve(second.id)
    with pytest.raises(openai.NotFoundError, match=second.id):
        client.responses.delete(first.id)
    client.responses.delete(second.id)
    for gone in (second.id, "resp_x"):
        with pytest.raises(openai.NotFoundError, match="there is none of this id"):
            client.responses.delete(gone)
    with pytest.raises(openai.BadRequestError, match="cannot be found"):
        client.responses.create(model="tiny", input="more", previous_response_id=second.id)
    with pytest.raises(openai.NotFoundError, match="is not supported"):
        client.responses.cancel(second.id)


def test_a_stream_is_the_same_response(address: str, client: openai.OpenAI) -> None:
    whole = respond(address)
    with client.responses.stream(model="tiny", input="hello", extra_body=TEXT) as stream:
        events = [*stream]
        final = stream.get_final_response()
    assert final.output_text == text_of(whole)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == final.output_text
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert final.usage is not None
    assert final.usage.output_tokens == whole["usage"]["output_tokens"]
    more = respond(address, input="more", previous_response_id=final.id)
    assert text_of(more) == text_of(respond(address, input="more", previous_response_id=whole["id"]))


def test_an_answer_that_is_cut_is_incomplete(client: openai.OpenAI) -> None:
    about: Any = {"model": "tiny", "input": "hello", "max_output_tokens": 3, "extra_body": {"ignore_eos": True}}
    found = client.responses.create(**about)
    assert found.incomplete_details is not None
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert found.output[0].type == "message"
    assert found.output[0].status == "incomplete"
    events = [*client.responses.create(**about, stream=True)]
    assert events[-1].type == "response.incomplete"
    assert [event.sequence_number for event in events] == [*range(len(events))]


class Pet(pydantic.BaseModel):
    kind: bool


class FindPet(pydantic.BaseModel):
    kind: bool


def test_answers_and_calls_are_parsed(client: openai.OpenAI) -> None:
    found = client.responses.parse(model="tiny", input="a pet?", text_format=Pet, max_output_tokens=300)
    assert isinstance(found.output_parsed, Pet)
    with client.responses.stream(model="tiny", input="a pet?", text_format=Pet, max_output_tokens=300) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Pet)
    tool: Any = openai.pydantic_function_tool(FindPet)
    flat: Any = {"type": "function", **tool["function"]}
    about: Any = {"tools": [flat], "tool_choice": "required", "parallel_tool_calls": False}
    with client.responses.stream(model="tiny", input="a pet?", **about, max_output_tokens=300) as stream:
        kinds = [event.type for event in stream]
        calls = [item for item in stream.get_final_response().output if item.type == "function_call"]
    assert {bool(FindPet.model_validate_json(call.arguments)) for call in calls} == {True}
    assert kinds.count("response.function_call_arguments.done") == len(calls) == 1


@pytest.mark.parametrize("by_id", [True, False])
def test_a_loop_of_three_calls(client: openai.OpenAI, by_id: bool) -> None:
    about: Any = {"model": "tiny", "tools": [TOOL], "max_output_tokens": 300, "instructions": "find pets"}
    about["parallel_tool_calls"] = False
    new: list[Any] = [user("a pet?")]
    history, previous = [*new], None
    for turn in range(3):
        asked: Any = {"input": new, "previous_response_id": previous} if by_id else {"input": history, "store": False}
        found = client.responses.create(**about, **asked, tool_choice="required", extra_body={"seed": turn})
        (call,) = found.output
        assert call.type == "function_call"
        assert json.loads(call.arguments)["kind"] in ("cat", "dog")
        new = [{"type": "function_call_output", "call_id": call.call_id, "output": f'{{"found": "{turn}\n"}}'}]
        history, previous = [*history, *found.output, *new], found.id
    asked = {"input": new, "previous_response_id": previous} if by_id else {"input": history}
    last = client.responses.create(**about, **asked, tool_choice="none", extra_body=TEXT)
    assert last.output_text.startswith("{")


def test_calls_are_those_of_the_chat(served: Live, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = 'so:\n<tool_call>\n{"name": "find_pet", "arguments": {"kind": "cat"}}\n</tool_call>\nfine'
    say(served.server.engine, monkeypatch, said)
    ways = {"tools": [{**TOOL, "strict": False}], "max_output_tokens": 300, "text": {}}
    message, call, after = respond(address, **ways)["output"]
    assert (message["content"][0]["text"], after["content"][0]["text"]) == ("so:", "\nfine")
    assert (call["name"], json.loads(call["arguments"])) == ("find_pet", {"kind": "cat"})
    monkeypatch.undo()
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Bo"}
    items = [user("hello"), message, call, after, result]
    calls = [
        {"id": call["call_id"], "type": "function", "function": {"name": "find_pet", "arguments": '{"kind": "cat"}'}}
    ]
    messages = [
        user("hello"),
        {"role": "assistant", "content": "so:\nfine", "tool_calls": calls},
        {"role": "tool", "tool_call_id": call["call_id"], "content": "Bo"},
    ]
    found = respond(address, input=items, tools=[TOOL], tool_choice="none")
    assert text_of(found) == chat(address, messages, tools=[NESTED], tool_choice="none")
    assert found["tools"] == [{**TOOL, "strict": True}]


def test_a_conversation_keeps_its_instructions_and_tools(address: str) -> None:
    first = respond(address, instructions="be brief", tools=[TOOL], tool_choice="none")
    about = {"previous_response_id": first["id"]}
    for field, value in (("instructions", "be long"), ("tools", [{**TOOL, "name": "lose_pet"}])):
        error = respond(address, **about, **{field: value, "tool_choice": "auto" if field == "tools" else "none"})
        assert (error["param"], "began with other" in error["message"]) == (field, True)
    second = respond(address, **about, instructions="be brief", tools=[TOOL], tool_choice="none")
    third = respond(address, previous_response_id=second["id"])
    assert third["status"] == "completed"
    session = third["id"].rpartition("_")[0]
    named = {"session_id": session, "tools": [NESTED], "tool_choice": "none"}
    assert chat(address, [user("more")], **named).startswith("{")  # a chat knows them, too
    plain = respond(address)
    error = respond(address, instructions="be brief", previous_response_id=plain["id"])
    assert error["param"] == "instructions"


def test_a_fork_is_a_second_conversation(address: str) -> None:
    first = respond(address, instructions="be brief")
    name, _, turn = first["id"].rpartition("_")
    fork = f"resp_{'0123456789abcdef' * 2}"
    assert post(address, {"to": fork}, f"/v1/sessions/{name}/fork").status_code == 201
    one, other = (respond(address, input="more", previous_response_id=f"{each}_{turn}") for each in (name, fork))
    assert text_of(one) == text_of(other)
    assert other["id"] == f"{fork}_2"


def test_the_guide(served: Live, client: openai.OpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    """The server's answers are given, since a random model calls no function of its own accord."""
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "serving.md").read_text()
    blocks = re.findall(r"```py\n(.*?)```", guide, flags=re.DOTALL)
    (code,) = [block for block in blocks if "responses.create" in block]
    call = '<tool_call>\n{"name": "find_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    answers, create, asked = iter([call, call, "It is dry."]), client.responses.create, list[Any]()

    def answer(**about: Any) -> Any:
        asked.append(about)
        with pytest.MonkeyPatch.context() as patch:
            say(served.server.engine, patch, next(answers))
            return create(**about, max_output_tokens=300)

    function = {"name": "find_weather", "description": "the weather of a city", "parameters": {"type": "object"}}
    names = {"client": client, "model": "tiny", "json": json, "tools": [{"type": "function", "function": function}]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client.responses, "create", answer)
        exec(compile(code, "serving.md", "exec"), names)
    assert capsys.readouterr().out == "It is dry.\n"
    assert [one["output"] for about in asked[1:] for one in about["input"]] == ["It is dry in Paris."] * 2


def test_two_requests_that_continue_one_response(served: Live, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = respond(address)
    fast = slow_down(served.server.engine, monkeypatch, 30)
    found: list[Any] = []
    about: Any = {"previous_response_id": first["id"]}
    threads = [threading.Thread(target=lambda: found.append(respond(address, **about))) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: served.server.engine.counts.running)
    with pytest.raises(openai.ConflictError, match="is being continued"):
        connect(address).responses.delete(first["id"])
    fast.set()
    for thread in threads:
        thread.join()
    answered = [one for one in found if one.get("status") == "completed"]
    refused = [one for one in found if "message" in one]
    assert (len(answered), len(refused)) == (1, 2)
    assert {one["param"] for one in refused} == {"previous_response_id"}
    assert respond(address, previous_response_id=answered[0]["id"])["id"].endswith("_3")


def test_a_conversation_survives_a_restart(tmp_path: Path) -> None:
    previous, texts = None, []
    for words in ("hello", "more"):
        engine = make_engine(tmp_path)
        with live(engine) as found:
            asked = {"previous_response_id": previous} if previous else {"instructions": "be brief"}
            answer = respond(found.address, input=words, **asked)
            previous = answer["id"]
            texts.append(text_of(answer))
            if words == "hello":
                continue
            error = respond(found.address, previous_response_id=previous, instructions="be long")
            assert error["param"] == "instructions"
            expected = [
                chat(found.address, [{"role": "system", "content": "be brief"}, user("hello")], session_id="same"),
                chat(found.address, [user("more")], session_id="same"),
            ]
    assert texts == expected


def test_responses_belong_to_a_key() -> None:
    with live(make_engine(), Limits(keys=[KEY, "other"])) as found:
        first = respond(found.address)
        with pytest.raises(openai.BadRequestError, match="another key"):
            connect(found.address, "other").responses.create(model="tiny", input="x", previous_response_id=first["id"])
        with pytest.raises(openai.NotFoundError):
            connect(found.address, "other").responses.delete(first["id"])
        assert respond(found.address, previous_response_id=first["id"])["status"] == "completed"
