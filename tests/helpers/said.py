"""A random model that says a given text: its answers are sampled within a grammar that the server knows nothing of."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

import msrnn
from msrnn.engine.constraint import Constraint


def say(engine: msrnn.Engine, patch: pytest.MonkeyPatch, text: str) -> None:
    """Every request from now on is answered with this text; names of added tokens in it are these tokens."""
    request, tokens = engine.request, engine.tokenizer.get_added_vocab()
    parts = re.split("(" + "|".join(map(re.escape, tokens)) + ")", text)
    written = [f"<[{tokens[part]}]>" if part in tokens else json.dumps(part) for part in parts if part]
    matcher = engine.grammars.start(Constraint.grammar("start: " + " ".join(written)))

    def answered(*args: Any, **about: Any) -> Any:
        found = request(*args, **about)
        found.matcher = matcher.copy()
        return found

    patch.setattr(engine, "request", answered)
