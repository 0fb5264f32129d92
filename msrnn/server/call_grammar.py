"""The grammar of answers that call tools, in Lark's notation: the format of calls, around the schemas of arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msrnn.engine.constraint import Constraint
from msrnn.engine.grammars import JSON_OPTIONS
from msrnn.errors import UsageError
from msrnn.server.call_formats import CallFormat

Schemas = Mapping[str, Mapping[str, Any]]  # of arguments, by the name of the function


def make_call_grammar(
    form: CallFormat,
    tokens: Mapping[str, int],
    schemas: Schemas,
    several: bool,
    text: bool,
    text_tokens: Sequence[int] = (),
) -> Constraint:
    """What an answer with calls of these functions may be.

    tokens       the markers of the format that are tokens of their own
    several      whether it may have more than one call
    text         whether it may have text before calls, or nothing but text; otherwise it has a call, and nothing else
    text_tokens  added tokens that text may have, as those around a thought: they do not match regular expressions
    """
    end = f"object {_join_literals(form.end, tokens)}"
    if several and form.several:
        end = f"object ({_join_literals(form.between, tokens)} object)* {_join_literals(form.end, tokens)}"
    calls = f"{_join_literals(form.begin, tokens)} {end}"
    rules = _write_text_rules(form, tokens, calls, end, text_tokens) if text else [f"start: {calls}"]
    rules.append("object: " + " | ".join(f"object_{number}" for number in range(len(schemas))))
    for number, (name, schema) in enumerate(schemas.items()):
        head = json.dumps(f'{{"name": "{name}", "{form.key}": ')
        rules.append(f'object_{number}: {head} arguments_{number} "}}"')
        rules.append(f"arguments_{number}: %json {_write_schema(name, schema)}")
    return Constraint.grammar("\n".join(rules))


def _write_text_rules(
    form: CallFormat, tokens: Mapping[str, int], calls: str, end: str, text_tokens: Sequence[int]
) -> list[str]:
    """Rules of an answer of text, which has no opening in it, and then calls, or none.

    An opening that is a token of its own ends the text by itself. Other openings end it as soon as their text is there.
    """
    other = f"<[{','.join(map(str, text_tokens))}]>" if text_tokens else ""
    others = f"(TEXT? {other})*" if other else ""
    opening = re.escape(form.opening)
    unopened = rf"~/(.|\n)*{opening}(.|\n)*/"
    text = rf"TEXT: /(.|\n)+/ & {unopened}"
    if form.bare:
        longer = f" | FIRST? {other} {others} TEXT?" if other else ""
        first = rf"FIRST: /[^{{ \n\r\t](.|\n)*/ & {unopened}"
        return [f"start: FIRST?{longer} | {calls}", first, *([text] if other else [])]
    if form.opening in tokens:
        return [f"start: {others} TEXT? | {others} TEXT? {calls}", text]
    rest = _join_literals(form.begin.removeprefix(form.opening), tokens)
    return [f"start: {others} TEXT? | {others} opened {rest} {end}", text, rf"opened[lazy]: /(.|\n)*{opening}/"]


def _write_schema(name: str, schema: Mapping[str, Any]) -> str:
    """The schema of arguments, which are an object; white space is as in other structured answers."""
    try:
        checked = json.loads(Constraint.json({"type": "object", **schema}).text)
    except UsageError as error:
        raise UsageError(f"{name}: {error.problem}", name=error.name) from error
    return json.dumps({**checked, "x-guidance": JSON_OPTIONS})


def _join_literals(text: str, tokens: Mapping[str, int]) -> str:
    return " ".join(_list_literals(text, tokens))


def _list_literals(text: str, tokens: Mapping[str, int]) -> Iterable[str]:
    """A text in Lark's notation, its markers as tokens."""
    parts = re.split("(" + "|".join(map(re.escape, tokens)) + ")", text) if tokens else [text]
    return (f"<[{tokens[part]}]>" if part in tokens else json.dumps(part) for part in parts if part)
