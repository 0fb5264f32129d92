"""A known conversation with a call of a tool, which shows how a chat template writes calls."""

from __future__ import annotations

from typing import Any

TOOL = "known_tool"
ARGUMENTS = {"known_key": "(a known value)"}
RESULT = "(a known result)"
_ID = "call12345"  # of nine letters and digits, as templates of Mistral want them
_SCHEMA = {"type": "object", "properties": {"known_key": {"type": "string", "description": "a text"}}}
_CALL = {"id": _ID, "type": "function", "function": {"name": TOOL, "arguments": ARGUMENTS}}
TOOLS = [{"type": "function", "function": {"name": TOOL, "description": "a known tool", "parameters": _SCHEMA}}]
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "(an earlier question)"}]
CALLED = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [_CALL]}]
ANSWERED = [*CALLED, {"role": "tool", "content": RESULT, "tool_call_id": _ID, "name": TOOL}]
