from __future__ import annotations

import pytest

from msrnn.errors import UsageError
from msrnn.server.errors import (
    ApiError,
    bad_input,
    bad_value,
    escape_name,
    internal_error,
    queue_full_error,
    session_error,
    shutting_down_error,
    slow_client_error,
)


def test_the_shape_of_an_error() -> None:
    assert bad_value("n", "n must be 1").body == {
        "error": {"message": "n must be 1", "type": "invalid_request_error", "param": "n", "code": "invalid_value"}
    }
    assert str(ApiError(404, "none")) == "none"


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (queue_full_error(3), 429, "rate_limit_error", "queue_full"),
        (shutting_down_error(), 503, "server_error", "shutting_down"),
        (slow_client_error(4096), 408, "invalid_request_error", "client_too_slow"),
        (internal_error("broken"), 500, "server_error", "internal_error"),
        (session_error("in use", "session_in_use"), 409, "invalid_request_error", "session_in_use"),
        (session_error("full", "session_storage_full"), 507, "invalid_request_error", "session_storage_full"),
    ],
)
def test_status_and_code(error: ApiError, status: int, kind: str, code: str) -> None:
    assert (error.status, error.kind, error.code) == (status, kind, code)


def test_when_to_try_again() -> None:
    assert queue_full_error(3).headers == {"Retry-After": "3"}
    assert shutting_down_error().headers == {}


def test_the_field_at_fault_is_one_of_the_request() -> None:
    error = UsageError("must be 1 or more", name="n", value=0)
    assert (bad_input(error, {"n"}).param, bad_input(error, {"m"}).param, bad_input(error).param) == ("n", None, None)
    assert bad_input(error).message == "n=0: must be 1 or more"


def test_names_of_clients_are_plain_and_short() -> None:
    assert escape_name("fé\ud800\n") == r"f\xe9\ud800\n"
    assert len(escape_name("x" * 10_000)) == 100
