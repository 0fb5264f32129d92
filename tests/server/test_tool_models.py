from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from msrnn.server.tool_models import MOST_TOOLS, NamedTool, ToolCall, ToolFields, parse_arguments


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


def test_fields_that_are_left_out_or_null() -> None:
    (found,) = ToolFields.model_validate({"tools": [tool(description=None, parameters=None, strict=None)]}).tools
    assert (found.function.description, found.function.parameters, found.function.strict) == ("", {}, False)
    nothing = ToolFields.model_validate({})
    assert (nothing.tools, nothing.tool_choice, nothing.parallel_tool_calls) == ([], "auto", True)


def test_the_choice() -> None:
    for choice in ("none", "auto", "required"):
        assert ToolFields.model_validate({"tool_choice": choice}).tool_choice == choice
    named = ToolFields.model_validate({"tool_choice": {"type": "function", "function": {"name": "f"}}}).tool_choice
    assert isinstance(named, NamedTool)
    assert named.function.name == "f"


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [tool()] * (MOST_TOOLS + 1)},
        {"tools": [tool(name="")]},
        {"tools": [tool(name="a" * 65)]},
        {"tools": [tool(name="a\n")]},
        {"tools": [tool(name='a"')]},
        {"tools": [tool(parameters=[])]},
        {"tools": [tool(parameters={"type": "array"})]},
        {"tools": [tool(parameters={"a": "\ud800"})]},
        {"tools": [tool(more=1)]},
        {"tools": [{"type": "custom", "custom": {"name": "a"}}]},
        {"tool_choice": {"type": "allowed_tools", "mode": "auto"}},
        {"parallel_tool_calls": 1},
    ],
)
def test_what_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ToolFields.model_validate(fields)


def test_arguments() -> None:
    assert parse_arguments('{"a": {"é": 1}}') == {"a": {"é": 1}}
    deep = '{"a": ' * 65 + "1" + "}" * 65
    for text in ("", "[]", "1", "{", "{'a': 1}", '{"a": NaN}', '{"a": 1e999}', deep, '{"a":' * 99_999):
        with pytest.raises(ValueError, match=r"."):
            parse_arguments(text)


def test_clients_send_calls_back_with_more_fields() -> None:
    call = {"id": "a", "index": 0, "function": {"name": "f", "arguments": "{}", "parsed_arguments": {}}}
    assert ToolCall.model_validate(call).function.arguments == "{}"
