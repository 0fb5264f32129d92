"""The body of a request for a response: its tools and the format of its text. `response_requests.py` reads it."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from msrnn.checks import is_deeper
from msrnn.engine.constraint import DEEPEST
from msrnn.server.item_models import Items, allow_text
from msrnn.server.request_body import Body, Text, WholeText, check_whole, leave_out_nulls, must
from msrnn.server.request_models import Effort, SamplingFields, TemplateVariables, within
from msrnn.server.structured_models import JsonSchema
from msrnn.server.tool_models import MOST_TOOLS, NAME_WORDS, Function, ToolMode, ToolName

_MOST_PAIRS, _LONGEST_KEY, _LONGEST_VALUE = 16, 64, 512  # of metadata


class ResponseTool(Function):
    type: Literal["function"]
    strict: bool = Field(True, description="every call has arguments that the schema allows")


class NamedFunction(Body):
    type: Literal["function"]
    name: ToolName = Field(json_schema_extra=must(NAME_WORDS))


class PlainFormat(Body):
    type: Literal["text", "json_object"]


class SchemaFormat(JsonSchema):
    type: Literal["json_schema"]


def _check_format(form: PlainFormat | SchemaFormat) -> PlainFormat | SchemaFormat:
    """Refuse what cannot be sent back."""
    if isinstance(form, SchemaFormat):
        if is_deeper(form.content, DEEPEST):
            raise ValueError(f"more than {DEEPEST} levels deep")
        _check_texts([form.name, form.description, form.content])
    return form


def _check_texts(value: Any) -> Any:
    check_whole(json.dumps(value, ensure_ascii=False))
    return value


class TextOptions(Body):
    format: Annotated[PlainFormat | SchemaFormat, BeforeValidator(leave_out_nulls), AfterValidator(_check_format)] = (
        PlainFormat(type="text")
    )
    verbosity: Literal["medium"] = "medium"


class Reasoning(Body):
    effort: Effort | None = None


Key = Annotated[Text, Field(max_length=_LONGEST_KEY)]
Value = Annotated[Text, Field(max_length=_LONGEST_VALUE)]
_TOOL_WORDS = (
    f'a list of at most {MOST_TOOLS} functions: {{"type": "function", "name": …, "parameters": …}}, whose names have '
    f"{NAME_WORDS}, and whose parameters are a schema of type object; tools that a server runs itself, as web_search, "
    "are not supported"
)


class ResponseRequest(SamplingFields, TemplateVariables):
    input: Items = Field(
        description="what is new: messages, and results of calls; without `previous_response_id`, the conversation",
        json_schema_extra=allow_text,
    )
    instructions: WholeText | None = Field(
        None, description="the system message at the beginning of the conversation; later, the same or none"
    )
    previous_response_id: Text | None = Field(
        None, description="the response that this one continues: the newest of its conversation"
    )
    store: bool = Field(True, description="keep the state after the response, so that it can be continued")
    max_output_tokens: Annotated[int, within("max_tokens", least=1)] | None = Field(
        None, description="tokens of the answer, at most"
    )
    tools: Annotated[
        list[Annotated[ResponseTool, BeforeValidator(leave_out_nulls)]], Field(max_length=MOST_TOOLS, fail_fast=True)
    ] = Field([], description="functions that the answer may call", json_schema_extra=must(_TOOL_WORDS))
    tool_choice: ToolMode | NamedFunction = Field(
        "auto",
        description="needs `tools`: call none of them, as the model likes, one or more, or this one",
        json_schema_extra=must('"none", "auto", "required", or {"type": "function", "name": …}'),
    )
    parallel_tool_calls: bool = Field(True, description="an answer may have several calls")
    text: Annotated[TextOptions, BeforeValidator(leave_out_nulls)] = Field(
        TextOptions(),
        description="the answer is any text, a JSON object, or JSON that a schema allows",
        json_schema_extra=must(
            'an object: {"format": {"type": "text"}}, or with the type json_object, or {"type": "json_schema", '
            '"name": …, "schema": …}'
        ),
    )
    reasoning: Annotated[Reasoning, BeforeValidator(leave_out_nulls)] = Field(
        Reasoning(),
        description="its `effort` is the variable `reasoning_effort` of the chat template",
        json_schema_extra=must('an object, and may have effort only, one of the values of "reasoning_effort" of chats'),
    )
    metadata: Annotated[dict[Key, Value], Field(max_length=_MOST_PAIRS), AfterValidator(_check_texts)] = Field(
        {},
        description="is sent back",
        json_schema_extra=must(
            f"an object of at most {_MOST_PAIRS} texts of at most {_LONGEST_VALUE} characters, with keys of at most "
            f"{_LONGEST_KEY}"
        ),
    )
    truncation: Literal["auto", "disabled"] = Field(
        "disabled", description="makes no difference: the state has a bound, and a prompt above the limit is refused"
    )
