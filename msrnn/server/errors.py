"""Errors of the API, in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from msrnn.errors import SessionStorageFullError, UsageError


class ApiError(Exception):
    """An answer to a request that cannot be served; `param` names the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def bad_value(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")


def wrong_model_error(name: object, served: str) -> ApiError:
    message = f"model {name!r:.100} is not served here: the model is {served!r}"
    return ApiError(404, message, param="model", code="model_not_found")


def escape_name(name: str) -> str:
    """A name that a client has sent, as `param`."""
    return ascii(name)[1:-1][:100]


def bad_input(error: UsageError, fields: Container[object] = ()) -> ApiError:
    """Bad input that was found behind the API; `param` is the field, if the request has one of this name."""
    return ApiError(400, str(error), param=error.name if error.name in fields else None, code="invalid_value")


def queue_full_error(seconds: int) -> ApiError:
    return ApiError(
        429,
        "too many requests wait already: try again later",
        kind="rate_limit_error",
        code="queue_full",
        headers={"Retry-After": str(seconds)},
    )


def shutting_down_error() -> ApiError:
    return ApiError(503, "the server is shutting down: ask another one", kind="server_error", code="shutting_down")


def session_error(message: str, code: str) -> ApiError:
    """A session is in use, has gone on, or cannot be stored."""
    return ApiError(507 if code == SessionStorageFullError.code else 409, message, param="session_id", code=code)


def slow_client_error(events: int) -> ApiError:
    message = f"the client has not read {events:,} events of this stream, which ends here: read faster, or ask for less"
    return ApiError(408, message, code="client_too_slow")


def internal_error(message: str) -> ApiError:
    return ApiError(500, message, kind="server_error", code="internal_error")
