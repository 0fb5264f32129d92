"""The fields of a request that say what its answer may be. `structured.py` makes a constraint of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from msrnn.engine.constraint import MOST_CHOICES
from msrnn.server.request_body import Body, Text, leave_out_nulls
from msrnn.server.usual_fields import MOST_NAME


class JsonSchema(Body):
    """A schema of `response_format`."""

    name: Annotated[Text, Field(max_length=MOST_NAME)] = Field(description="is not used")
    description: Text = Field("", description="is not used; a prompt should say what is wanted")
    content: dict[str, Any] | bool = Field(True, alias="schema", description="the answer is JSON that it allows")
    strict: bool | None = Field(None, description="is not used: every answer follows the schema")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: Annotated[JsonSchema, BeforeValidator(leave_out_nulls)] | None = None


Choices = Annotated[list[Text], Field(min_length=1, max_length=MOST_CHOICES, fail_fast=True)]


class StructuredOutputs(Body):
    """One of these fields."""

    content: dict[str, Any] | Text | bool | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
