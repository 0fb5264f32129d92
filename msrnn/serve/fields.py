"""The fields of a request: those that are supported, and values of others that ask for nothing unusual."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msrnn.engine.requests import SamplingParams
from msrnn.errors import UsageError
from msrnn.serve.errors import ApiError, bad

SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop_token_ids",
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
)
_OTHERS = (
    *("model", "max_tokens", "stop", "logit_bias", "stream", "stream_options", "user", "retention"),
    *("session_id", "session_turns"),
)
_COMMON = {*SAMPLING, *_OTHERS}
CHAT_FIELDS = _COMMON | {"messages", "max_completion_tokens", "logprobs", "top_logprobs"}
COMPLETION_FIELDS = _COMMON | {"prompt", "echo", "logprobs"}
MOST_NAME = 1000  # characters of `user` and other names


def _one_of(*values: Any) -> Callable[[Any], bool]:
    """Equal to one of these in JSON, where true is not 1."""
    return lambda value: any(type(value) is type(one) and value == one for one in values)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MOST_NAME


_USUAL_ANYWHERE: dict[str, Callable[[Any], bool]] = {
    "response_format": _one_of({"type": "text"}),
    "store": _one_of(False),
    "metadata": _one_of({}),
    "service_tier": _one_of("auto", "default"),
    "safety_identifier": _is_name,
    "prompt_cache_key": _is_name,
    "min_tokens": _one_of(0),
    "use_beam_search": _one_of(False),
    "length_penalty": _one_of(1, 1.0),
    "early_stopping": _one_of(False),
    "skip_special_tokens": _one_of(True),
    "spaces_between_special_tokens": _one_of(True),
    "include_stop_str_in_output": _one_of(False),
    "return_tokens_as_token_ids": _one_of(False),
    "return_token_ids": _one_of(False),
    "priority": _one_of(0),
}
# Values of fields that are not supported, but ask for what this server does anyway.
USUAL_IN_CHATS: dict[str, Callable[[Any], bool]] = {
    **_USUAL_ANYWHERE,
    "tools": _one_of([]),
    "tool_choice": _one_of("none", "auto"),  # there are no tools
    "parallel_tool_calls": _one_of(True, False),
    "functions": _one_of([]),
    "function_call": _one_of("none", "auto"),
    "modalities": _one_of(["text"]),
    "verbosity": _one_of("medium"),
    "echo": _one_of(False),
    "add_generation_prompt": _one_of(True),
    "continue_final_message": _one_of(False),
    "add_special_tokens": _one_of(False),
    "documents": _one_of([]),
    "chat_template_kwargs": _one_of({}),
}
USUAL_IN_COMPLETIONS: dict[str, Callable[[Any], bool]] = {
    **_USUAL_ANYWHERE,
    "suffix": _one_of(""),
    "add_special_tokens": _one_of(True),
}
USUAL_IN_MESSAGES: dict[str, Callable[[Any], bool]] = {
    "tool_calls": _one_of([]),
    "annotations": _one_of([]),
}


def given_fields(body: Any, known: set[str], usual: Mapping[str, Callable[[Any], bool]], model: str) -> dict[str, Any]:
    """The supported fields that are given; null counts as not given."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    fields = {name: value for name, value in body.items() if value is not None}
    for name in [*fields]:
        if name == "best_of" and _one_of(fields.get("n", 1))(fields[name]):
            del fields[name]  # as many answers are generated as returned
        elif name in usual and usual[name](fields[name]):
            del fields[name]
        elif name in usual or name == "best_of":
            message = f"{name}={fields[name]!r:.100} is not supported by this server: leave it out"
            raise ApiError(400, message, param=name, code="unsupported_field")
        elif name not in known:
            message = f"{name!r:.100} is not supported by this server: leave it out"
            raise ApiError(400, message, param=shown(name), code="unsupported_field")
    if fields.get("model", model) != model:
        message = f"model {fields['model']!r:.100} is not served here: the model is {model!r}"
        raise ApiError(404, message, param="model", code="model_not_found")
    if "user" in fields and not _is_name(fields["user"]):
        raise bad("user", f"user must be a string of at most {MOST_NAME:,} characters")
    return fields


def sampling_params(
    fields: Mapping[str, Any], limit: str, default_tokens: int, defaults: Mapping[str, Any], **logprobs: Any
) -> SamplingParams:
    """The parameters of a request. `limit` is its field for the answer's length, `defaults` hold where it has none."""
    given = {**defaults, **{name: fields[name] for name in SAMPLING if name in fields}}
    stop = fields.get("stop", [])
    biases = fields.get("logit_bias", {})
    if not isinstance(biases, dict) or not all(token.isdecimal() and len(token) < 10 for token in biases):
        raise bad("logit_bias", "logit_bias must be an object from token ids to numbers")
    if not isinstance(given.get("stop_token_ids", []), list):
        raise bad("stop_token_ids", "stop_token_ids must be a list of token ids")
    if not isinstance(given.get("ignore_eos", False), bool):
        raise bad("ignore_eos", "ignore_eos must be true or false")
    if isinstance(logprobs["logprobs"], bool):
        raise bad("logprobs", "logprobs must be a whole number here")
    if given.get("top_k") == -1:
        given["top_k"] = 0  # some clients write "all" in this way
    names = {"max_tokens": limit, "logprobs": "top_logprobs" if "top_logprobs" in fields else "logprobs"}
    try:
        return SamplingParams(
            **given,
            max_tokens=fields.get(limit, default_tokens),
            stop=[stop] if isinstance(stop, str) else stop if isinstance(stop, list) else [stop],
            logit_bias={int(token): bias for token, bias in biases.items()},
            **logprobs,
        )
    except UsageError as error:
        name = str(error).partition("=")[0].partition(" ")[0]
        raise bad(names.get(name, name), str(error)) from error


def retention_interval(fields: Mapping[str, Any], stream: bool) -> int:
    """After how many tokens a stream tells again what the state holds; 0: it does not."""
    every = fields.get("retention", 0)
    if type(every) is not int or every < 0:
        raise bad("retention", f"retention={every!r:.100}: must be a whole number of tokens, 0 or more")
    if every and not stream:
        raise bad("retention", "retention needs stream: true")
    return every


def boolean(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise bad(name, f"{name} must be true or false")
    return value


def shown(name: str) -> str:
    """A name that a client has sent, in an error."""
    return ascii(name)[1:-1][:100]
