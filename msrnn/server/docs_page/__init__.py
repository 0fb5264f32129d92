"""The page at /docs: every endpoint with its fields and an example, from the server's OpenAPI description."""

from __future__ import annotations

from starlette.routing import Route

from msrnn.server.page import page_route
from msrnn.web import page_parts


def docs_routes() -> list[Route]:
    """The page and the description that it shows are served without a key."""
    return [page_route("/docs", page_parts(__package__, ("main",)), "img-src data:")]
