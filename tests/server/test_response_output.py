from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrnn.server.call_formats import FORMATS
from msrnn.server.response_output import ResponseOutput
from msrnn.server.tools import CallSearch

SEARCH = CallSearch(FORMATS["hermes"], frozenset({"f"}), None, [])
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def read(pieces: list[str], reason: str = "stop", search: CallSearch | None = SEARCH) -> tuple[ResponseOutput, Any]:
    output = ResponseOutput(search)
    events: list[Any] = []
    for number, piece in enumerate(pieces, 1):
        events += output.read(piece, reason if number == len(pieces) else None)
    return output, events


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_ids(one) for key, one in value.items() if key not in ("id", "item_id", "call_id")}
    return [without_ids(one) for one in value] if isinstance(value, list) else value


def rebuild(events: list[Any]) -> list[Any]:
    """The items that a client makes of events."""
    items: list[Any] = []
    for event in events:
        kind, place = event["type"].removeprefix("response."), event["output_index"]
        if kind == "output_item.added":
            assert place == len(items)
            items.append({**event["item"]})
            continue
        item = items[place]
        assert event.get("item_id", item["id"]) == item["id"]
        if kind == "content_part.added":
            item["content"] = [{**event["part"]}]
        elif kind == "output_text.delta":
            item["content"][event["content_index"]]["text"] += event["delta"]
        elif kind == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind == "output_text.done":
            assert item["content"][0]["text"] == event["text"]
        elif kind == "function_call_arguments.done":
            assert (item["name"], item["arguments"]) == (event["name"], event["arguments"])
        elif kind == "content_part.done":
            assert item["content"] == [event["part"]]
        else:
            assert kind == "output_item.done"
            assert {**item, "status": ""} == {**event["item"], "status": ""}
            item["status"] = event["item"]["status"]
    return items


@given(st.lists(st.sampled_from(["so", " ", "\n", CALL, CALL[:20], "<tool_call>", "{"]), max_size=6), st.data())
def test_events_add_up_to_the_items_however_the_text_is_divided(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[one:two] for one, two in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    output, events = read(pieces)
    assert rebuild(events) == output.items
    assert without_ids(output.items) == without_ids(read([text])[0].items)


def test_items_are_in_the_order_of_the_answer() -> None:
    output, events = read(["so:", CALL, "and"])
    kinds = [item["type"] for item in output.items]
    assert kinds == ["message", "function_call", "message"]
    assert {item["status"] for item in output.items} == {"completed"}
    assert len({item["id"] for item in output.items}) == 3
    assert events[-1]["item"] == output.items[-1]


def test_an_empty_answer_is_an_empty_message() -> None:
    output, events = read([""])
    assert [item["content"][0]["text"] for item in output.items] == [""]
    assert [event["type"] for event in events] == [
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]


@pytest.mark.parametrize(
    ("reason", "status"), [("stop", "completed"), ("length", "incomplete"), ("cancelled", "incomplete")]
)
def test_a_message_that_is_cut_is_incomplete(reason: str, status: str) -> None:
    output, _ = read([CALL, "so"], reason)
    assert [item["status"] for item in output.items] == ["completed", status]


def test_without_tools_all_is_text() -> None:
    output, _ = read([CALL], search=None)
    assert output.items[0]["content"][0]["text"] == CALL
