"""Calls of tools over HTTP, in the formats of three families of models, as clients ask for them."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest

import msrnn
from msrnn.server.call_detection import find_format
from tests.helpers.byte_tokenizer import byte_model
from tests.helpers.live_server import KEY, Live, live, post
from tests.helpers.said import say
from tests.helpers.tool_requests import (
    BODY,
    CALL,
    CALLED,
    CHAT,
    FUNCTION,
    NAMED,
    OTHER,
    PARAMETERS,
    RESULT,
    TOOL,
    USER,
    ask,
)
from tests.helpers.tool_templates import tool_tokenizer

SAID = {  # two calls where there may be several, else one
    "hermes": 'so:\n<tool_call>\n{"name": "find_pet", "arguments": {"kind": "cat"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "find_pet", "arguments": {"kind": "<dog>"}}\n</tool_call>',
    "llama3_json": '<|python_tag|>{"name": "find_pet", "parameters": {"kind": "cat"}}',
    "mistral": '[TOOL_CALLS] [{"name": "find_pet", "arguments": {"kind": "cat"}}, '
    '{"name": "find_pet", "arguments": {"kind": "<dog>"}}]',
}


@pytest.fixture(scope="module", params=["hermes", "llama3_json", "mistral"])
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def served(form: str) -> Iterator[Live]:
    tokenizer = tool_tokenizer(form)
    engine = msrnn.Engine(msrnn.MultiStateRNN(byte_model(), "tova", 16), slots=4, tokenizer=tokenizer)
    with live(engine, calls=find_format(tokenizer)) as found:
        yield found


@pytest.fixture
def address(served: Live) -> str:
    return served.address


@pytest.fixture
def client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=KEY)


def stream(address: str, **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The message that a stream adds up to, and its choices."""
    lines = post(address, {**BODY, **fields, "stream": True}, CHAT).text.splitlines()
    choices = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    message: dict[str, Any] = {"content": "", "calls": []}
    for choice in choices:
        message["content"] += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", []):
            if call["index"] == len(message["calls"]):
                assert call["type"] == "function"
                message["calls"].append({"id": call["id"], **call["function"]})
            else:
                message["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return message, choices


def called(choice: Any) -> list[tuple[str, Any]]:
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in choice["message"]["tool_calls"]]


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_call_that_must_be_made_is_as_its_schema_says(address: str, choice: Any, seed: int) -> None:
    fields = {"tools": [TOOL, OTHER] if choice == NAMED else [TOOL], "tool_choice": choice, "seed": seed}
    fields["parallel_tool_calls"] = False
    found = ask(address, **fields)
    ((name, arguments),) = called(found)
    assert (found["finish_reason"], found["message"]["content"], name) == ("tool_calls", None, "find_pet")
    assert arguments in ({"kind": "cat"}, {"kind": "dog"})
    message, choices = stream(address, **fields)
    assert (message["content"], choices[-1]["finish_reason"]) == ("", "tool_calls")
    ((name, text),) = [(call["name"], call["arguments"]) for call in message["calls"]]
    assert (name, json.loads(text)) == ("find_pet", arguments)


