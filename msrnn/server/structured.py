"""The fields that say what an answer may be: OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msrnn.engine.constraint import Constraint
from msrnn.errors import UsageError
from msrnn.server.errors import ApiError, bad_value
from msrnn.server.request_models import GenerationRequest

_MAKE: dict[str, Callable[[Any], Constraint]] = {
    "json": Constraint.json,
    "json_object": lambda _: Constraint.json_object(),
    "regex": Constraint.regex,
    "choice": Constraint.choice,
    "grammar": Constraint.grammar,
}


def find_constraint(request: GenerationRequest) -> tuple[str, Constraint] | None:
    """What the answer may be, and the field that says it; None: anything. Raises an ApiError if several say it."""
    found = [*_list_given(request)]
    if not found:
        return None
    if len(found) > 1:
        names = " and ".join(field for field, _, _ in found)
        raise bad_value(found[1][0], f"{names} both say what the answer may be: give one of them")
    ((field, kind, value),) = found
    try:
        return field, _MAKE[kind](value)
    except UsageError as error:
        raise refuse_constraint(error, field) from error


def refuse_constraint(error: UsageError, field: str) -> ApiError:
    """The answer to a constraint that is wrong or cannot be followed, which names the field of the request."""
    return bad_value(field, f"{field}: {error.problem}")


def _list_given(request: GenerationRequest) -> list[tuple[str, str, Any]]:
    """The field, kind and value of each constraint of a request."""
    found: list[tuple[str, str, Any]] = []
    form = request.response_format
    if form is not None and form.json_schema is not None and form.type != "json_schema":
        message = f"response_format: json_schema with type {form.type}; the type is json_schema, or leave it out"
        raise bad_value("response_format", message)
    if form is not None and form.type == "json_object":
        found.append(("response_format", "json_object", None))
    if form is not None and form.type == "json_schema":
        if form.json_schema is None:
            raise bad_value("response_format", "response_format: type json_schema needs json_schema: {name, schema}")
        found.append(("response_format", "json", form.json_schema.content))
    if request.structured_outputs is not None:
        asked = request.structured_outputs.model_dump(by_alias=True, exclude_none=True)
        kinds = [kind for kind, value in asked.items() if (kind, value) != ("json_object", False)]
        if not kinds:
            raise bad_value("structured_outputs", f"structured_outputs is empty: give one of {', '.join(_MAKE)}")
        found += [("structured_outputs", kind, asked[kind]) for kind in kinds]
    guided = {kind: getattr(request, f"guided_{kind}") for kind in ("json", "regex", "choice", "grammar")}
    return found + [(f"guided_{kind}", kind, value) for kind, value in guided.items() if value is not None]
