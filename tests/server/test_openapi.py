"""The OpenAPI description tells what the server does: its paths, fields, bounds, defaults, and examples that work."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.routing import Route

import msrnn
from msrnn.server.errors import ApiError
from msrnn.server.fields import read_request
from msrnn.server.limits import Limits
from msrnn.server.openapi import ENDPOINTS, describe_api
from msrnn.server.request_models import ChatRequest, CompletionRequest
from msrnn.server.response_models import ResponseRequest
from msrnn.server.router import Router
from msrnn.server.server import Server
from tests.helpers.live_server import KEY, served_by
from tests.helpers.replicas_here import Local, with_router

RESPONSE = f"resp_{'0' * 32}"
WRONG = {"n": "x", "chat_template_kwargs": "x", "guided_json": 5}  # elsewhere, an object that no field takes
NEEDED: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "retention": {"stream": True},
    "session_turns": {"session_id": "ann"},
}
NEEDED |= {"session_turns": {"session_id": "ann"}, "top_logprobs": {"logprobs": True}}


@pytest.fixture(scope="module")
def document(engine: msrnn.Engine) -> dict[str, Any]:
    return describe_api(served_by(engine, defaults={"temperature": 0.6}), keyed=False)


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def fill(path: str) -> str:
    return path.replace("{name}", "ann").replace("{model}", "tiny").replace("{response}", f"{RESPONSE}_1")


def asked(engine: msrnn.Engine, limits: Limits, *requests: tuple[str, str, Any]) -> list[httpx.Response]:
    """Answers of an application, without a socket."""

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(Server(engine, served_by(engine), limits).app())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            return [await client.request(method, path, json=body) for method, path, body in requests]

    return asyncio.run(ask())


def test_every_route_is_described_and_nothing_else(engine: msrnn.Engine, document: dict[str, Any]) -> None:
    routes = Server(engine, served_by(engine), Limits()).app().routes
    found = {
        (route.path_format, method.lower())
        for route in routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert len(routes) == len(found) == len(ENDPOINTS)
    assert found == {(path, method) for path, method, _ in operations(document)}
    named = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(document)))
    assert named == document["components"]["schemas"].keys()


def test_the_examples_work(engine: msrnn.Engine, document: dict[str, Any]) -> None:
    """In an order in which the session of the examples is there."""
    first = [
        ("post", "/v1/completions", {"prompt": "a", "max_tokens": 2, "session_id": name}) for name in ("ann", RESPONSE)
    ]
    described = sorted(operations(document), key=lambda one: one[1] == "delete")
    requests = []
    for path, method, operation in described:
        body = operation.get("requestBody", {"content": {}})["content"].get("application/json", {}).get("example")
        requests.append((method, fill(path), body))
    _, _, *answers = asked(engine, Limits(), *first, *requests)
    for (path, method, operation), answer in zip(described, answers, strict=True):
        assert str(answer.status_code) in operation["responses"], f"{method} {path}: {answer.text}"
        assert answer.status_code < 300, f"{method} {path}: {answer.text}"
        kind = answer.headers["content-type"].partition(";")[0]
        assert kind in operation["responses"][str(answer.status_code)]["content"]
    engine.sessions.delete("bob")


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, ResponseRequest])
def test_what_is_said_of_a_field_is_true(kind: type[Any], document: dict[str, Any]) -> None:
    path = next(one.path for one in ENDPOINTS if one.body is kind)
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    schema = document["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
    endpoint = next(one for one in ENDPOINTS if one.path == path)
    example = {name: content["example"][name] for name in schema["required"]}

    def read(body: dict[str, Any]) -> Any:
        return read_request(kind, body, endpoint.not_used or {}, "tiny")

    def refused(name: str, body: dict[str, Any]) -> None:
        with pytest.raises(ApiError) as error:
            read(body)
        assert (error.value.status, error.value.param) == (400, name)
        if "x-unused" not in schema["properties"][name]:
            assert f"must be {schema['properties'][name]['x-must']}" in error.value.message

    checked = 0
    for name, field in schema["properties"].items():
        good = [field[key] for key in ("default", "minimum", "maximum") if key in field] + field.get("enum", [])
        for value in good:
            needed = {one: needs for one, needs in NEEDED.get(name, {}).items() if one in schema["properties"]}
            read({**example, **needed, name: value})
        for bound, step in (("minimum", -1), ("maximum", 1)):
            if bound in field:
                refused(name, {**example, name: field[bound] + step})
        if name in schema["required"]:
            refused(name, {other: value for other, value in example.items() if other != name})
        elif name != "model":  # which is a 404
            refused(name, {**example, name: WRONG.get(name, {"no such": ["value"]})})
        checked += len(good)
    assert checked > 40
    assert schema["properties"]["temperature"]["default"] == 0.6
    limit = "max_output_tokens" if kind is ResponseRequest else "max_tokens"
    assert schema["properties"][limit]["default"] == 16
    assert schema["additionalProperties"] is False


def test_keys_are_asked_for_where_the_description_says_so(engine: msrnn.Engine) -> None:
    limits = Limits(keys=[KEY])
    document = asked(engine, limits, ("get", "/openapi.json", None))[0].json()
    described = [*operations(document)]
    answers = asked(engine, limits, *((method, fill(path), None) for path, method, _ in described))
    assert {"401" in operation["responses"] for _, _, operation in described} == {True, False}
    for (path, method, operation), answer in zip(described, answers, strict=True):
        assert ("security" in operation) == ("401" in operation["responses"]) == (answer.status_code == 401), (
            f"{method} {path}: {answer.status_code}"
        )


def test_the_page_loads_nothing_from_elsewhere(engine: msrnn.Engine) -> None:
    (answer,) = asked(engine, Limits(), ("get", "/docs", None))
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "connect-src 'self'" in policy
    assert "unsafe" not in policy
    for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "http://", "https://", "src="):
        assert word not in answer.text


def test_the_page_shows_every_endpoint(open_address: str, visit: Any) -> None:
    browser = visit(f"{open_address}/docs")
    shown = browser.execute_script("return [...document.querySelectorAll('section')].map((one) => one.id)")
    assert shown == [f"{one.method}{one.path}" for one in ENDPOINTS]
    fields = browser.execute_script(
        "return [...document.getElementById('post/v1/completions').querySelectorAll('td:first-child code')]"
        ".map((one) => one.textContent)"
    )
    assert {*CompletionRequest.model_fields, "best_of", "suffix", "include_usage"} <= {*fields}
    command = browser.execute_script("return document.querySelector('section pre').textContent")
    assert command.startswith(f"curl {open_address}/v1/chat/completions \\\n")


def test_several_replicas_have_one_description() -> None:
    async def test(router: Router, replicas: list[Local], client: httpx.AsyncClient) -> None:
        found = (await client.get("/openapi.json")).json()
        assert found["components"]["securitySchemes"]
        assert {(path, method) for path, method, _ in operations(found)} == {
            (one.path, one.method) for one in ENDPOINTS
        }
        assert sum("/openapi.json" in replica.asked for replica in replicas) == 1
        assert (await client.get("/docs")).headers["content-type"].startswith("text/html")
        for number in range(len(replicas)):
            router.pool.mark(number, up=False)
        monkeypatch.setattr("msrnn.server.router.METRICS_TIMEOUT", 0.2)
        assert (await client.get("/openapi.json")).status_code == 503

    with pytest.MonkeyPatch.context() as monkeypatch:
        with_router(test, keys=[KEY])
