"""Odd but legal requests harm nobody: they are answered, and so is everyone beside them, token for token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings

import msrnn
from msrnn.hf.loading import Loaded
from tests.helpers.live_server import KEY, running
from tests.helpers.odd_requests import requests
from tests.helpers.step_orders import second_order_slow
from tests.helpers.streams import streaming

pytestmark = second_order_slow

HEADERS = {"Authorization": f"Bearer {KEY}"}
CLIENTS = 8


@pytest.fixture
def address(rnn: msrnn.MultiStateRNN, small: Loaded) -> Iterator[str]:
    with running(msrnn.Engine(rnn, slots=12, tokenizer=small.tokenizer)) as found:
        yield found


def check_response(found: httpx.Response, body: dict[str, Any]) -> None:
    last = found.text
    if body.get("stream"):
        *_, last = found.text.removesuffix("\n\n").split("data: ")
    response = json.loads(last)
    response = response.get("response", response)
    assert (response["status"], response["error"]) in (("completed", None), ("incomplete", None))
    assert response["metadata"] == body.get("metadata", {})
    assert [item["type"] for item in response["output"]] == ["message"]


def check(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    found = client.post(path, json=body)
    assert found.status_code == 200, found.text
    if path == "/v1/responses":
        check_response(found, body)
        return
    assert "error" not in found.text.partition("choices")[0], found.text
    if body.get("stream"):
        assert found.text.endswith("data: [DONE]\n\n"), found.text[-300:]
    else:
        prompts = body.get("prompt", "")
        many = isinstance(prompts, list) and not isinstance(prompts[0], int)
        assert len(found.json()["choices"]) == body.get("n", 1) * (len(prompts) if many else 1)


@pytest.mark.parametrize("count", [40, pytest.param(2000, marks=pytest.mark.slow)])
def test_odd_requests_beside_streams(
    address: str, rnn: msrnn.MultiStateRNN, small: Loaded, count: int, overlaps: bool
) -> None:
    with (
        streaming(address, rnn, small.tokenizer, CLIENTS),
        httpx.Client(base_url=address, headers=HEADERS, timeout=300) as client,
    ):

        @settings(max_examples=count, derandomize=True, suppress_health_check=[*HealthCheck])
        @given(requests())
        def odd(request: tuple[str, dict[str, Any]]) -> None:
            check(client, *request)

        odd()
        assert client.get("/health").status_code == 200
