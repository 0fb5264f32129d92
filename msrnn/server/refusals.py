"""Refusals of a request's fields in words, made from the schema that the OpenAPI document shows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError

from msrnn.checks import bounds
from msrnn.errors import UsageError
from msrnn.server.errors import ApiError, bad_value, escape_name
from msrnn.server.item_models import ITEMS
from msrnn.server.message_models import ROLES, Message, ToolMessageError, UnsupportedFieldError
from msrnn.server.request_body import HalfCharacterError

_KINDS = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "string": "a string"}


def must_be(schema: Mapping[str, Any]) -> str:
    """The condition on a field, in words."""
    if "x-must" in schema:
        return str(schema["x-must"])
    if values := schema.get("enum", [schema["const"]] if "const" in schema else []):
        return ", or ".join(json.dumps(value) for value in values)
    if "anyOf" in schema:  # a value or null, which counts as not given
        return must_be(next(one for one in schema["anyOf"] if one.get("type") != "null"))
    kind = _KINDS.get(schema.get("type", ""), "anything")
    if "minimum" in schema:
        comma = "," if schema["type"] == "integer" else ""
        kind += f"{comma} {bounds(schema['minimum'], schema.get('maximum'))}"
    return f"{kind} of at most {schema['maxLength']:,} characters" if "maxLength" in schema else kind


def refusal(error: ValidationError, kind: type[BaseModel], body: Mapping[str, Any]) -> ApiError:
    """The answer to a body whose first field that is wrong is this one."""
    found = error.errors(include_url=False)
    name = found[0]["loc"][0]
    halves = (one for one in found if one["loc"][0] == name and isinstance(_cause(one), HalfCharacterError))
    first = next(halves, found[0])  # a text, or a list of them: the error of one of the two is more precise
    cause, inner = _cause(first), first["loc"][1:]
    if name == "messages" and inner:
        return _about_message(cause, *inner)
    if name == "input" and inner:
        return _about_item(first, *inner)
    if name == "stream_options" and inner and first["type"] == "bool_type":
        name = inner[0]
        return bad_value(str(name), f"{name} must be true or false")
    if isinstance(cause, HalfCharacterError):
        return bad_value(str(name), f"{name}: {cause}")
    message = f"must be {must_be(properties(kind)[str(name)])}"
    given = {"value": body[str(name)]} if name in body else {}
    return bad_value(str(name), str(UsageError(message, name=str(name), **given)))


def _cause(error: Any) -> Exception | None:
    """The exception of a check of our own."""
    cause: Exception | None = error.get("ctx", {}).get("error")
    return cause


def _about_message(cause: Exception | None, number: int | str, *inner: int | str) -> ApiError:
    where = f"messages[{number}]"
    if isinstance(cause, HalfCharacterError):
        name = next((str(one) for one in inner if one in ("tool_calls", "tool_call_id")), "content")
        return bad_value(f"{where}.{name}", f"{where}.{name}: {cause}")
    if isinstance(cause, UnsupportedFieldError):
        return bad_value(
            f"{where}.{escape_name(cause.name)}", f"{where}: {cause.name!r:.100} is not supported by this server"
        )
    if isinstance(cause, ToolMessageError):
        return bad_value(f"{where}.{cause.name}", f"{where}.{cause.name}: {cause}")
    if inner and inner[0] in ("tool_calls", "tool_call_id"):
        name = str(inner[0])
        return bad_value(f"{where}.{name}", f"{where}.{name}: must be {must_be(properties(Message)[name])}")
    if not inner or inner[0] == "role":
        return bad_value(where, f"{where}: must be an object whose role is one of {', '.join(ROLES)}")
    return bad_value(f"{where}.content", f"{where}: content must be {must_be(properties(Message)['content'])}")


def _about_item(error: Any, number: int | str, *inner: int | str) -> ApiError:
    where = f"input[{number}]"
    if error["type"] == "union_tag_invalid":
        tag = str(error["ctx"]["tag"])
        return bad_value(f"{where}.type", f"{where}: type {tag!r:.100} is not supported; items are {', '.join(ITEMS)}")
    if len(inner) < 2:
        return bad_value(where, f"{where}: must be an object whose type is one of {', '.join(ITEMS)}")
    kind, name = str(inner[0]), str(inner[1])
    if error["type"] == "extra_forbidden":
        return bad_value(f"{where}.{escape_name(name)}", f"{where}: {name!r:.100} is not supported by this server")
    if isinstance(cause := _cause(error), HalfCharacterError):
        return bad_value(f"{where}.{name}", f"{where}.{name}: {cause}")
    return bad_value(f"{where}.{name}", f"{where}.{name}: must be {must_be(properties(ITEMS[kind])[name])}")


@cache
def properties(kind: type[BaseModel]) -> dict[str, Any]:
    """The schema of each field."""
    found: dict[str, Any] = kind.model_json_schema()["properties"]
    return found
