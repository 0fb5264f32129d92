from __future__ import annotations

import json
from typing import Any

import pytest

from msrnn.engine.constraint import Constraint
from msrnn.engine.grammars import Grammars
from msrnn.errors import UsageError
from msrnn.server.call_formats import FORMATS
from msrnn.server.call_grammar import make_call_grammar
from tests.helpers.byte_tokenizer import END
from tests.helpers.tool_templates import tool_tokenizer

SCHEMAS: dict[str, Any] = {
    "f": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    "g": {"properties": {}, "additionalProperties": False},
}


def allows(form: str, text: str, markers: bool = True, several: bool = True, free: bool = False) -> bool:
    """Whether a grammar allows this text as a whole answer; markers in it are tokens if the tokenizer has them."""
    tokenizer = tool_tokenizer(form, markers)
    tokens = FORMATS[form].find_tokens(tokenizer)
    constraint = make_call_grammar(FORMATS[form], tokens, SCHEMAS, several, free)
    matcher = Grammars(tokenizer, 272, [END]).start(constraint)
    followed = all(map(matcher.inner.consume_token, tokenizer(text, add_special_tokens=False).input_ids))
    return followed and bool(matcher.inner.is_accepting())


def write(form: str, *calls: tuple[str, str]) -> str:
    one = FORMATS[form]
    objects = [f'{{"name": "{name}", "{one.key}": {arguments}}}' for name, arguments in calls]
    return one.begin + one.between.join(objects) + one.end


@pytest.mark.parametrize("markers", [True, False])
@pytest.mark.parametrize("form", [*FORMATS])
def test_calls_that_must_be_made(form: str, markers: bool) -> None:
    def check(*calls: tuple[str, str], several: bool = True) -> bool:
        return allows(form, write(form, *calls), markers, several)

    f, g = ("f", '{"a": 1}'), ("g", "{}")
    assert check(f)
    assert check(g)
    assert check(("f", '{ "a" : 1 }'))
    assert check(f, g) == FORMATS[form].several
    assert not check(f, g, several=False)
    for wrong in (("f", "{}"), ("f", '{"a": "1"}'), ("g", '{"a": 1}'), ("g", "[]"), ("h", "{}")):
        assert not check(wrong)
    assert not allows(form, "so " + write(form, f), markers)
    assert not allows(form, write(form, f) + " so", markers)
    assert not allows(form, "", markers)


@pytest.mark.parametrize("markers", [True, False])
@pytest.mark.parametrize("form", [*FORMATS])
def test_text_is_free_until_a_call_begins(form: str, markers: bool) -> None:
    def check(text: str) -> bool:
        return allows(form, text, markers, free=True)

    good, bad = write(form, ("f", '{"a": 1}')), write(form, ("f", '{"a": "1"}'))
    assert check("")
    assert check("so <b> [1] \n / é")
    assert check(good)
    assert not check(bad)
    if not FORMATS[form].bare:
        assert check(f"so\n{good}")
        assert not check(f"so\n{bad}")


@pytest.mark.parametrize("name", [*FORMATS])
def test_an_opening_of_other_tokens_is_no_text(name: str) -> None:
    """The parser would take it for a call, too, and its arguments would follow no schema."""
    tokenizer, form = tool_tokenizer(name), FORMATS[name]
    constraint = make_call_grammar(form, form.find_tokens(tokenizer), SCHEMAS, several=True, text=True)
    spelled = [
        token for letter in f"so {form.opening}" for token in tokenizer(letter, add_special_tokens=False).input_ids
    ]
    grammars = Grammars(tokenizer, 272, [END])
    grammars.start(constraint, spelled[:-1])
    with pytest.raises(UsageError, match="does not allow the beginning"):
        grammars.start(constraint, spelled)


@pytest.mark.parametrize("markers", [True, False])
@pytest.mark.parametrize("form", [*FORMATS])
def test_thoughts_are_text(form: str, markers: bool) -> None:
    """Their markers are tokens that match no regular expression."""
    tokenizer = tool_tokenizer(form, markers)
    tokenizer.add_tokens(["<think>", "</think>"])
    one = FORMATS[form]
    others = one.list_text_tokens(tokenizer)
    assert {tokenizer.decode([token]) for token in others} == {"<think>", "</think>"}
    constraint = make_call_grammar(one, one.find_tokens(tokenizer), SCHEMAS, True, True, others)
    grammars = Grammars(tokenizer, 272, [END])

    def check(text: str) -> bool:
        matcher = grammars.start(constraint)
        followed = all(map(matcher.inner.consume_token, tokenizer(text, add_special_tokens=False).input_ids))
        return followed and bool(matcher.inner.is_accepting())

    good, bad = write(form, ("f", '{"a": 1}')), write(form, ("f", '{"a": "1"}'))
    for text in ("", "so", "<think>\nso</think>", "<think></think> {so}", "a<think>", good):
        assert check(text), text
    assert not check("<user>")
    assert check(f"<think>so</think>\n{good}")
    assert check(f"<think>so</think>\n{bad}") == one.bare  # there, an object is a call at the beginning alone


def test_schemas_are_checked() -> None:
    deep: Any = {}
    for _ in range(100):
        deep = {"properties": {"a": deep}}
    for schema, words in ((deep, "f: the schema is more than 64 levels"), ({"a": "x" * 70_000}, "bytes")):
        with pytest.raises(UsageError, match=words):
            make_call_grammar(FORMATS["hermes"], {}, {"f": schema}, several=True, text=False)


def test_white_space_is_not_the_schemas_to_choose() -> None:
    schema = {"x-guidance": {"whitespace_pattern": "x*"}, "properties": {}}
    found = make_call_grammar(FORMATS["hermes"], {}, {"f": schema}, several=True, text=False)
    assert isinstance(found, Constraint)
    (line,) = [line for line in found.text.splitlines() if "%json" in line]
    assert json.loads(line.split("%json", 1)[1])["x-guidance"]["whitespace_pattern"] != "x*"
