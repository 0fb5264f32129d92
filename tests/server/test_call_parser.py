from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrnn.server.call_formats import FORMATS
from msrnn.server.call_parser import MOST_NESTED, Call, CallParser, parse_call, read_calls

NAMES = {"f", "g"}
F, G = Call("f", "{}"), Call("g", '{"a": [1, "}"]}')
WRITTEN_F, WRITTEN_G = '{"name": "f", "arguments": {}}', '{"arguments": {"a": [1, "}"]}, "name": "g"}'
WRITTEN_OPEN = '{"name": "f", "arguments": {"a": "an"s"}}'  # whose last string is not closed
OPENED = f"<tool_call>{WRITTEN_OPEN}\n"
WRITTEN_END = '{"name": "f", "arguments": {"a": "</tool_call>"}}'
PIECES = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "[",
        "]",
        ",",
        ";",
        " ",
        "\n",
        "<",
        "a",
        "{",
        "}",
    ),
    *('"', "\\", "[TOOL", "<tool_", "</tool_", WRITTEN_F, WRITTEN_G, WRITTEN_F[:-1], '{"name": "h", "arguments": {}}'),
]
texts = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


def run(form: str, pieces: list[str], most: int | None = None) -> list[Any]:
    """What a parser finds in pieces; neighbouring texts are one."""
    parser = CallParser(FORMATS[form], NAMES, most)
    found: list[Any] = []
    for one in [*(one for piece in pieces for one in parser.put(piece)), *parser.end()]:
        if found and isinstance(one, str) and isinstance(found[-1], str):
            found[-1] += one
        else:
            found.append(one)
    return found


@given(form=st.sampled_from([*FORMATS]), text=texts, cuts=st.sets(st.integers(0, 200)), most=st.sampled_from([None, 1]))
def test_how_a_text_is_cut_makes_no_difference(form: str, text: str, cuts: set[int], most: int | None) -> None:
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[start:stop] for start, stop in pairwise(places)]
    assert run(form, pieces, most) == run(form, [text], most) == run(form, [*text], most)


@given(form=st.sampled_from([*FORMATS]), text=texts)
def test_a_text_without_a_call_is_unchanged(form: str, text: str) -> None:
    found = run(form, [text])
    if not any(isinstance(one, Call) for one in found):
        assert found == ([text] if text else [])


@given(form=st.sampled_from([*FORMATS]), text=texts)
def test_nothing_but_calls_and_their_markers_is_left_out(form: str, text: str) -> None:
    written = {F: WRITTEN_F, G: WRITTEN_G}
    markers = "|".join(map(re.escape, ("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]")))
    between = rf"(?:{markers}|[ \n\[\],])*"
    parts = [re.escape(written.get(one, one)) for one in run(form, [text])]
    assert re.fullmatch(between + "".join(part + between for part in parts), text)


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        ("hermes", f"so <tool_call>{WRITTEN_F}</tool_call>\n<tool_call>\n{WRITTEN_G}\n</tool_call>\n", ["so", F, G]),
        ("hermes", f"<tool_call>{WRITTEN_F}", [F]),  # models leave the closing out
        ("hermes", f"<tool_call>{WRITTEN_F}</tool_call> so", [F, " so"]),
        ("hermes", f"<tool_call><tool_call>{WRITTEN_F}", ["<tool_call>", F]),
        ("hermes", f"<tool_call>{WRITTEN_F[:-1]}</tool_call> so", [f"<tool_call>{WRITTEN_F[:-1]}</tool_call> so"]),
        ("hermes", f"a <tool_call>x</tool_call>{WRITTEN_F}", [f"a <tool_call>x</tool_call>{WRITTEN_F}"]),
        ("hermes", f"<tool_call>{WRITTEN_OPEN}\n</tool_call>\n<tool_call>{WRITTEN_F}", [f"{OPENED}</tool_call>", F]),
        ("hermes", " <tool_ca", [" <tool_ca"]),
        ("hermes", f"<tool_call>{WRITTEN_END}</tool_call>", [Call("f", '{"a": "</tool_call>"}')]),
        ("mistral", f"[TOOL_CALLS] [{WRITTEN_F}, {WRITTEN_G}]", [F, G]),
        ("mistral", f"[TOOL_CALLS][{WRITTEN_F}] so", [F, " so"]),
        ("mistral", f"[TOOL_CALLS] [{WRITTEN_F}, so", [F, ", so"]),
        ("mistral", f"[{WRITTEN_F}]", [f"[{WRITTEN_F}]"]),
        ("mistral", f"[TOOL_CALLS] {WRITTEN_F}", [f"[TOOL_CALLS] {WRITTEN_F}"]),
        ("llama3_json", f" {WRITTEN_G}", [G]),
        ("llama3_json", f"<|python_tag|>{WRITTEN_F}", [F]),
        ("llama3_json", f"so <|python_tag|>{WRITTEN_F}", ["so", F]),
        ("llama3_json", f"so {WRITTEN_F}", [f"so {WRITTEN_F}"]),
        ("llama3_json", f"{WRITTEN_F}; {WRITTEN_G}", [F, f"; {WRITTEN_G}"]),
        ("llama3_json", '{"city": "Paris"} is it', ['{"city": "Paris"} is it']),
    ],
)  # fmt: skip
def test_calls_in_a_text(form: str, text: str, expected: list[Any]) -> None:
    assert run(form, [text]) == expected


