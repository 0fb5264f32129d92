from __future__ import annotations

import pytest

from msrnn.server.missing_paths import NOT_SERVED, missing_path_error
from msrnn.server.openapi import ENDPOINTS


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/v1/embeddings", "/v1/embeddings is not supported: this server generates text, and its model computes no"),
        ("/v1/audio/speech", "/v1/audio is not supported: this server reads and writes text only"),
        ("/v1/images/generations", "/v1/images is not supported: "),
        ("/v1/responses/resp_1", "GET '/v1/responses/resp_1' is not supported: a response is kept as the state"),
        ("/v1/moderations", "use a server that has one"),
        ("/v1/threads/abc/runs", "send session_id to /v1/chat/completions"),
    ],
)
def test_endpoints_of_other_servers_are_refused_with_a_reason(path: str, reason: str) -> None:
    error = missing_path_error(path, "GET")
    assert (error.status, error.code) == (404, "unsupported_endpoint")
    assert reason in error.message


@pytest.mark.parametrize("path", ["/v1/embeddingsx", "/v1/audios", "/embeddings", "/", "/v1/\ud800"])
def test_any_other_path_is_answered_with_what_there_is(path: str) -> None:
    error = missing_path_error(path, "GET")
    assert (error.status, error.code) == (404, "not_found")
    assert error.message.encode()
    for endpoint in ENDPOINTS:
        assert f"{endpoint.method.upper()} {endpoint.path}" in error.message


def test_a_long_path_is_cut() -> None:
    assert len(missing_path_error("/" + "x" * 9999, "GET").message) == len(
        missing_path_error("/" + "x" * 999, "GET").message
    )


def test_no_endpoint_is_both_there_and_missing() -> None:
    for endpoint in ENDPOINTS:
        assert not any(endpoint.path == path or endpoint.path.startswith(f"{path}/") for path in NOT_SERVED)