def test_calls_as_the_model_likes(
    served: Live, form: str, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(served.server.engine, monkeypatch, SAID[form])
    expected = [("find_pet", {"kind": "cat"}), ("find_pet", {"kind": "<dog>"})][: 1 + (form != "llama3_json")]
    content = "so:" if form == "hermes" else None
    found = ask(served.address)
    assert (called(found), found["message"]["content"]) == (expected, content)
    message, choices = stream(served.address)
    assert [(call["name"], json.loads(call["arguments"])) for call in message["calls"]] == expected
    assert (message["content"] or None, choices[-1]["finish_reason"]) == (content, "tool_calls")
    assert not any(marker in json.dumps(choices) for marker in ("tool_call>", "TOOL_CALLS", "python_tag"))
    with client.chat.completions.stream(model="tiny", messages=[USER], tools=[TOOL], max_tokens=300) as events:  # type: ignore[list-item]
        calls = events.get_final_completion().choices[0].message.tool_calls
    functions = [call.function for call in calls or [] if call.type == "function"]
    assert [(one.name, json.loads(one.arguments)) for one in functions] == expected


def test_one_call_at_a_time(served: Live, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    say(served.server.engine, monkeypatch, SAID[form])
    found = ask(served.address, parallel_tool_calls=False)
    assert called(found) == [("find_pet", {"kind": "cat"})]
    rest = found["message"]["content"] or ""
    assert ("<dog>" in rest) == (form != "llama3_json")  # nothing is lost


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": []}])
def test_without_tools_a_call_is_text(served: Live, form: str, fields: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    say(served.server.engine, monkeypatch, SAID[form])
    found = ask(served.address, **fields)
    assert "tool_calls" not in found["message"]
    assert '{"kind": "cat"}}' in found["message"]["content"]
    assert found["finish_reason"] == "stop"


def test_text_that_only_looks_like_a_call_is_all_there(
    served: Live, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = SAID[form].replace("find_pet", "lose_pet")
    say(served.server.engine, monkeypatch, said)
    found = ask(served.address)
    assert (found["message"]["content"], found["finish_reason"]) == (said, "stop")
    message, choices = stream(served.address)
    assert (message, choices[-1]["finish_reason"]) == ({"content": said, "calls": []}, "stop")


def test_a_call_that_is_cut_is_text(served: Live, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    say(served.server.engine, monkeypatch, SAID[form])
    message, choices = stream(served.address, max_tokens=25)
    whole = ask(served.address, max_tokens=25)
    assert message == {"content": whole["message"]["content"], "calls": []}
    assert SAID[form].startswith(message["content"])
    assert choices[-1]["finish_reason"] == whole["finish_reason"] == "length"


def test_several_answers_have_calls_of_their_own(address: str) -> None:
    fields = {"tool_choice": "required", "parallel_tool_calls": False, "n": 2, "logprobs": True}
    choices = post(address, {**BODY, **fields}, CHAT).json()["choices"]
    assert [len(called(choice)) for choice in choices] == [1, 1]
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 2
    lines = post(address, {**BODY, **fields, "stream": True}, CHAT).text.splitlines()
    chunks = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    for index, choice in enumerate(choices):
        mine = [chunk for chunk in chunks if chunk["index"] == index]
        deltas = [call["function"] for chunk in mine for call in chunk["delta"].get("tool_calls", [])]
        assert (
            "".join(one["arguments"] for one in deltas) == choice["message"]["tool_calls"][0]["function"]["arguments"]
        )
        scored = [entry["token"] for chunk in mine for entry in (chunk["logprobs"] or {"content": []})["content"]]
        assert scored == [entry["token"] for entry in choice["logprobs"]["content"]]
        assert [chunk["finish_reason"] for chunk in mine if chunk["finish_reason"]] == ["tool_calls"]


class FindPet(pydantic.BaseModel):
    kind: str


def test_strict_functions_are_followed_once_a_call_begins(served: Live, form: str) -> None:
    """The bias makes the model open a call at once, where the grammar allows text, too."""
    tokens = served.server.engine.tokenizer.get_added_vocab()
    opening = tokens["<tool_call>"] if form == "hermes" else tokens.get("[TOOL_CALLS]")
    if opening is None:  # an object opens a call
        opening = served.server.engine.tokenizer("{", add_special_tokens=False)["input_ids"][0]
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]
    fields = {"tools": [strict], "parallel_tool_calls": False}
    text = ask(served.address, **fields, max_tokens=20, logit_bias={str(opening): -100})
    assert "tool_calls" not in text["message"]
    found = ask(served.address, **fields, logit_bias={str(opening): 100})
    ((_, arguments),) = called(found)
    assert arguments in ({"kind": "cat"}, {"kind": "dog"})


def test_a_loop_of_three_calls_with_openai(client: openai.OpenAI) -> None:
    tool: Any = openai.pydantic_function_tool(FindPet, name="find_pet")
    tool["function"]["parameters"] = PARAMETERS
    messages: list[Any] = [USER]
    for turn in range(3):
        found = client.chat.completions.create(
            model="tiny",
            messages=messages,
            tools=[tool],
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=300,
            seed=turn,
        )
        message = found.choices[0].message
        assert message.tool_calls
        messages.append(message)
        for call in message.tool_calls:
            assert call.type == "function"
            assert json.loads(call.function.arguments)["kind"] in ("cat", "dog")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f'{{"found": "{turn}\n"}}'})
    last = client.chat.completions.create(model="tiny", messages=messages, tools=[tool], max_tokens=5)
    assert last.usage is not None
    assert last.usage.prompt_tokens > 500


def test_the_guide(
    served: Live, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "serving.md").read_text()
    (code,) = [block for block in re.findall(r"```py\n(.*?)```", guide, flags=re.DOTALL) if "tool_calls" in block]
    form = served.server.served.calls
    assert form is not None
    said = f'{form.begin}{{"name": "find_weather", "{form.key}": {{"city": "Paris"}}}}{form.end}'
    say(served.server.engine, monkeypatch, said)
    names = {"client": client.with_options(max_retries=0), "model": "tiny"}
    exec(compile(code.replace("tools=tools)", "tools=tools, max_tokens=300)"), "serving.md", "exec"), names)
    assert "It is dry in Paris." in str(names["messages"])
    assert capsys.readouterr().out == "None\n"  # this model calls again


def test_special_tokens_of_tools_and_calls_are_refused_and_of_results_are_text(address: str, served: Live) -> None:
    tokenizer = served.server.engine.tokenizer
    bad = "a<end>b"
    tools = [{"type": "function", "function": {"name": "f", "description": bad}}]
    assert "special token" in ask(address, tools=tools)["message"]
    keyed = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {bad: {}}}}}]
    assert "special token" in ask(address, tools=keyed)["message"]
    call = {**CALL, "function": {"name": "find_pet", "arguments": json.dumps({"kind": bad})}}
    history = [USER, {**CALLED, "tool_calls": [call]}, RESULT]
    assert "special token" in ask(address, messages=history)["message"]

    def count_ends(content: str) -> int:
        body = {"messages": [USER, CALLED, {**RESULT, "content": content}], "tools": [TOOL]}
        tokens: list[int] = post(address, body, "/tokenize").json()["tokens"]
        return tokens.count(tokenizer.convert_tokens_to_ids("<end>"))

    assert count_ends(f'{bad}\n"') == count_ends("ab")