def test_nothing_of_a_call_is_shown_before_it_is_complete() -> None:
    parser = CallParser(FORMATS["hermes"], NAMES)
    text = f"so\n<tool_call>\n{WRITTEN_G}"
    shown = [parser.put(character) for character in text]
    assert shown[:3] == [["s"], ["o"], []]
    assert [one for found in shown[2:-1] for one in found] == []
    assert shown[-1] == [G]


def test_the_most_calls() -> None:
    text = f"<tool_call>{WRITTEN_F}</tool_call>\n<tool_call>{WRITTEN_G}</tool_call>"
    assert run("hermes", [text], 1) == [F, f"\n<tool_call>{WRITTEN_G}</tool_call>"]
    assert run("mistral", [f"[TOOL_CALLS] [{WRITTEN_F}, {WRITTEN_G}]"], 1) == [F, f", {WRITTEN_G}]"]


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"name": "f"}',
        '{"name": "h", "arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"name": "f", "arguments": "{}"}',
        '{"name": "f", "arguments": {}, "parameters": {}}',
        '{"name": "f", "arguments": {}, "more": 1}',
        '{"name": "f", "name": "f", "arguments": {}}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f" "arguments": {}}',
        '{"name": "f", "arguments": {},}',
        '{"name": "f", "arguments": {"a": "\n"}}',
        '{"name": "f", "arguments": {}]',
        '{"name"]',
    ],
)
def test_objects_that_are_no_calls(text: str) -> None:
    assert parse_call(text, NAMES) is None
    assert run("llama3_json", [text]) == [text]


def test_arguments_are_as_the_model_wrote_them() -> None:
    arguments = '{ "a":1.10,\n"b" : 1e400, "\\u00e9": "é" }'
    for text in (
        f'{{"name":"f","parameters":{arguments}}}',
        f'{{"id": "1", "type": "function", "arguments": {arguments} , "name":"f" }}',
    ):
        assert parse_call(text, NAMES) == Call("f", arguments)  # fmt: skip


def test_deep_objects() -> None:
    def nest(levels: int) -> str:
        return '{"name": "f", "arguments": ' + '{"a": ' * levels + "1" + "}" * (levels + 1)

    assert run("llama3_json", [nest(MOST_NESTED - 1)]) == [Call("f", nest(MOST_NESTED - 1)[27:-1])]
    assert run("llama3_json", [nest(MOST_NESTED)]) == [nest(MOST_NESTED)]
    assert run("llama3_json", ["{" * 100_000]) == ["{" * 100_000]


def test_long_calls_take_linear_time() -> None:
    call = json.dumps({"name": "f", "arguments": {"a": "x" * 300_000}})
    content, calls = read_calls(f"<tool_call>{call}</tool_call>", FORMATS["hermes"], NAMES)
    assert (content, len(calls[0].arguments)) == ("", 300_000 + len('{"a": ""}'))
