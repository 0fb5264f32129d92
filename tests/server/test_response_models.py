from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from msrnn.server.request_models import ChatRequest, SamplingFields
from msrnn.server.response_models import ResponseRequest


def test_fields_of_sampling_are_those_of_chats() -> None:
    schemas = [kind.model_json_schema()["properties"] for kind in (ResponseRequest, ChatRequest)]
    one, other = ({name: schema[name] for name in SamplingFields.model_fields} for schema in schemas)
    assert one == other


def test_functions_are_strict_unless_they_say_otherwise() -> None:
    for given, strict in (({}, True), ({"strict": None}, True), ({"strict": False}, False)):
        tool = {"type": "function", "name": "f", "parameters": None, **given}
        request = ResponseRequest.model_validate({"input": "a", "tools": [tool]})
        assert (request.tools[0].strict, request.tools[0].parameters) == (strict, {})


def test_the_schema_of_input_allows_a_text() -> None:
    found = ResponseRequest.model_json_schema()["properties"]["input"]
    assert [one["type"] for one in found["anyOf"]] == ["string", "array"]
    assert "type" not in found


@pytest.mark.parametrize("depth", [70, 900])
def test_deep_schemas_are_refused(depth: int) -> None:
    deep: Any = {}
    for _ in range(depth):
        deep = {"type": "object", "properties": {"a": deep}}
    form = {"type": "json_schema", "name": "x", "schema": deep}
    with pytest.raises(ValidationError, match="levels deep"):
        ResponseRequest.model_validate({"input": "a", "text": {"format": form}})
