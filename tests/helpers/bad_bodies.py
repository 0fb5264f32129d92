"""Requests by the hundred: for every field all values that are wrong for it, and those that are right.

Also bytes that are no JSON at all.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

LONG = 10**400
VALUES: list[Any] = [True, -3, 0, 1, 3.5, -0.5, 2**70, LONG, -LONG, "x", "", "\ud800", [], [1], [-1], ["a"], [[1]], {}]
VALUES += [{"a": 1}, {"1": "a"}, {"1": LONG}, {"99999999": 1}, [LONG], [None], [3.5], [True], "x" * 3000, "../x"]
VALUES += [5e-324, 1e-300, 1e-46, 1e300]
Valid = Callable[[Any], bool]


def _is(kind: type, valid: Valid = lambda _: True) -> Valid:
    return lambda value: type(value) is kind and valid(value)


def _number(least: float, most: float) -> Valid:
    return lambda value: type(value) in (int, float) and least <= value <= most


def _never(_: Any) -> bool:
    return False


_text = _is(str, lambda value: "\ud800" not in value)
COMMON: dict[str, Valid] = {
    "model": _never,
    "max_tokens": _is(int, lambda value: 1 <= value < 1900),
    "min_tokens": _is(int, lambda value: 0 <= value <= 1),  # at most `max_tokens`
    "temperature": _number(0, 100),
    "top_p": _number(1e-6, 1),
    "top_k": _is(int, lambda value: 0 <= value < 2**31),
    "min_p": _number(0, 1),
    "seed": _is(int, lambda value: -(2**63) <= value < 2**64),
    "stop": lambda value: value in ([], ["a"]) or (isinstance(value, str) and 0 < len(value) <= 1000),
    "stop_token_ids": lambda value: json.dumps(value) in ("[]", "[1]"),
    "n": _is(int, lambda value: 1 <= value <= 4),
    "logit_bias": lambda value: value == {},
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": _number(0.01, 100),
    "ignore_eos": _is(bool),
    "stream": _is(bool),
    "stream_options": _never,  # without `stream`
    "user": _is(str, lambda value: len(value) <= 1000),
    "session_id": lambda value: value == "x",
    "tools": _never,  # but in chats
    "": _never,
}
COMPLETION = {
    **COMMON,
    "prompt": lambda value: (_text(value) and value != "") or json.dumps(value) in ("[1]", '["a"]', "[[1]]"),
    "echo": _is(bool),
    "logprobs": _is(int, lambda value: 0 <= value <= 20),
    "messages": _never,
}
CHAT = {
    **COMMON,
    "messages": _never,
    "max_completion_tokens": COMMON["max_tokens"],
    "logprobs": _is(bool),
    "top_logprobs": _never,  # without `logprobs`
    "add_generation_prompt": _is(bool),
    "continue_final_message": lambda value: value is False,  # the last message is the user's
    "chat_template_kwargs": lambda value: value == {},
    "reasoning_effort": _never,  # the template has none
    "tools": lambda value: value == [],
    "prompt": _never,
}
_NOT_IN_RESPONSES = ("max_tokens", "n", "session_id")
RESPONSE = {
    **COMMON,
    **dict.fromkeys((*_NOT_IN_RESPONSES, "messages", "prompt"), _never),
    "input": _text,
    "instructions": _text,
    "previous_response_id": _never,
    "store": _is(bool),
    "max_output_tokens": COMMON["max_tokens"],
    "stream_options": lambda value: value == {},
    "tools": lambda value: value == [],
    "tool_choice": _never,
    "parallel_tool_calls": _is(bool),
    "text": lambda value: value == {},
    "reasoning": lambda value: value == {},
    "metadata": lambda value: value in ({}, {"1": "a"}),
    "truncation": _never,
    "background": lambda value: value is False,
    "include": lambda value: value == [],
    "conversation": _never,
    "chat_template_kwargs": lambda value: value == {},
}
ENDPOINTS: dict[str, tuple[dict[str, Any], dict[str, Valid]]] = {
    "/v1/completions": ({"prompt": "a", "max_tokens": 1}, COMPLETION),
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}, CHAT),
    "/v1/responses": ({"input": "a", "max_output_tokens": 1, "store": False}, RESPONSE),
}


def _with(body: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """The body with this field, without the field that means the same."""
    same = "max_tokens" if name == "max_completion_tokens" else None
    return {**{key: kept for key, kept in body.items() if key != same}, name: value}


def right_fields() -> Iterator[tuple[str, dict[str, Any]]]:
    """Path and body, one for each value that is not wrong for a field."""
    for path, (body, fields) in ENDPOINTS.items():
        for name, valid in fields.items():
            yield from ((path, _with(body, name, value)) for value in VALUES if valid(value))


def wrong_fields() -> Iterator[tuple[str, str, bytes]]:
    """Path, field and body, one for each value that is wrong for a field."""
    for path, (body, fields) in ENDPOINTS.items():
        for name, valid in fields.items():
            for value in VALUES:
                if not valid(value):
                    yield path, name, json.dumps(_with(body, name, value)).encode()
        history, kind = ("input", "input_text") if "input" in fields else ("messages", "text")
        for message in VALUES:
            yield path, history, json.dumps({**body, history: [message]}).encode()
        for content in [*VALUES, [{"type": kind}], [{"type": kind, "text": 5}]]:
            if not _text(content):
                yield path, history, json.dumps({**body, history: [{"role": "user", "content": content}]}).encode()


def not_json(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Path and body: cut bodies, bytes that are no UTF-8, deep nesting, numbers that JSON does not have."""
    draw = random.Random(seed)
    for path, (body, _) in ENDPOINTS.items():
        sound = json.dumps(body).encode()
        for deep in (b"[" * 100_000, b'{"a":' * 100_000, b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}"):
            yield path, deep
        for number in (b"NaN", b"Infinity", b"-Infinity", b"9" * 5000, b"01", b"1.", b"0x10", b"1e999"):
            yield path, sound[:-1] + b', "temperature": ' + number + b"}"
        for _ in range(count // 4):
            yield path, sound[: draw.randrange(len(sound))]
            at = draw.randrange(len(sound))
            yield path, sound[:at] + bytes([draw.choice([0xFF, 0xC0, 0x80, 0xFE])]) + sound[at:]