def test_results_in_another_order_are_the_same_prompt(address: str, form: str) -> None:
    if form == "llama3_json":  # whose template takes one call at a time
        return
    other = {**CALL, "id": "jklmnopqr"}
    called, results = (
        {**CALLED, "tool_calls": [CALL, other]},
        [RESULT, {**RESULT, "tool_call_id": "jklmnopqr", "content": "Di"}],
    )
    prompts = [{"messages": [USER, called, *some], "tools": [TOOL]} for some in (results, results[::-1])]
    one, two = (post(address, body, "/tokenize").json()["tokens"] for body in prompts)
    assert one == two


def test_sessions_go_on_with_results(served: Live, form: str) -> None:
    """A session has read what its own text, and the results after it, are as tokens: no more, no less."""
    engine, name, results = served.server.engine, f"ann-{next(_numbers)}", []
    called_so = SAID[form].removeprefix("so:\n")
    with pytest.MonkeyPatch.context() as patch:
        say(engine, patch, called_so)
        calls = ask(served.address, session_id=name)["message"]["tool_calls"]
    for call in calls:
        results.append({"role": "tool", "content": 'Bo\n"x"', "tool_call_id": call["id"]})
    post(served.address, {"to": f"{name}-fork"}, f"/v1/sessions/{name}/fork")
    ways: dict[str, Any] = {"temperature": 0, "max_tokens": 9, "tools": []}
    second = ask(served.address, **ways, session_id=name, messages=results)
    with pytest.MonkeyPatch.context() as patch:
        say(engine, patch, "fine")
        ask(served.address, session_id=f"{name}-fork", messages=results)
    third = ask(served.address, **ways, session_id=f"{name}-fork", messages=[USER])

    history = [USER, {"role": "assistant", "tool_calls": calls}, *results]
    texts = []
    for more in ([], [{"role": "assistant", "content": "fine"}, USER]):
        body = {"messages": [*history, *more], "tools": [] if more and form == "mistral" else [TOOL]}
        tokens = post(served.address, body, "/tokenize").json()["tokens"]
        texts.append(str(engine.tokenizer.decode(tokens)))
    text, later = texts
    if form == "mistral":  # whose template writes tools before the last question, and ids, and the model neither
        later = text + later[later.index("[/TOOL_RESULTS] fine") + len("[/TOOL_RESULTS]") + 1 :]
    if form == "llama3_json":  # whose template does not write the token that the model has begun with
        text, later = (one.replace('<model>{"name"', '<model><|python_tag|>{"name"') for one in (text, later))
    for answer, prompt in ((second, text), (third, later)):
        for call in calls:
            prompt = prompt.replace(f', "id": "{call["id"]}"', "")
        assert called_so in prompt
        tokens = post(served.address, {"prompt": prompt, "add_special_tokens": False}, "/tokenize").json()["tokens"]
        alone = post(served.address, {"prompt": tokens, "temperature": 0, "max_tokens": 9}).json()["choices"][0]["text"]
        assert answer["message"]["content"] == alone


