"""Fields of other servers that are not supported here, and their values that ask for what this server does anyway.

Each is a JSON schema, which the check reads and the OpenAPI document shows.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
MOST_NAME = 1000  # characters of `user` and other names


def _only(*values: Any) -> Schema:
    return {"enum": [*values]}


_NAME: Schema = {"type": "string", "maxLength": MOST_NAME}
_ANYWHERE: dict[str, Schema] = {
    "store": _only(False),
    "metadata": _only({}),
    "service_tier": _only("auto", "default"),
    "safety_identifier": _NAME,
    "prompt_cache_key": _NAME,
    "use_beam_search": _only(False),
    "length_penalty": _only(1, 1.0),
    "early_stopping": _only(False),
    "skip_special_tokens": _only(True),
    "spaces_between_special_tokens": _only(True),
    "include_stop_str_in_output": _only(False),
    "return_tokens_as_token_ids": _only(False),
    "return_token_ids": _only(False),
    "priority": _only(0),
}
NOT_USED_IN_CHATS: dict[str, Schema] = {
    **_ANYWHERE,
    "functions": _only([]),
    "function_call": _only("none", "auto"),
    "modalities": _only(["text"]),
    "verbosity": _only("medium"),
    "echo": _only(False),
    "add_special_tokens": _only(False),
    "documents": _only([]),
}
NOT_USED_IN_COMPLETIONS: dict[str, Schema] = {
    **_ANYWHERE,
    "add_special_tokens": _only(True),
}
NOT_USED_IN_RESPONSES: dict[str, Schema] = {
    **{name: values for name, values in _ANYWHERE.items() if name not in ("store", "metadata")},
    "background": _only(False),
    "include": _only([]),
    "stream_options": _only({}, {"include_obfuscation": False}),
    "top_logprobs": _only(0),
}
NOT_USED_IN_MESSAGES: dict[str, Schema] = {
    "annotations": _only([]),
}


def allows(schema: Schema, value: Any) -> bool:
    """Whether a value is one of a field's, or a name; in JSON true is not 1."""
    if "enum" in schema:
        return any(type(value) is type(one) and value == one for one in schema["enum"])
    return isinstance(value, str) and len(value) <= schema["maxLength"]
