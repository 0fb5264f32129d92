"""A request from its JSON: each field is checked by name, and one that is not supported is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from msrnn.engine.constraint import NAME, Constraint
from msrnn.engine.requests import SamplingParams
from msrnn.errors import UsageError
from msrnn.server.errors import ApiError, bad_value, escape_name, wrong_model_error
from msrnn.server.refusals import refusal
from msrnn.server.request_models import GenerationRequest
from msrnn.server.structured import refuse_constraint
from msrnn.server.usual_fields import Schema, allows

SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "min_tokens",
    "stop_token_ids",
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
)
R = TypeVar("R", bound=BaseModel)


def read_request(kind: type[R], body: Any, not_used: Mapping[str, Schema], model: str) -> R:
    """The fields that are given, checked one by one. Raises an ApiError that names the first one that is wrong."""
    fields = _select_fields(kind, body, not_used)
    if fields.get("model", model) != model:
        raise wrong_model_error(fields["model"], model)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise refusal(error, kind, fields) from None


def _select_fields(kind: type[R], body: Any, not_used: Mapping[str, Schema]) -> dict[str, Any]:
    """The fields of the request's class; null counts as not given, and others must ask for what happens anyway."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    given = {name: value for name, value in body.items() if value is not None}
    unused = {**not_used}
    if "n" in kind.model_fields:
        unused["best_of"] = {"enum": [given.get("n", 1)]}  # as many answers are generated as returned
    for name, value in given.items():
        if name in unused and not allows(unused[name], value):
            message = f"{name}={value!r:.100} is not supported by this server: leave it out"
            raise ApiError(400, message, param=name, code="unsupported_field")
        if name not in unused and name not in kind.model_fields:
            message = f"{name!r:.100} is not supported by this server: leave it out"
            raise ApiError(400, message, param=escape_name(name), code="unsupported_field")
    return {name: value for name, value in given.items() if name not in unused}


def sampling_params(
    request: GenerationRequest,
    limit: str,
    default_tokens: int,
    defaults: Mapping[str, Any],
    constraint: tuple[str, Constraint] | None,
    **more: Any,
) -> SamplingParams:
    """The parameters of a request. `limit` is its field for the answer's length, `defaults` hold where it has none.

    `constraint` has the name of its own field.
    """
    given = {**defaults, **{name: getattr(request, name) for name in SAMPLING if name in request.model_fields_set}}
    if given.get("top_k") == -1:
        given["top_k"] = 0  # some clients write "all" in this way
    scored = "top_logprobs" if "top_logprobs" in request.model_fields_set else "logprobs"
    names = {"max_tokens": limit, "logprobs": scored}
    try:
        return SamplingParams(
            **given,
            max_tokens=getattr(request, limit) if limit in request.model_fields_set else default_tokens,
            stop=[request.stop] if isinstance(request.stop, str) else request.stop,
            logit_bias={int(token): bias for token, bias in request.logit_bias.items()},
            constraint=None if constraint is None else constraint[1],
            **more,
        )
    except UsageError as error:
        name = error.name or ""
        if name == NAME and constraint is not None:
            raise refuse_constraint(error, constraint[0]) from error
        raise bad_value(names.get(name, name), str(error)) from error
