from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from msrnn.engine.constraint import DEEPEST, MOST_BYTES, MOST_CHOICES, Constraint
from msrnn.engine.requests import SamplingParams
from msrnn.errors import UsageError


def nest(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def test_a_schema_may_be_a_dict_a_text_or_true() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    assert Constraint.json(schema) == Constraint.json(json.dumps(schema))
    assert json.loads(Constraint.json(schema).text) == schema
    assert [*json.loads(Constraint.json(schema).text)["properties"]] == ["b", "a"]  # answers have this order
    assert Constraint.json() == Constraint.json({}) == Constraint.json("true")
    assert Constraint.json_object() == Constraint.json({"type": "object"})


def test_constraints_are_values() -> None:
    one = Constraint.regex("a+")
    assert pickle.loads(pickle.dumps(one)) == one
    assert len({one, Constraint.regex("a+"), Constraint.choice(["a+"]), Constraint.grammar("a+")}) == 3
    assert SamplingParams(constraint=one).constraint is one


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Constraint.json("{"), "the schema is not JSON"),
        (lambda: Constraint.json("[" * 10**5), "the schema is not JSON"),
        (lambda: Constraint.json([]), "constraint=\\[\\]: must be an object"),  # type: ignore[arg-type]
        (lambda: Constraint.json(False), "must be an object"),
        (lambda: Constraint.json({"minimum": float("nan")}), "the schema is not JSON"),
        (lambda: Constraint.json({"default": {1}}), "the schema is not JSON"),
        (lambda: Constraint.json(nest(DEEPEST)), f"more than {DEEPEST} levels deep"),
        (lambda: Constraint.json(nest(10**5)), f"more than {DEEPEST} levels deep"),
        (lambda: Constraint.regex(""), "the regex is empty"),
        (lambda: Constraint.regex(None), "the regex is empty"),  # type: ignore[arg-type]
        (lambda: Constraint.regex("a" * (MOST_BYTES + 1)), "65,537 bytes; use at most 65,536"),
        (lambda: Constraint.regex("\ud800"), "half of a character"),
        (lambda: Constraint.choice([]), "must be a list of texts"),
        (lambda: Constraint.choice("ab"), "must be a list of texts"),
        (lambda: Constraint.choice(["a", ""]), "must be a list of texts"),
        (lambda: Constraint.choice(["a"] * (MOST_CHOICES + 1)), "1,001 texts; use at most 1,000"),
        (lambda: Constraint("yaml", "a"), "kind='yaml'"),  # type: ignore[arg-type]
        (lambda: SamplingParams(constraint="a+"), "must be a Constraint; make one"),  # type: ignore[arg-type]
        (lambda: SamplingParams(constraint=Constraint.regex("a"), ignore_eos=True), "leave ignore_eos out"),
        (lambda: SamplingParams(constraint=Constraint.regex("a"), min_tokens=3), "leave min_tokens out"),
    ],
)
def test_what_is_refused(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


def test_the_deepest_schema_is_taken() -> None:
    assert Constraint.json(nest(DEEPEST - 1)).kind == "json"
