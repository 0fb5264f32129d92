"""Parts of requests for responses, and an engine that can follow them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msrnn
from tests.helpers.byte_tokenizer import byte_model
from tests.helpers.tool_templates import tool_tokenizer

PARAMETERS = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}},
    "required": ["kind"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "name": "find_pet", "description": "finds a pet", "parameters": PARAMETERS}
# An answer of letters: its text is the same as another one's only if its tokens are.
LETTERS = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": "^[a-z]{20}$"}},
    "required": ["a"],
    "additionalProperties": False,
}


def make_engine(sessions: Path | None = None) -> msrnn.Engine:
    rnn = msrnn.MultiStateRNN(byte_model(), "tova", 16)
    return msrnn.Engine(rnn, slots=4, tokenizer=tool_tokenizer("hermes"), sessions=sessions)


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}
