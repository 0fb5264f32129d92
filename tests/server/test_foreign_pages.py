"""Pages of other origins, in Chromium: they cannot use a server on this machine, unless it was started to let them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

import msrnn
from msrnn.server.limits import Limits
from msrnn.server.origins import Origins
from tests.helpers.characters import character_model, character_tokenizer
from tests.helpers.live_server import running, wait_until
from tests.helpers.page_browser import recorded, until

TURN = {"prompt": "hello", "max_tokens": 2, "session_id": "talk"}

# Sends a request and returns the status and the text that the page can read; null if the browser refuses.
ASK = """
const [address, path, method, kind, mode, body, done] = arguments;
const headers = kind === null ? {} : { "Content-Type": kind };
fetch(address + path, { method, mode, headers, body: body === null ? undefined : JSON.stringify(body) })
  .then(async (response) => done([response.status, await response.text()]), () => done(null));
"""
# A form is sent as a page: its only field is JSON if "=" stands in a string.
FORM = """
const [action, text] = arguments;
const form = document.createElement("form");
Object.assign(form, { action, method: "post", enctype: "text/plain" });
const field = document.createElement("input");
[field.name, field.value] = text.split("=");
form.append(field);
document.body.append(form);
form.submit();
"""


class Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>foreign</title><body>a foreign page")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def foreign() -> Iterator[str]:
    """The origin of an empty page, on another port of this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def engine() -> msrnn.Engine:
    """It has one session, with one turn."""
    made = msrnn.Engine(msrnn.MultiStateRNN(character_model(), "tova", 16), 4, tokenizer=character_tokenizer())
    with running(made, Limits()) as address:
        assert httpx.post(f"{address}/v1/completions", json=TURN, timeout=60).status_code == 200
    return made


def ask(browser: Any, address: str, path: str, method: str = "GET", body: Any = None, **how: str | None) -> Any:
    kind = how.get("kind", "application/json" if body is not None else None)
    return browser.execute_async_script(ASK, address, path, method, kind, how.get("mode", "cors"), body)


def attack(browser: Any, page: str, address: str, engine: msrnn.Engine) -> list[Any]:
    """What a page can read of a server, when it tries all that the server can do.

    Answers that are opaque to the page are not waited for by it; one that is under way would prevent a fork.
    """
    browser.get(page)
    found = []
    for path in ("/", "/health", "/metrics", "/version", "/v1/models", "/v1/sessions", "/v1/sessions/talk/memory"):
        found.append(ask(browser, address, path))
    simple = {"mode": "no-cors", "kind": "text/plain"}
    for options in ({}, {"kind": "text/plain"}, simple):
        found.append(ask(browser, address, "/v1/completions", "POST", TURN, **options))
        found.append(ask(browser, address, "/v1/completions", "POST", {**TURN, "stream": True}, **options))
        wait_until(lambda: engine.idle)
        found.append(ask(browser, address, "/v1/sessions/talk/fork", "POST", {"to": "stolen"}, **options))
    found.append(ask(browser, address, "/v1/sessions/talk/stop", "POST", mode="no-cors"))
    found.append(ask(browser, address, "/v1/sessions/talk", "DELETE"))
    browser.execute_script(FORM, f"{address}/v1/completions", '{"prompt": "=", "session_id": "talk"}')
    until(browser, f"location.href === '{address}/v1/completions' && document.readyState === 'complete'")
    return found


def sessions_of(engine: msrnn.Engine) -> list[tuple[str, int]]:
    return [(info.name, info.turns) for info in engine.sessions.infos()]


def test_a_page_on_another_port(
    chromium: Any, foreign: str, engine: msrnn.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = recorded(engine, monkeypatch)
    with running(engine, Limits()) as address:
        read = attack(chromium, foreign, address, engine)
        assert [found for found in read if found not in (None, [0, ""])] == []  # without cors, the answer is opaque
        assert (requests, sessions_of(engine)) == ([], [("talk", 1)])
    chromium.get_log("browser")


def test_a_page_whose_name_resolves_to_this_machine(
    chromium: Any, engine: msrnn.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the browser, page and server are of the same origin."""
    requests = recorded(engine, monkeypatch)
    with running(engine, Limits()) as address:
        rebound = address.replace("127.0.0.1", "rebound.example")
        read = attack(chromium, f"{rebound}/version", rebound, engine)
        assert {status for status, _ in read} == {403}
        assert all("'rebound.example:" in text for _, text in read)
        assert (requests, sessions_of(engine)) == ([], [("talk", 1)])
    chromium.get_log("browser")


def test_the_attacks_work_where_nothing_is_checked(
    chromium: Any, foreign: str, engine: msrnn.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the tests above would show nothing."""
    monkeypatch.setattr("msrnn.server.limits.check_content_type", lambda _: None)
    requests = recorded(engine, monkeypatch)
    with running(engine, Limits(origins=None)) as address:
        attack(chromium, foreign, address, engine)
        assert len(requests) == 5  # a browser sends plain text and forms without asking
        assert dict(sessions_of(engine)).keys() == {"talk", "stolen"}
        rebound = address.replace("127.0.0.1", "rebound.example")
        read = attack(chromium, f"{rebound}/version", rebound, engine)
        assert {status for status, _ in read[:7]} == {200}
        assert ("talk" in dict(sessions_of(engine)), len(requests) > 5) == (True, True)  # the form has made it again
    chromium.get_log("browser")


def test_a_page_that_is_allowed(chromium: Any, foreign: str, engine: msrnn.Engine) -> None:
    with running(engine, Limits(origins=Origins(cors=(foreign,)))) as address:
        chromium.get(foreign)
        status, text = ask(chromium, address, "/v1/completions", "POST", {**TURN, "stream": True})
        assert (status, text.endswith("data: [DONE]\n\n")) == (200, True)
        assert ask(chromium, address, "/v1/sessions/talk/fork", "POST", {"to": "copy"})[0] == 201
        assert sorted(sessions_of(engine)) == [("copy", 2), ("talk", 2)]
        assert ask(chromium, address, "/v1/completions", "POST", TURN, kind="text/plain")[0] == 415
        assert ask(chromium, address, "/v1/sessions/talk", "DELETE")[0] == 200
        assert '"copy"' in ask(chromium, address, "/v1/sessions")[1]
        chromium.get(foreign.replace("127.0.0.1", "localhost"))  # another origin
        assert ask(chromium, address, "/v1/sessions") is None
    chromium.get_log("browser")
