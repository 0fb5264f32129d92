"""The chat page: one document, which talks to this server and to nothing else."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from msrnn.web import Parts, page_parts

SCRIPTS = (
    *("api", "store", "tokens", "memory", "markdown", "calls", "turn", "conversation", "list", "settings"),
    *("composer", "clipboard", "card", "log", "look", "main"),
)


def page_routes() -> list[Route]:
    """The page is served without a key; it asks for one if the server wants it."""
    return [page_route("/", page_parts(__package__, SCRIPTS), "img-src data:")]


def page_route(path: str, parts: Parts, *more: str) -> Route:
    """A page that may ask this server, and loads nothing else; `more` are further directives of its security policy."""
    document = parts.document({})
    headers = {
        "Content-Security-Policy": parts.security_policy("connect-src 'self'", *more, "frame-ancestors 'none'"),
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }

    async def page(_: Request) -> Response:
        return Response(document, media_type="text/html", headers=headers)

    return Route(path, page, methods=["GET"])
