"""Ways in which clients use the server: `python client_checks.py URL MODEL` tries all, and prints a line of JSON each.

It runs in an environment with these clients, without msrnn. Calls are `required`, so that any model makes them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any, Literal

import instructor
import litellm
import openai
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain.agents.structured_output import ToolStrategy
from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, Field

URL, MODEL = sys.argv[1:]
KEY = "none"
ASKED: Any = [{"role": "user", "content": "Which pet do you like?"}]
LIMIT, SEED = 400, 3
CHECKS: dict[tuple[str, str], Callable[[], None]] = {}


class Pet(BaseModel):
    """A pet."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["cat", "dog"]
    age: int = Field(ge=0, le=20)


FUNCTION = {"name": "find_pet", "description": "Find a pet.", "parameters": Pet.model_json_schema()}
# Where a schema allows further fields, random models write them without end.
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: Any = [
    {"type": "function", "function": FUNCTION},
    {"type": "function", "function": {"name": "wait", "parameters": NOTHING}},
]
FLAT: Any = [{"type": "function", **one["function"]} for one in TOOLS]


def check(package: str, way: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(work: Callable[[], None]) -> Callable[[], None]:
        CHECKS[package, way] = work
        return work

    return add


def ask() -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)


def chat() -> Any:
    return ChatOpenAI(
        model=MODEL, base_url=f"{URL}/v1", api_key=KEY, max_tokens=LIMIT, seed=SEED, temperature=1, max_retries=0
    )


@check("openai", "a model by its name")
def retrieve() -> None:
    assert ask().models.retrieve(MODEL).id == MODEL


@check("openai", "chat, whole and streamed")
def converse() -> None:
    given: Any = {"model": MODEL, "messages": ASKED, "max_tokens": 16, "temperature": 0}
    whole = ask().chat.completions.create(**given).choices[0].message.content
    parts = [chunk.choices[0].delta.content or "" for chunk in ask().chat.completions.create(**given, stream=True)]
    assert whole == "".join(parts)


@check("openai", "`chat.completions.parse`")
def parse() -> None:
    answer = ask().chat.completions.parse(model=MODEL, messages=ASKED, response_format=Pet, max_tokens=LIMIT)
    assert isinstance(answer.choices[0].message.parsed, Pet)


@check("openai", "`chat.completions.stream` with a schema")
def stream_parsed() -> None:
    given: Any = {"model": MODEL, "messages": ASKED, "response_format": Pet, "max_tokens": LIMIT}
    with ask().chat.completions.stream(**given) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Pet)


@check("openai", "tools in a loop of three calls, then an answer")
def loop() -> None:
    messages = [*ASKED]
    given: Any = {"model": MODEL, "tools": TOOLS, "max_tokens": LIMIT, "seed": SEED, "parallel_tool_calls": False}
    for _ in range(3):
        message = ask().chat.completions.create(messages=messages, tool_choice="required", **given).choices[0].message
        assert message.tool_calls
        messages.append(message)
        for call in message.tool_calls:
            if call.function.name == FUNCTION["name"]:
                Pet.model_validate_json(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "done"})
    given["max_tokens"] = 16
    assert ask().chat.completions.create(messages=messages, tool_choice="none", **given).choices[0].message.content


@check("openai", "a streamed call")
def stream_call() -> None:
    given: Any = {"model": MODEL, "messages": ASKED, "tools": TOOLS[:1], "max_tokens": LIMIT, "seed": SEED}
    with ask().chat.completions.stream(**given, tool_choice="required") as stream:
        calls = stream.get_final_completion().choices[0].message.tool_calls
    assert calls
    Pet.model_validate_json(calls[0].function.arguments)


@check("openai", "`responses.create`, whole and streamed")
def respond() -> None:
    given: Any = {"model": MODEL, "input": "Hello", "instructions": "Be brief.", "temperature": 0}
    given["max_output_tokens"] = 16
    whole = ask().responses.create(**given).output_text
    last: Any = [*ask().responses.create(**given, stream=True)][-1]  # an answer that is cut is "incomplete"
    assert last.response.output_text == whole


@check("openai", "`responses.parse`")
def respond_parsed() -> None:
    answer = ask().responses.parse(model=MODEL, input="A pet?", text_format=Pet, max_output_tokens=LIMIT)
    assert isinstance(answer.output_parsed, Pet)


