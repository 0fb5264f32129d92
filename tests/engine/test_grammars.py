"""Grammars follow constraints: what may come next, where an answer may end, and what is refused."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from msrnn.engine.constraint import Constraint
from msrnn.engine.grammars import KEPT, GrammarError, Grammars, Matcher, find_allowed
from msrnn.errors import UsageError
from tests.helpers.byte_tokenizer import END, byte_tokenizer
from tests.helpers.characters import character_tokenizer

TOKENIZER = byte_tokenizer()
VOCABULARY = 272


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER, VOCABULARY, [END])


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER(text).input_ids
    return found


def allowed(matcher: Matcher) -> str:
    """The texts of the tokens that may come next, sorted; "." is the end."""
    (row,) = np.unpackbits(find_allowed([matcher]).view(np.uint8), axis=1, bitorder="little")
    return "".join(sorted("." if token == END else TOKENIZER.decode([token]) for token in row.nonzero()[0].tolist()))


def test_choices_are_followed_to_their_end(grammars: Grammars) -> None:
    choice = Constraint.choice(["red", "rot", "blue"])
    assert allowed(grammars.start(choice)) == "br"
    assert allowed(grammars.start(choice, ids("ro"))) == "t"
    assert allowed(grammars.start(choice, ids("rot"))) == "."
    assert allowed(grammars.start(Constraint.choice(["a", "ab"]), ids("a"))) == ".b"


def test_choices_may_have_any_characters(grammars: Grammars) -> None:
    texts = ["😀", 'a"b', "back\\slash", "100%", "//c", "{x}", "tab\tnl\n", "\u2028", "é", "\0z", "$ref", "#h", "\x7f"]
    for text in texts:
        assert allowed(grammars.start(Constraint.choice(texts), ids(text))) == "."


def test_answers_have_places_of_their_own(grammars: Grammars) -> None:
    choice = Constraint.choice(["ab", "cd"])
    one, other = grammars.start(choice), grammars.start(choice)
    one.advance(ids("a")[0])
    assert (allowed(one), allowed(other)) == ("b", "ac")
    bits = find_allowed([one, other])
    assert np.array_equal(bits[1:], find_allowed([other]))


@pytest.mark.parametrize(
    ("constraint", "text", "wrong"),
    [
        (Constraint.regex(r"[a-c]{2}\d?"), "ab1", "abc"),
        (Constraint.grammar('start: "x" num\nnum: /[0-9]+/'), "x42", "y"),
        (Constraint.json({"type": "integer", "minimum": 3, "maximum": 12}), "11", "13"),
        (Constraint.json({"enum": ["é", 1, None]}), '"é"', '"e"'),
        (Constraint.json({"type": "array", "items": {"type": "boolean"}, "maxItems": 2}), "[true,\n false]", "[1"),
        (Constraint.json({"type": "string", "pattern": "^a+$"}), '"aa"', '"ab"'),
        (Constraint.json(), '{"any": [1.5e3, "é\\n"]}', "any"),
        (Constraint.json_object(), "{}", "["),
        (
            Constraint.json(
                {
                    "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
                    "$ref": "#/$defs/node",
                }
            ),
            '{"next": {"next": {}}}',
            '{"next": 1',
        ),
    ],
)
def test_texts_that_a_constraint_allows(grammars: Grammars, constraint: Constraint, text: str, wrong: str) -> None:
    matcher = grammars.start(constraint, ids(text))
    assert "." in allowed(matcher)
    matcher.advance(END)
    with pytest.raises(UsageError, match="does not allow the beginning of the answer"):
        grammars.start(constraint, ids(wrong))


def test_white_space_does_not_go_on_without_end(grammars: Grammars) -> None:
    value = Constraint.json({"type": "array", "items": {"type": "integer"}})
    assert grammars.start(value, ids("[1," + 16 * " "))
    with pytest.raises(UsageError):
        grammars.start(value, ids("[1," + 17 * " "))


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (Constraint.regex("("), "this regex cannot be followed"),
        (Constraint.regex("(?=a)b"), "this regex cannot be followed"),
        (Constraint.grammar("start: /x"), "this grammar cannot be followed"),
        (Constraint.json({"type": "text"}), "Invalid type: text"),
        (Constraint.json({"not": {"type": "string"}}), 'Unimplemented keys: \\["not"\\]'),
        (Constraint.json({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (Constraint.json({"$ref": "#/$defs/none"}), "does not exist"),
        (Constraint.json({"$ref": "http://example.org/schema.json"}), "is not present"),
        (Constraint.json({"enum": []}), "Unsatisfiable"),
        (Constraint.json({"type": "string", "format": "weird"}), "Unknown format"),
        (Constraint.grammar("start: " + " ".join(f"r{i}" for i in range(3000))), "this grammar cannot be followed"),
        (Constraint.json({"x-guidance": {"lenient": True}, "not": {}}), "not"),
        (Constraint.grammar("start:" + 4000 * " a?" + "\na: /a/"), "this grammar is too complex; use a simpler one"),
    ],
)
def test_what_cannot_be_followed_is_refused(grammars: Grammars, constraint: Constraint, message: str) -> None:
    with pytest.raises(UsageError, match=f"constraint: .*{message}"):
        grammars.start(constraint)


def test_a_grammar_that_becomes_too_complex_is_an_error_and_not_freedom(grammars: Grammars) -> None:
    """Each of many words may be the next one, again and again."""
    words = " | ".join(f"/(a|b|{i})*c{{0,{i}}}[ab]{{{i},{2 * i}}}x?/" for i in range(1, 60))
    constraint = Constraint.grammar(f"start: word+\nword: {words}")
    matcher = grammars.start(constraint)
    with pytest.raises(GrammarError, match="too many"):  # noqa: PT012
        for token in ids("ab" * 200):
            find_allowed([matcher])
            matcher.advance(token)
    with pytest.raises(GrammarError):
        find_allowed([matcher])


def test_an_ambiguous_grammar_takes_no_endless_time(grammars: Grammars) -> None:
    """Its steps take longer and longer, which no limit of the library notices."""
    with pytest.raises(UsageError, match="this grammar is too complex"):
        grammars.start(Constraint.grammar('start: e\ne: e e | "x"'), ids("x" * 2000))


def test_stop_tokens_end_complete_texts_only(grammars: Grammars) -> None:
    matcher = grammars.start(Constraint.grammar('start: "a" <end> "b"'), ids("a"))
    with pytest.raises(GrammarError, match="no token may come next"):
        find_allowed([matcher])
    stops = Grammars(TOKENIZER, VOCABULARY, [31, 32, 63, END])  # also the last and the first bits of words
    row = find_allowed([stops.start(Constraint.regex("(.|\n)+"))])[0]
    held = np.unpackbits(row.view(np.uint8), bitorder="little")
    assert held[[31, 32, 63, END]].sum() == 0
    assert held[[30, 33, 62, 64]].sum() == 4


def test_a_schema_does_not_change_what_json_is(grammars: Grammars) -> None:
    schema = {"type": "array", "items": {"const": 1}, "x-guidance": {"item_separator": ";", "key_separator": "="}}
    assert "." in allowed(grammars.start(Constraint.json(schema), ids("[1 , 1]")))
    with pytest.raises(UsageError):
        grammars.start(Constraint.json(schema), ids("[1;"))


def test_grammars_are_compiled_once_and_the_last_ones_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, compiled = Grammars(TOKENIZER, VOCABULARY, [END]), list[Constraint]()
    compile_one = grammars._compile

    def count(constraint: Constraint) -> Any:
        compiled.append(constraint)
        return compile_one(constraint)

    monkeypatch.setattr(grammars, "_compile", count)
    every = [Constraint.regex(f"a{{{i + 1}}}") for i in range(KEPT + 1)]
    for constraint in [every[0], every[0], *every[1:], every[-1]]:
        grammars.start(constraint)
    assert compiled == every
    grammars.start(every[0])
    assert compiled == [*every, every[0]]


def test_ids_that_the_tokenizer_does_not_have_are_never_allowed(grammars: Grammars) -> None:
    (row,) = np.unpackbits(
        find_allowed([grammars.start(Constraint.regex("(.|\n)*"))]).view(np.uint8), 1, None, "little"
    )
    assert row.shape[0] == 9 * 32
    assert row[len(TOKENIZER) :].sum() == 0


def test_without_the_package_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UsageError, match=r"llguidance, which is not installed: pip install 'msrnn\[serve\]'"):
        Grammars(TOKENIZER, VOCABULARY, [END]).start(Constraint.regex("a"))


@pytest.mark.parametrize(
    ("tokenizer", "stops", "message"),
    [
        (None, [END], "give the engine a tokenizer"),
        (TOKENIZER, [], "no stop token"),
        (character_tokenizer(), [2], "cannot be structured"),
    ],
)
def test_models_whose_answers_cannot_be_structured(tokenizer: Any, stops: list[int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Grammars(tokenizer, VOCABULARY, stops).start(Constraint.regex("a"))
