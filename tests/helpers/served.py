"""A real HTTP server that behaves like an OpenAI-compatible endpoint, correctly or not, as the test requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from msrnn.evaluation.tasks.judge_models import EndpointJudge

Manner = Callable[["Handler"], None]
SECRET = "sk-very-secret-0123456789"


def answering(text: str | Callable[[str], str]) -> Manner:
    def manner(handler: Handler) -> None:
        said = text if isinstance(text, str) else text(handler.asked[-1]["messages"][0]["content"])
        message = {"role": "assistant", "content": said}
        handler.reply(
            200,
            {
                "id": "1",
                "object": "chat.completion",
                "created": 0,
                "model": "served-model",
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 11, "completion_tokens": 2, "total_tokens": 13},
            },
        )

    return manner


def limited(handler: Handler) -> None:
    handler.reply(429, {"error": {"message": "Rate limit reached"}}, {"Retry-After": "0.02"})


def failing(handler: Handler) -> None:
    handler.reply(500, {"error": {"message": "The server had an error"}})


def nonsense(handler: Handler) -> None:
    handler.send(200, b"<html>Welcome to the wifi of this hotel</html>", {"Content-Type": "text/html"})


def broken(handler: Handler) -> None:
    handler.send(200, b'{"id": "1", "choices": "none"', {"Content-Type": "application/json"})


def refusing(handler: Handler) -> None:
    """Repeats the key, as endpoints do."""
    handler.reply(401, {"error": {"message": f"Incorrect API key provided: {handler.headers['Authorization']}"}})


def unknown(handler: Handler) -> None:
    handler.reply(404, {"error": {"message": f"No model for {handler.headers['Authorization']}"}})


def hanging_up(handler: Handler) -> None:
    """Half of an answer, then nothing."""
    handler.send(200, b'{"id": "1", "obj', {"Content-Type": "application/json", "Content-Length": "500"})
    handler.close_connection = True
    handler.connection.close()


def slow(handler: Handler) -> None:
    handler.server.closed.wait(5)  # type: ignore[attr-defined]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def asked(self) -> list[dict[str, Any]]:
        return self.server.asked  # type: ignore[attr-defined]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        manners: list[Manner] = self.server.manners  # type: ignore[attr-defined]
        self.asked.append(json.loads(body))
        try:
            (manners.pop(0) if len(manners) > 1 else manners[0])(self)
        except OSError:
            self.close_connection = True

    def reply(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        self.send(status, json.dumps(body).encode(), {"Content-Type": "application/json", **(headers or {})})

    def send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, *_: Any) -> None:
        pass


class Served:
    def __init__(self, server: Any) -> None:
        self.base_url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        self.asked: list[dict[str, Any]] = server.asked


@contextmanager
def served(*manners: Manner) -> Iterator[Served]:
    """Each request is met by the next manner, and the last one stays."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.manners, server.asked, server.closed = list(manners), [], threading.Event()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield Served(server)
    finally:
        server.closed.set()
        server.shutdown()
        server.server_close()
        thread.join()


def asked(base_url: str, retries: list[str], timeout: float = 5.0) -> EndpointJudge:
    return EndpointJudge("a-judge", base_url, timeout, retries.append)