@check("openai", "responses: tools in a loop of three calls, by `previous_response_id`")
def respond_in_a_loop() -> None:
    given: Any = {"model": MODEL, "tools": FLAT, "tool_choice": "required", "max_output_tokens": LIMIT}
    given["parallel_tool_calls"] = False
    answer = ask().responses.create(input="A pet?", **given)
    for _ in range(3):
        calls = [item for item in answer.output if item.type == "function_call"]
        assert calls
        done: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "done"} for call in calls]
        answer = ask().responses.create(input=done, previous_response_id=answer.id, **given)


def complete(**more: Any) -> Any:
    given = {"max_tokens": LIMIT, "seed": SEED, **more}
    return litellm.completion(model=f"openai/{MODEL}", api_base=f"{URL}/v1", api_key=KEY, messages=ASKED, **given)


@check("litellm", "chat, whole and streamed")
def complete_both() -> None:
    whole = complete(max_tokens=16, temperature=0).choices[0].message.content
    parts = [part.choices[0].delta.content or "" for part in complete(max_tokens=16, temperature=0, stream=True)]
    assert whole == "".join(parts)


@check("litellm", "`response_format=`")
def complete_schema() -> None:
    Pet.model_validate_json(complete(response_format=Pet).choices[0].message.content)


@check("litellm", "tools")
def complete_call() -> None:
    calls = complete(tools=TOOLS[:1], tool_choice="required").choices[0].message.tool_calls
    Pet.model_validate_json(calls[0].function.arguments)


def structured(method: Any) -> None:
    assert isinstance(chat().with_structured_output(Pet, method=method).invoke("A pet, as JSON?"), Pet)


@check("langchain-openai", 'structured output: `method="json_schema"`')
def structured_by_schema() -> None:
    structured("json_schema")


@check("langchain-openai", 'structured output: `method="function_calling"`')
def structured_by_call() -> None:
    structured("function_calling")


@check("langchain-openai", 'structured output: `method="json_mode"`, any JSON')
def structured_by_mode() -> None:
    found = chat().with_structured_output(None, method="json_mode", include_raw=True).invoke("A pet, as JSON?")
    json.loads(found["raw"].content)


class OneByOne(AgentMiddleware):
    """Require each tool once, in order, and then the structured answer: a random model would call them at random.

    The tools are strict: a schema that allows any further field lets a random model never end.
    """

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        done = sum(isinstance(message, ToolMessage) for message in request.messages)
        settings = {**request.model_settings, "parallel_tool_calls": False, "strict": True}
        if done < len(request.tools):
            this = {"tools": [request.tools[done]], "tool_choice": "required", "response_format": None}
            return handler(request.override(**this, model_settings=settings))
        return handler(request.override(tools=[], model_settings=settings))


@check("langchain", "an agent that calls two tools, then gives a structured answer")
def act() -> None:
    called: list[str] = []

    def find_owner(kind: Literal["cat", "dog"]) -> str:
        """Find the owner of a pet."""
        called.append("find_owner")
        return "Ann"

    def count_pets() -> int:
        """Count the pets."""
        called.append("count_pets")
        return 2

    tools = [tool(find_owner), tool(count_pets)]
    agent: Any = create_agent(chat(), tools, response_format=ToolStrategy(Pet), middleware=[OneByOne()])
    found = agent.invoke({"messages": ASKED}, {"recursion_limit": 10})
    assert called == ["find_owner", "count_pets"], called
    assert isinstance(found["structured_response"], Pet)


def extract(mode: Any) -> None:
    client = instructor.from_openai(ask(), mode=mode)
    found = client.chat.completions.create(
        model=MODEL, messages=ASKED, response_model=Pet, max_tokens=LIMIT, seed=SEED, max_retries=0
    )
    assert isinstance(found, Pet)


@check("instructor", "`Mode.JSON_SCHEMA`")
def extract_by_schema() -> None:
    extract(instructor.Mode.JSON_SCHEMA)


@check("instructor", "`Mode.TOOLS`")
def extract_by_call() -> None:
    extract(instructor.Mode.TOOLS)


def run() -> Iterator[dict[str, str]]:
    for (package, way), work in CHECKS.items():
        try:
            work()
            found = "works"
        except Exception as error:  # a report says what fails
            found = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        yield {"package": package, "version": version(package), "way": way, "found": found}


if __name__ == "__main__":
    litellm.suppress_debug_info = True
    for row in run():
        print(json.dumps(row), flush=True)
