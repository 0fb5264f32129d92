from __future__ import annotations

import re
from typing import Any

import pytest

from msrnn.server.answer_calls import AnswerCalls
from msrnn.server.call_formats import FORMATS
from msrnn.server.tools import CallSearch

SEARCH = CallSearch(FORMATS["hermes"], frozenset({"f"}), None, [])
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def test_the_message_of_a_whole_answer() -> None:
    calls = AnswerCalls(SEARCH)
    message = calls.make_message(f"so\n{CALL}\n{CALL}")
    assert message["content"] == "so"
    first, second = message["tool_calls"]
    assert first["function"] == second["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert first["id"] != second["id"]
    assert re.fullmatch("[a-zA-Z0-9]{9}", first["id"])
    assert [calls.finish_reason(reason) for reason in ("stop", "length")] == ["tool_calls", "length"]
    assert AnswerCalls(SEARCH).make_message(CALL)["content"] is None


@pytest.mark.parametrize("search", [None, SEARCH])
def test_an_answer_of_text(search: CallSearch | None) -> None:
    calls = AnswerCalls(search)
    assert calls.make_message("so") == {"role": "assistant", "content": "so"}
    assert calls.finish_reason("stop") == "stop"
    assert AnswerCalls(search).make_message("") == {"role": "assistant", "content": ""}
    assert AnswerCalls(search).list_deltas("so", ends=True) == [{"content": "so"}]
    assert AnswerCalls(search).list_deltas("", ends=True) == []


def test_the_deltas_of_a_stream() -> None:
    calls, deltas = AnswerCalls(SEARCH), list[dict[str, Any]]()
    for character in f"so\n{CALL}{CALL} <":
        deltas += calls.list_deltas(character, ends=False)
    deltas += calls.list_deltas("", ends=True)
    assert deltas[:2] == [{"content": "s"}, {"content": "o"}]
    for index, (begun, arguments) in enumerate([deltas[2:4], deltas[4:6]]):
        (call,) = begun["tool_calls"]
        assert (call["index"], call["type"], call["function"]) == (index, "function", {"name": "f", "arguments": ""})
        assert arguments == {"tool_calls": [{"index": index, "function": {"arguments": '{"a": 1}'}}]}
    assert deltas[6:] == [{"content": " <"}]
    assert calls.finish_reason("stop") == "tool_calls"
    assert calls.finish_reason(None) is None
