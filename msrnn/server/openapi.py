"""The OpenAPI description of a server, made from the classes that check its requests and from what it serves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

import msrnn
from msrnn.engine.session_id import NAME_PATTERN
from msrnn.server.keys import is_guarded
from msrnn.server.message_models import Message
from msrnn.server.protocol import Served
from msrnn.server.refusals import must_be
from msrnn.server.request_models import (
    NAME_WORDS,
    ChatRequest,
    CompletionRequest,
    ForkRequest,
)
from msrnn.server.response_models import ResponseRequest
from msrnn.server.responses import PATH as RESPONSES
from msrnn.server.sessions import MOST, USUAL
from msrnn.server.tokenizing import DetokenizeRequest, TokenizeRequest
from msrnn.server.usual_fields import (
    NOT_USED_IN_CHATS,
    NOT_USED_IN_COMPLETIONS,
    NOT_USED_IN_MESSAGES,
    NOT_USED_IN_RESPONSES,
    Schema,
)

PATH = "/openapi.json"
JSON, EVENTS, PLAIN, HTML = "application/json", "text/event-stream", "text/plain", "text/html"
_STATUSES = {
    400: "a field is wrong or not supported; `param` names it",
    401: "no key, or a wrong one",
    403: "a name of this server, or a page, that is not allowed",
    404: "there is no such model, session or response",
    408: "the body did not arrive in time",
    409: "the session is in use, or has changed",
    413: "the body is too large",
    415: "a browser must send application/json",
    429: "too many requests wait; try again after `Retry-After` seconds",
    500: "an error of the server",
    503: "the server is shutting down, or is not ready",
    507: "there is no room for the session",
}
_LENGTHS = ("max_tokens", "max_output_tokens")  # of an answer
_ALWAYS, _KEYED, _BODY = (403,), (401,), (400, 408, 413, 415)


@dataclass(frozen=True)
class Endpoint:
    """A path and a method: what it does, what it takes, and a request that works."""

    method: str
    path: str
    summary: str
    replies: tuple[str, ...] = (JSON,)
    status: int = 200
    errors: tuple[int, ...] = ()
    body: type[BaseModel] | None = None
    not_used: Mapping[str, Schema] | None = None
    example: Any = None
    paged: bool = False

    @property
    def keyed(self) -> bool:
        return is_guarded(self.path)


_READ = (404, 429, 500, 503)
_ASKED = (404, 409, 429, 500, 503, 507)
_CHAT = {"messages": [{"role": "user", "content": "What is a multi-state RNN?"}], "max_tokens": 32}
_RESPONSE = {"input": "What is a multi-state RNN?", "max_output_tokens": 32}
_TOKENIZE = {"messages": [{"role": "user", "content": "What is a multi-state RNN?"}]}
_COMPLETION = {"prompt": "The sea", "max_tokens": 32, "temperature": 0}
_SESSION = "/v1/sessions/{name}"
_FOUND = (400, 404, 500, 503)
ENDPOINTS = (
    Endpoint(
        "post",
        "/v1/chat/completions",
        "Answer a conversation.",
        (JSON, EVENTS),
        errors=_ASKED,
        body=ChatRequest,
        not_used=NOT_USED_IN_CHATS,
        example=_CHAT,
    ),
    Endpoint(
        "post",
        "/v1/completions",
        "Go on with a text or with token ids.",
        (JSON, EVENTS),
        errors=_ASKED,
        body=CompletionRequest,
        not_used=NOT_USED_IN_COMPLETIONS,
        example=_COMPLETION,
    ),
    Endpoint(
        "post",
        RESPONSES,
        "Respond to items, or continue an earlier response.",
        (JSON, EVENTS),
        errors=_ASKED,
        body=ResponseRequest,
        not_used=NOT_USED_IN_RESPONSES,
        example=_RESPONSE,
    ),
    Endpoint(
        "delete",
        f"{RESPONSES}/{{response}}",
        "Delete the newest response of a conversation.",
        errors=(*_FOUND, 409),
    ),
    Endpoint(
        "post",
        "/tokenize",
        "The tokens that a prompt or a conversation has, and the most that a request may have.",
        errors=_READ,
        body=TokenizeRequest,
        example=_TOKENIZE,
    ),
    Endpoint(
        "post",
        "/detokenize",
        "The text of tokens, with special ones.",
        errors=_READ,
        body=DetokenizeRequest,
        example={"tokens": [1, 2]},
    ),
    Endpoint("get", "/v1/models", "The model: its policy, its size and its defaults.", errors=(500, 503)),
    Endpoint("get", "/v1/models/{model}", "The same for one name, which may have slashes.", errors=(404, 500, 503)),
    Endpoint(
        "get",
        "/v1/sessions",
        "The sessions of this key, the last used first.",
        errors=(400, 500, 503),
        paged=True,
    ),
    Endpoint("get", _SESSION, "One session: its tokens, turns and bytes.", errors=_FOUND),
    Endpoint("delete", _SESSION, "Delete a session.", errors=(*_FOUND, 409)),
    Endpoint("get", f"{_SESSION}/memory", "Which tokens a session holds after its last turn.", errors=(*_FOUND, 409)),
    Endpoint(
        "post",
        f"{_SESSION}/fork",
        "Make a second session that continues from the same turn.",
        status=201,
        errors=(*_FOUND, 409, 507),
        body=ForkRequest,
        example={"to": "bob"},
    ),
    Endpoint("post", f"{_SESSION}/stop", "End the answer that is under way as it is.", errors=_FOUND),
    Endpoint("get", "/health", "Whether the server takes requests.", errors=(503,)),
    Endpoint("get", "/metrics", "What Prometheus reads.", (PLAIN,)),
    Endpoint("get", "/version", "The version of msrnn."),
    Endpoint("get", "/", "The chat page.", (HTML,)),
    Endpoint("get", "/docs", "This description as a page.", (HTML,)),
    Endpoint("get", PATH, "This description."),
)


def describe_api(served: Served, keyed: bool) -> dict[str, Any]:
    """The description; `keyed`: requests must send a key where `is_guarded`."""
    components: dict[str, Any] = {"schemas": dict(_schemas(served))}
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method] = _operation(endpoint, served.name)
    info = {"title": f"msrnn: {served.name}", "version": msrnn.__version__}
    document = {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}
    return add_keys(document) if keyed else document


def add_keys(document: dict[str, Any]) -> dict[str, Any]:
    """The description of a server whose requests must send a key, but to open paths."""
    components = {**document["components"], "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
    paths = {path: {**methods} for path, methods in document["paths"].items()}
    for endpoint in ENDPOINTS:
        if endpoint.keyed:
            operation = paths[endpoint.path][endpoint.method]
            responses = {**operation["responses"], **_refusals(_KEYED)}
            paths[endpoint.path][endpoint.method] = {**operation, "security": [{"key": []}], "responses": responses}
    return {**document, "components": components, "paths": paths}


def _operation(endpoint: Endpoint, model: str) -> dict[str, Any]:
    content: dict[str, Any] = {kind: {} for kind in endpoint.replies}
    errors = {*endpoint.errors, *_ALWAYS, *(_BODY if endpoint.body else ())}
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "responses": {str(endpoint.status): {"description": "The reply.", "content": content}, **_refusals(errors)},
    }
    if parameters := [*_parameters(endpoint, model)]:
        operation["parameters"] = parameters
    if endpoint.body:
        content = {JSON: {"schema": _ref(endpoint.body.__name__), "example": endpoint.example}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _refusals(statuses: Any) -> dict[str, Any]:
    content = {JSON: {"schema": _ref("Error")}}
    return {str(status): {"description": _STATUSES[status], "content": content} for status in sorted(statuses)}


def _parameters(endpoint: Endpoint, model: str) -> Iterator[dict[str, Any]]:
    if "{model}" in endpoint.path:
        schema: dict[str, Any] = {"type": "string", "x-must": "the name of the model"}
        yield {"name": "model", "in": "path", "required": True, "schema": schema, "example": model}
    if "{response}" in endpoint.path:
        schema = {"type": "string", "x-must": "the id of a response"}
        yield {"name": "response", "in": "path", "required": True, "schema": schema, "example": f"resp_{'0' * 32}_1"}
    if "{name}" in endpoint.path:
        about = {"schema": _NAME, "description": "the session", "example": "ann"}
        yield {"name": "name", "in": "path", "required": True, **about}
    if endpoint.paged:
        limit = {"type": "integer", "minimum": 1, "maximum": MOST, "default": USUAL}
        limit["x-must"] = must_be(limit)
        yield {"name": "limit", "in": "query", "schema": limit, "description": "sessions on a page"}
        yield {"name": "after", "in": "query", "schema": _NAME, "description": "list those that follow this one"}


def _schemas(served: Served) -> Iterator[tuple[str, Any]]:
    """The bodies of requests and their parts, with the defaults of this server."""
    yield "Error", _ERROR
    lengths = dict.fromkeys(_LENGTHS, served.default_tokens)
    defaults = {**served.shown["defaults"], **lengths, "model": served.name}
    for endpoint in ENDPOINTS:
        if endpoint.body is None:
            continue
        schema = endpoint.body.model_json_schema(ref_template="#/components/schemas/{model}")
        parts = schema.pop("$defs", {})
        shown = _show_schema(schema, endpoint.not_used or {}, defaults)
        for name in shown["properties"].keys() & {*_LENGTHS}:
            shown["properties"][name]["description"] += f"; with its prompt, {served.most_tokens:,}"
        yield endpoint.body.__name__, shown
        for name, part in parts.items():
            yield name, _show_schema(part, NOT_USED_IN_MESSAGES if name == Message.__name__ else {}, {})


def _show_schema(schema: dict[str, Any], not_used: Mapping[str, Schema], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A schema as the page shows it: fields that may only have some values come last."""
    properties = {name: _show_field(name, field, defaults) for name, field in schema["properties"].items()}
    for name, values in not_used.items():
        properties[name] = {**values, "x-must": must_be(values), "x-unused": True}
    if "n" in properties:
        properties["best_of"] = {"type": "integer", "x-must": "equal to `n`", "x-unused": True}
    return {**{name: value for name, value in schema.items() if name != "title"}, "properties": properties}


def _show_field(name: str, field: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A field without null, which counts as not given, and with the default of this server."""
    shown = {key: value for key, value in field.items() if key != "title"}
    if "anyOf" in shown:
        kinds = [kind for kind in shown["anyOf"] if kind.get("type") != "null"]
        if len(kinds) == 1:
            del shown["anyOf"]
            shown |= kinds[0]
    if shown.get("default", 0) is None:
        del shown["default"]
    if name in defaults:
        shown["default"] = defaults[name]
    return {**shown, "x-must": must_be(field)}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


_NAME = {"type": "string", "pattern": NAME_PATTERN, "x-must": NAME_WORDS}
_TEXT_OR_NULL = {"type": ["string", "null"]}
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {**_TEXT_OR_NULL, "description": "the field at fault"},
                "code": {**_TEXT_OR_NULL, "description": "the reason, for programs"},
            },
        }
    },
}
