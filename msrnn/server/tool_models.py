"""The fields of a request that say which tools it may call, and the calls in its history. `tools.py` reads them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from msrnn.checks import is_deeper
from msrnn.engine.constraint import DEEPEST
from msrnn.server.request_body import Body, Text, WholeText, check_whole, leave_out_nulls, must

MOST_TOOLS = 128
NAME_WORDS = "1 to 64 letters, digits, hyphens and underscores"
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


def _check_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Refuse what no template should write: it is rendered before a grammar looks at it."""
    if is_deeper(schema, DEEPEST):
        raise ValueError(f"more than {DEEPEST} levels deep")
    if schema.get("type", "object") != "object":
        raise ValueError("arguments are an object")
    check_whole(json.dumps(schema, ensure_ascii=False))
    return schema


def parse_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call. Raises a ValueError if the text is not the JSON of an object."""
    try:
        found = json.loads(text)
        shallow = isinstance(found, dict) and not is_deeper(found, DEEPEST)
        check_whole(json.dumps(found, ensure_ascii=False, allow_nan=False))
    except RecursionError:
        shallow = False
    if not shallow:
        raise ValueError(f"must be the JSON text of an object of at most {DEEPEST} levels")
    arguments: dict[str, Any] = found
    return arguments


def _check_arguments(text: str) -> str:
    parse_arguments(text)
    return text


class Function(Body):
    """A function that the model may call."""

    name: ToolName = Field(description="its name", json_schema_extra=must(NAME_WORDS))
    description: WholeText = Field("", description="what it does, for the model")
    parameters: Annotated[dict[str, Any], AfterValidator(_check_schema)] = Field(
        {},
        description="the schema of its arguments",
        json_schema_extra=must(f"a JSON schema of type object, {DEEPEST} levels deep at most"),
    )
    strict: bool = Field(False, description="every call has arguments that the schema allows")


class Tool(Body):
    type: Literal["function"]
    function: Annotated[Function, BeforeValidator(leave_out_nulls)]


class FunctionName(Body):
    name: ToolName = Field(json_schema_extra=must(NAME_WORDS))


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


ToolMode = Literal["none", "auto", "required"]
ToolChoice = ToolMode | NamedTool
CHOICE_WORDS = '"none", "auto", "required", or {"type": "function", "function": {"name": …}}'
TOOLS_WORDS = (
    f'a list of at most {MOST_TOOLS} functions: {{"type": "function", "function": {{"name": …, "parameters": …}}}}, '
    f"whose names have {NAME_WORDS}, and whose parameters are a schema of type object"
)
Tools = Annotated[list[Annotated[Tool, BeforeValidator(leave_out_nulls)]], Field(max_length=MOST_TOOLS, fail_fast=True)]


Arguments = Annotated[Text, AfterValidator(_check_arguments)]


class CalledFunction(Body):
    model_config = ConfigDict(extra="ignore")

    name: ToolName = Field(json_schema_extra=must(NAME_WORDS))
    arguments: Arguments = Field(description="JSON text", json_schema_extra=must("the JSON text of an object"))


class ToolCall(Body):
    """A call that an earlier answer has made."""

    model_config = ConfigDict(extra="ignore")

    id: ToolName = Field(json_schema_extra=must(NAME_WORDS))
    type: Literal["function"] = "function"
    function: CalledFunction


CALLS_WORDS = (
    f"a list of at most {MOST_TOOLS} calls: "
    '{"id": …, "type": "function", "function": {"name": …, "arguments": "{…}"}}, whose arguments are the JSON text '
    "of an object"
)
ToolCalls = Annotated[list[ToolCall], Field(max_length=MOST_TOOLS, fail_fast=True)]


class ShownTools(Body):
    """The tools that the chat template writes."""

    tools: Tools = Field([], description="functions that the answer may call", json_schema_extra=must(TOOLS_WORDS))


class ToolFields(ShownTools):
    """Which tools an answer may call."""

    tool_choice: ToolChoice = Field(
        "auto",
        description="needs `tools`: call none of them, as the model likes, one or more, or this one",
        json_schema_extra=must(CHOICE_WORDS),
    )
    parallel_tool_calls: bool = Field(True, description="an answer may have several calls")