_numbers = itertools.count()


def test_a_session_keeps_its_tools(served: Live) -> None:
    name = f"bob-{next(_numbers)}"
    first = ask(served.address, tools=[OTHER, TOOL], session_id=name, max_tokens=3)
    assert "message" in first
    for tools in ([TOOL], [TOOL, OTHER]):
        error = ask(served.address, tools=tools, session_id=name)
        assert (error["param"], "began with other tools" in error["message"]) == ("tools", True)
    assert "message" in ask(served.address, tools=[OTHER, TOOL], session_id=name, max_tokens=3)
    reordered = {**FUNCTION, "parameters": dict(reversed(PARAMETERS.items()))}
    assert list(reordered["parameters"]) != list(PARAMETERS)
    assert "message" in ask(
        served.address, tools=[OTHER, {"type": "function", "function": reordered}], session_id=name, max_tokens=3
    )
    assert "message" in ask(served.address, tools=[], session_id=name, max_tokens=3)
    plain = f"bob-{next(_numbers)}"
    ask(served.address, tools=[], session_id=plain, max_tokens=3)
    assert "began with other tools" in ask(served.address, session_id=plain)["message"]


def test_the_template_must_know_tools_and_the_format_must_be_known() -> None:
    tokenizer = tool_tokenizer("hermes")
    engine = msrnn.Engine(msrnn.MultiStateRNN(byte_model(), "tova", 16), slots=1, tokenizer=tokenizer)
    with live(engine) as found:
        error = ask(found.address)
        assert (error["param"], "--tool-call-parser (hermes, llama3_json, mistral)" in error["message"]) == (
            "tools",
            True,
        )
        engine.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        error = ask(found.address)
        assert (error["param"], "knows no tools" in error["message"]) == ("tools", True)
        error = ask(found.address, tools=[], messages=[USER, CALLED, RESULT])
        assert (error["param"], "does not write calls of tools" in error["message"]) == ("messages", True)
