"""Constraints: what the text of an answer may be, as a value that a request carries."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from msrnn.checks import check_choice, is_deeper
from msrnn.errors import UsageError

Kind = Literal["json", "regex", "choice", "grammar"]
KINDS = ("json", "regex", "choice", "grammar")
MOST_BYTES = 2**16  # of a constraint's text
DEEPEST = 64  # objects and lists within each other
MOST_CHOICES = 1000
NAME = "constraint"  # the field of SamplingParams


@dataclass(frozen=True)
class Constraint:
    """What the text of an answer may be; the classmethods make one.

    kind  "json": a JSON value that a schema allows; "regex": all of it matches; "choice": one of several texts;
          "grammar": a grammar in Lark's notation allows it
    text  the schema or the texts as JSON, the regular expression, or the grammar
    """

    kind: Kind
    text: str

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KINDS)
        if not isinstance(self.text, str) or not self.text:
            raise UsageError(f"the {self.kind} is empty, or not a text", name=NAME)
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError as error:
            raise UsageError(f"has half of a character (a lone surrogate) at {error.start}", name=NAME) from None
        if size > MOST_BYTES:
            raise UsageError(f"{size:,} bytes", name=NAME, advice=f"use at most {MOST_BYTES:,}")

    @classmethod
    def json(cls, schema: Mapping[str, Any] | bool | str = True) -> Constraint:
        """A JSON value that a schema allows, which is a dict, true, or a schema as JSON text."""
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise UsageError(f"the schema is not JSON ({error!s:.100})", name=NAME) from None
        schema = {} if schema is True else schema
        if not isinstance(schema, Mapping):
            raise UsageError("must be an object, or true for any JSON", name=NAME, value=schema)
        if is_deeper(schema, DEEPEST):
            raise UsageError(f"the schema is more than {DEEPEST} levels deep", name=NAME, advice="use $defs and $ref")
        try:
            return cls("json", json.dumps(schema, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise UsageError(f"the schema is not JSON ({error!s:.100})", name=NAME) from None

    @classmethod
    def json_object(cls) -> Constraint:
        """Any JSON object."""
        return cls.json({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """A text that matches a regular expression from its beginning to its end."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Constraint:
        """One of these texts."""
        listed = not isinstance(texts, str) and isinstance(texts, Sequence)
        if not listed or not texts or not all(isinstance(text, str) and text for text in texts):
            raise UsageError("must be a list of texts, none of them empty", name=NAME, value=texts)
        if len(texts) > MOST_CHOICES:
            raise UsageError(f"{len(texts):,} texts", name=NAME, advice=f"use at most {MOST_CHOICES:,}")
        return cls("choice", json.dumps([*texts]))

    @classmethod
    def grammar(cls, text: str) -> Constraint:
        """A text that a grammar in Lark's notation allows; its first rule is `start`."""
        return cls("grammar", text)
