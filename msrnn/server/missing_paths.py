"""Answers to paths that a server does not have: what there is, and why endpoints of other servers are missing."""

from __future__ import annotations

from collections.abc import Iterable

from msrnn.server.errors import ApiError
from msrnn.server.openapi import ENDPOINTS

_EMBEDDING = "this server generates text, and its model computes no embeddings: use a server with an embedding model"
_SOUND = "this server reads and writes text only: use a server with a model for speech"
_IMAGES = "this server reads and writes text only: use a server with a model for images"
_FILES = "this server keeps no files and runs no jobs: send each request by itself"
NOT_SERVED = {
    "/v1/embeddings": _EMBEDDING,
    "/v1/rerank": _EMBEDDING,
    "/v1/score": _EMBEDDING,
    "/v1/moderations": "this server has no moderation model: use a server that has one",
    "/v1/audio": _SOUND,
    "/v1/realtime": _SOUND,
    "/v1/images": _IMAGES,
    "/v1/videos": _IMAGES,
    "/v1/files": _FILES,
    "/v1/uploads": _FILES,
    "/v1/batches": _FILES,
    "/v1/vector_stores": _FILES,
    "/v1/fine_tuning": "this server does not train its model",
    "/v1/assistants": "this server keeps conversations as sessions: send session_id to /v1/chat/completions",
    "/v1/threads": "this server keeps conversations as sessions: send session_id to /v1/chat/completions",
    "/v1/conversations": "this server keeps conversations as sessions: send session_id to /v1/chat/completions",
}
PARTLY_SERVED = {
    "/v1/responses": "a response is kept as the state of its conversation, without its text: POST /v1/responses "
    "continues it with previous_response_id, and DELETE deletes it",
}


def is_partly_served(path: str) -> bool:
    """Whether other methods of a path may be asked for that OpenAI's API has, and this server has not."""
    return _find_above(path, PARTLY_SERVED) is not None


def missing_path_error(path: str, method: str) -> ApiError:
    """The answer to a path or method that is not there, and to what is below the path that is not served."""
    if (known := _find_above(path, PARTLY_SERVED)) is not None:
        message = f"{method} {path!r:.100} is not supported: {PARTLY_SERVED[known]}"
        return ApiError(404, message, code="unsupported_endpoint")
    if (known := _find_above(path, NOT_SERVED)) is not None:
        return ApiError(404, f"{known} is not supported: {NOT_SERVED[known]}", code="unsupported_endpoint")
    paths = ", ".join(f"{one.method.upper()} {one.path}" for one in ENDPOINTS)
    return ApiError(404, f"{path!r:.100}: there is no such path; there are {paths}", code="not_found")


def _find_above(path: str, paths: Iterable[str]) -> str | None:
    return next((one for one in paths if path == one or path.startswith(f"{one}/")), None)
