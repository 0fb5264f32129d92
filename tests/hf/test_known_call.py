from __future__ import annotations

from msrnn.hf.known_call import ANSWERED, ASKED, CALLED, TOOL, TOOLS


def test_the_conversation_belongs_together() -> None:
    (call,) = CALLED[-1]["tool_calls"]
    assert call["function"]["name"] == TOOLS[0]["function"]["name"] == ANSWERED[-1]["name"] == TOOL  # type: ignore[index]
    assert ANSWERED[-1]["tool_call_id"] == call["id"]
    assert (CALLED[:1], ANSWERED[:2]) == (ASKED, CALLED)
