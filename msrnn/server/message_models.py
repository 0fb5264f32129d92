"""The messages of requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from msrnn.server.request_body import Body, WholeText, must
from msrnn.server.tool_models import CALLS_WORDS, NAME_WORDS, ToolCalls, ToolName
from msrnn.server.usual_fields import NOT_USED_IN_MESSAGES, allows

MOST_MESSAGES = 10_000  # of a request, and parts of a message
ROLES = ("system", "developer", "user", "assistant", "tool")


class ToolMessageError(ValueError):
    """A message has a field of calls that does not fit its role."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(problem)
        self.name = name


class UnsupportedFieldError(ValueError):
    """A message has a field of this name."""

    def __init__(self, name: str) -> None:
        super().__init__("is not supported")
        self.name = name


class TextPart(Body):
    model_config = ConfigDict(extra="ignore")

    type: Literal["text"]
    text: WholeText


Parts = Annotated[list[TextPart], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: WholeText | Parts = Field(
        description="may be null beside `tool_calls`",
        json_schema_extra=must("text, or a list of parts of type text; images and other parts are not supported"),
    )
    name: Any = Field(None, description="is not used")
    tool_calls: ToolCalls = Field(
        [], description="of the assistant: the calls of its answer", json_schema_extra=must(CALLS_WORDS)
    )
    tool_call_id: ToolName | None = Field(
        None, description="of a tool: the call whose result the content is", json_schema_extra=must(NAME_WORDS)
    )

    @model_validator(mode="before")
    @classmethod
    def _leave_out_unused(cls, message: Any) -> Any:
        """Clients send messages back with fields that say nothing. Any other one is refused by its name."""
        if not isinstance(message, dict):
            return message
        given = {name: value for name, value in message.items() if value is not None}
        for name in given.keys() - cls.model_fields.keys():
            if name not in NOT_USED_IN_MESSAGES or not allows(NOT_USED_IN_MESSAGES[name], given.pop(name)):
                raise UnsupportedFieldError(name)
        role = given.get("role")
        if given.get("tool_calls"):
            if role != "assistant":
                raise ToolMessageError("tool_calls", "only messages of the assistant have calls; leave it out")
            given.setdefault("content", "")
        if ("tool_call_id" in given) != (role == "tool"):
            raise ToolMessageError("tool_call_id", "messages of the role tool have it, and no others")
        return given

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


Messages = Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
