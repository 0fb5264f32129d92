from __future__ import annotations

import pytest

from msrnn.server.call_formats import FORMATS, PARSERS
from msrnn.server.call_parser import Call, read_calls
from tests.helpers.tool_templates import tool_tokenizer


@pytest.mark.parametrize("name", [*FORMATS])
def test_what_a_format_writes_it_reads(name: str) -> None:
    form = FORMATS[name]
    calls = [Call("f", '{"a": 1}'), Call("g", "{}")][: 2 if form.several else 1]
    objects = [f'{{"name": "{call.name}", "{form.key}": {call.arguments}}}' for call in calls]
    text = form.begin + form.between.join(objects) + form.end
    assert read_calls(text, form, {"f", "g"}) == ("", calls)


@pytest.mark.parametrize("name", [*FORMATS])
def test_only_the_first_character_of_a_marker_begins_it(name: str) -> None:
    """So that a parser need not look back."""
    form = FORMATS[name]
    assert form.opening.count(form.opening[0]) == 1
    assert form.closing[:1] == "" or form.closing.count(form.closing[0]) == 1


def test_markers_that_are_tokens() -> None:
    tokenizer = tool_tokenizer("hermes")
    tokens = FORMATS["hermes"].find_tokens(tokenizer)
    assert {tokenizer.decode([token]) for token in tokens.values()} == {*tokens} == {"<tool_call>", "</tool_call>"}
    assert FORMATS["mistral"].find_tokens(tokenizer) == {}
    assert FORMATS["mistral"].find_tokens(tool_tokenizer("mistral")).keys() == {"[TOOL_CALLS]"}


def test_the_names_of_parsers() -> None:
    assert PARSERS == ("auto", "hermes", "llama3_json", "mistral")
