"""Requests with tools, and what a history with calls has."""

from __future__ import annotations

from typing import Any

from tests.helpers.live_server import post

CHAT = "/v1/chat/completions"
KINDS = {"enum": ["cat", "dog"]}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": KINDS},
    "required": ["kind"],
    "additionalProperties": False,
}
FUNCTION: dict[str, Any] = {"name": "find_pet", "description": "finds a pet", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
OTHER = {"type": "function", "function": {"name": "wait", "parameters": {"type": "object", "properties": {}}}}
USER = {"role": "user", "content": "a pet?"}
BODY: dict[str, Any] = {"messages": [USER], "tools": [TOOL], "max_tokens": 300, "seed": 1}
NAMED = {"type": "function", "function": {"name": "find_pet"}}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "find_pet", "arguments": '{"kind": "cat"}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "content": "Bo"}


def ask(address: str, **fields: Any) -> Any:
    """The choice of the answer, or the error."""
    found = post(address, {**BODY, **fields}, CHAT).json()
    return found["error"] if "error" in found else found["choices"][0]
