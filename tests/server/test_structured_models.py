from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from msrnn.server.structured_models import ResponseFormat, StructuredOutputs

SCHEMA = {"type": "object"}


def test_fields_have_the_names_of_the_api() -> None:
    form = ResponseFormat.model_validate({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}})
    assert form.json_schema is not None
    assert form.json_schema.content == SCHEMA
    assert StructuredOutputs.model_validate({"json": SCHEMA}).content == SCHEMA


def test_null_counts_as_not_given() -> None:
    schema = {"name": "x", "schema": SCHEMA, "description": None, "strict": None}
    form = ResponseFormat.model_validate({"type": "json_schema", "json_schema": schema})
    assert form.json_schema is not None
    assert (form.json_schema.description, form.json_schema.strict) == ("", None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "json_schema", "json_schema": {"name": "x", "content": SCHEMA}},
        {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": [SCHEMA]}},
        {"type": "xml"},
    ],
)
def test_what_is_no_response_format(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ResponseFormat.model_validate(wrong)
