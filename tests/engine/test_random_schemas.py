"""Answers to random JSON schemas are JSON that the schema allows, by another implementation of JSON schemas."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

import msrnn
from msrnn.engine.constraint import Constraint
from msrnn.engine.requests import SamplingParams
from tests.helpers.byte_tokenizer import END, byte_model, byte_tokenizer

Schema = dict[str, Any]
ENDING = 8  # is added to the logits of the characters that end a string, a number, a list and an object
LEAST_ENDED = 0.9  # of the answers; a random model may go on for longer than it is asked to


def draw_text(draw: random.Random) -> Schema:
    kinds: list[Schema] = [
        {},
        {"minLength": 1, "maxLength": draw.randint(1, 9)},
        {"pattern": draw.choice(["^[a-c]+$", r"^\d{2,4}-x$", "^(yes|no)$"])},
        {"format": draw.choice(["date", "time", "date-time", "uuid", "ipv4", "email"])},
        {"enum": draw.sample(["a", "é", "", 'quote"', "new\nline", "€"], 3)},
    ]
    return {"type": "string", **draw.choice(kinds)}


def draw_number(draw: random.Random) -> Schema:
    least = draw.randint(-1000, 1000)
    kinds: list[Schema] = [
        {"type": "integer"},
        {"type": "integer", "minimum": least, "maximum": least + draw.randint(0, 500)},
        {"type": "integer", "exclusiveMinimum": least},
        {"type": "number", "minimum": least / 8, "exclusiveMaximum": least / 8 + 3},
        {"type": "number"},
        {"type": "integer", "multipleOf": draw.randint(2, 9)},
    ]
    return draw.choice(kinds)


def draw_schema(draw: random.Random, depth: int = 3) -> Schema:
    leaves: list[Callable[[], Schema]] = [
        lambda: draw_text(draw),
        lambda: draw_number(draw),
        lambda: {"type": "boolean"},
        lambda: {"type": "null"},
        lambda: {"const": draw.choice([1, "x", None, True, {"a": [1]}])},
        lambda: {"enum": draw.sample([0, 1.5, "x", None, False, ["a"], {}], 3)},
        lambda: {"type": draw.sample(["string", "integer", "boolean", "null"], 2)},
    ]
    if not depth:
        return draw.choice(leaves)()

    def inner() -> Schema:
        return draw_schema(draw, depth - 1)

    def record() -> Schema:
        names = draw.sample(["a", "name", "x y", "é", "long_name", 'q"'], draw.randint(1, 4))
        required = draw.sample(names, draw.randint(0, len(names)))
        more: Any = draw.choice([False, {"type": "null"}])
        properties = {name: inner() for name in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": more}

    def listing() -> Schema:
        least = draw.randint(0, 2)
        return {"type": "array", "items": inner(), "minItems": least, "maxItems": least + draw.randint(0, 2)}

    def tuple_of() -> Schema:
        return {"type": "array", "prefixItems": [inner(), inner()], "items": False, "minItems": 2}

    def reference() -> Schema:
        node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "value": draw_number(draw)}}
        return {"$defs": {"node": {**node, "additionalProperties": False}}, "$ref": "#/$defs/node"}

    nested: list[Callable[[], Schema]] = [record, record, listing, tuple_of, lambda: {"anyOf": [inner(), inner()]}]
    return draw.choice(leaves + nested + nested + ([reference] if depth == 3 else []))()


@pytest.fixture(scope="module")
def engine() -> msrnn.Engine:
    return msrnn.Engine(msrnn.MultiStateRNN(byte_model(), "tova", 16), slots=8, tokenizer=byte_tokenizer())


@pytest.mark.parametrize(("count", "seed"), [(60, 0), pytest.param(1000, 1, marks=pytest.mark.slow)])
def test_answers_validate(engine: msrnn.Engine, count: int, seed: int) -> None:
    draw, tokenizer = random.Random(seed), byte_tokenizer()
    schemas = [draw_schema(draw) for _ in range(count)]
    ending = dict.fromkeys([*tokenizer('"}],').input_ids, END], ENDING)
    params = [
        SamplingParams(max_tokens=300, seed=i, constraint=Constraint.json(schema), logit_bias=ending)
        for i, schema in enumerate(schemas)
    ]
    ended = 0
    for schema, request in zip(schemas, engine.generate(["value: "] * count, params, progress=False), strict=True):
        (answer,) = request.answers
        assert answer.error is None, schema
        if answer.finish_reason == "stop":
            ended += 1
            jsonschema.Draft202012Validator(schema).validate(json.loads(answer.text))
    assert ended >= LEAST_ENDED * count
