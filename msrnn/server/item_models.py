"""The items of a request for a response: messages, calls of earlier responses, and their results."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from msrnn.server.message_models import MOST_MESSAGES
from msrnn.server.request_body import Body, WholeText, leave_out_nulls, must
from msrnn.server.tool_models import NAME_WORDS, Arguments, ToolName


class Part(Body):
    model_config = ConfigDict(extra="ignore")

    type: Literal["input_text", "output_text"]
    text: WholeText


Content = WholeText | Annotated[list[Part], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
_CONTENT_WORDS = must("text, or a list of parts of type input_text or output_text; images and files are not supported")


class Item(Body):
    id: Any = None  # is not used, and neither is the status
    status: Any = None


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content = Field(json_schema_extra=_CONTENT_WORDS)


class CallItem(Item):
    """A call that an earlier response has made."""

    type: Literal["function_call"]
    call_id: ToolName = Field(json_schema_extra=must(NAME_WORDS))
    name: ToolName = Field(json_schema_extra=must(NAME_WORDS))
    arguments: Arguments = Field(description="JSON text", json_schema_extra=must("the JSON text of an object"))


class ResultItem(Item):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: ToolName = Field(json_schema_extra=must(NAME_WORDS))
    output: Content = Field(json_schema_extra=_CONTENT_WORDS)


ITEMS: dict[str, type[Item]] = {"message": MessageItem, "function_call": CallItem, "function_call_output": ResultItem}


def _read_type(item: Any) -> Any:
    return item.get("type", "message") if isinstance(item, dict) else None


def _as_items(value: Any) -> Any:
    """A text is one message of the user. Null counts as not given, in items too."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    return [leave_out_nulls(item) for item in value] if isinstance(value, list) else value


def allow_text(schema: dict[str, Any]) -> None:
    """The schema of a list of items, of which a text is one."""
    items = {"type": schema.pop("type"), "items": schema.pop("items")}
    bounds = {name: schema.pop(name) for name in ("minItems", "maxItems")}
    schema |= {"anyOf": [{"type": "string"}, {**items, **bounds}]}
    schema |= must(f"a text, or a list of 1 to {MOST_MESSAGES:,} items whose type is one of {', '.join(ITEMS)}")


AnyItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")],
    Discriminator(_read_type),
]
Items = Annotated[
    list[AnyItem], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True), BeforeValidator(_as_items)
]
