"""Who may ask, by `Host`, `Origin`, `Sec-Fetch-Site` and `Content-Type`, as browsers and programs send them.

What browsers really send is tested in Chromium, in test_foreign_pages.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import msrnn
from msrnn.errors import UsageError
from msrnn.server.limits import Limits
from msrnn.server.origins import Origins
from msrnn.server.router import Router
from tests.helpers.characters import character_model, character_tokenizer
from tests.helpers.live_server import KEY, running
from tests.helpers.replicas_here import Local, body, with_router

FOREIGN, FRIEND = "https://evil.example", "http://localhost:3000"
PATHS = ("/", "/health", "/metrics", "/version", "/v1/models", "/v1/sessions")
CONTENT = b'{"prompt": "hello", "max_tokens": 2}'


@pytest.mark.parametrize(
    ("bound", "hosts", "known", "unknown"),
    [
        (
            "127.0.0.1",
            (),
            "127.0.0.1 127.0.0.1:8000 127.0.0.1:9 localhost LOCALHOST:8000 localhost. localhost.:80 [::1] [0::1]:8000",
            "evil.example evil.example:8000 127.0.0.1.evil.example localhost.evil.example 192.168.1.5 2130706433 ::1 "
            "localhost@evil.example evil.example#localhost [localhost] [] : . localhost:8000x http://localhost",
        ),
        ("::1", (), "[::1]:8000 localhost 127.0.0.1", "[::2] evil.example"),
        ("localhost", (), "localhost 127.0.0.1", "evil.example"),
        ("192.168.1.5", (), "192.168.1.5:80 localhost", "192.168.1.6 127.0.0.1 evil.example"),
        ("0.0.0.0", (), "192.168.1.6 [fe80::1]:8000 127.0.0.1 0.0.0.0:8000 localhost", "evil.example mybox 1.2.3"),
        ("::", (), "192.168.1.6 [fe80::1]:8000 localhost", "evil.example"),
        ("fe80::1%eth0", (), "[fe80::1]:8000", "evil.example"),
        (
            "127.0.0.1",
            ("MyBox.lan", "10.0.0.1", "::2"),
            "mybox.lan:80 MYBOX.lan. 10.0.0.1 [::2]",
            "lan box.lan 10.0.0.2",
        ),
    ],
)
def test_names_of_a_server(bound: str, hosts: tuple[str, ...], known: str, unknown: str) -> None:
    origins = Origins((bound, "127.0.0.1") if bound == "localhost" else (bound,), hosts)
    assert [host for host in known.split() if not origins.has_name(host)] == []
    assert [host for host in ("", " ", *unknown.split()) if origins.has_name(host)] == []


@pytest.mark.parametrize("host", ["", "*", "http://mybox", "mybox:80", "[::1]:80", "my box", "mybox/v1"])
def test_bad_names(host: str) -> None:
    with pytest.raises(UsageError, match=r"allowed_host=.*: must be a name or an address"):
        Origins(hosts=(host,))


@pytest.mark.parametrize(
    "origin", ["", "null", "example.org", "https://", "https://a.b/c", "https://a b", "https://*.a.b"]
)
def test_bad_origins(origin: str) -> None:
    with pytest.raises(UsageError, match=r"cors_origin=.*: must be like https://example.org"):
        Origins(cors=(origin,))


def test_origins_have_one_spelling() -> None:
    given = ("HTTPS://Example.org:443/", "http://localhost:80", "http://localhost:3000", "tauri://localhost", "*")
    expected = ("https://example.org", "http://localhost", "http://localhost:3000", "tauri://localhost", "*")
    assert Origins(cors=given).cors == expected


@pytest.fixture(scope="module")
def engine() -> msrnn.Engine:
    rnn = msrnn.MultiStateRNN(character_model(), "tova", 16)
    return msrnn.Engine(rnn, 4, tokenizer=character_tokenizer())


@pytest.fixture(scope="module")
def open_address(engine: msrnn.Engine) -> Iterator[str]:
    with running(engine, Limits()) as found:
        yield found


def sent(address: str, kind: str | None = "application/json", **more: str) -> Any:
    headers = {name.replace("_", "-"): value for name, value in more.items()}
    if kind is not None:
        headers["Content-Type"] = kind
    return httpx.post(f"{address}/v1/completions", content=CONTENT, headers=headers, timeout=30)


def code(found: httpx.Response) -> tuple[int, str]:
    return found.status_code, found.json()["error"]["code"]


def test_programs_send_no_headers_of_browsers(open_address: str) -> None:
    """`curl -d` calls its body a form."""
    for kind in ("application/x-www-form-urlencoded", "text/plain", "application/json", None):
        assert sent(open_address, kind).status_code == 200


def test_other_hosts_are_refused(open_address: str) -> None:
    for path in PATHS:
        found = httpx.get(open_address + path, headers={"Host": "evil.example"})
        assert code(found) == (403, "host_not_allowed")
        assert "'evil.example': not a name of this server" in found.json()["error"]["message"]
        assert "--allowed-host NAME or --api-key KEY" in found.json()["error"]["message"]
        assert httpx.get(open_address + path, headers={"Host": "localhost"}).status_code == 200
    assert code(sent(open_address, Host="evil.example", Sec_Fetch_Site="same-origin"))[0] == 403


FOREIGN_HEADERS = [
    {"Origin": FOREIGN},
    {"Origin": "null"},
    {"Origin": "http://127.0.0.1:1"},  # another port of this machine
    {"Origin": FOREIGN, "Sec_Fetch_Site": "cross-site"},
    {"Origin": "null", "Sec_Fetch_Site": "cross-site"},
    {"Origin": "http://127.0.0.1:1", "Sec_Fetch_Site": "same-site"},
    {"Sec_Fetch_Site": "cross-site"},
    {"Sec_Fetch_Site": "same-site", "Sec_Fetch_Mode": "navigate"},  # a form
]


@pytest.mark.parametrize("headers", FOREIGN_HEADERS)
def test_foreign_pages_are_refused(open_address: str, headers: dict[str, str]) -> None:
    for kind in ("application/json", "text/plain", "application/x-www-form-urlencoded"):
        found = sent(open_address, kind, **headers)
        assert code(found) == (403, "origin_not_allowed")
        name = next(iter(headers))
        shown = f"Origin {headers[name]!r}" if name == "Origin" else f"Sec-Fetch-Site: {headers[name]}"
        message = f"{shown}: pages of other sites may not use this server; start it with --cors-origin ORIGIN"
        assert found.json()["error"]["message"] == message
        assert "access-control-allow-origin" not in found.headers
    spelled = {name.replace("_", "-"): value for name, value in headers.items()}
    for method, path in (("DELETE", "/v1/sessions/a"), ("GET", "/v1/sessions"), ("OPTIONS", "/v1/completions")):
        assert code(httpx.request(method, open_address + path, headers=spelled)) == (403, "origin_not_allowed")


def test_the_own_page_and_links_to_it_are_not_foreign(open_address: str) -> None:
    assert sent(open_address, Origin=open_address).status_code == 200
    assert sent(open_address, Origin=open_address, Sec_Fetch_Site="same-origin").status_code == 200
    assert sent(open_address, Origin="https://proxy.example", Sec_Fetch_Site="same-origin").status_code == 200
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert httpx.get(open_address, headers=link).status_code == 200
    assert code(httpx.get(f"{open_address}/v1/sessions", headers=link)) == (403, "origin_not_allowed")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None])
def test_browsers_must_send_json(open_address: str, kind: str | None) -> None:
    for headers in ({"Origin": open_address}, {"Sec_Fetch_Site": "same-origin"}):
        assert code(sent(open_address, kind, **headers)) == (415, "unsupported_media_type")
    assert sent(open_address, "Application/JSON; charset=utf-8", Origin=open_address).status_code == 200


def test_origins_that_are_allowed(engine: msrnn.Engine) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type,x-stainless-os"}
    with running(engine, Limits(origins=Origins(cors=(FRIEND,)))) as address:
        headers = {"Origin": FRIEND, "Access-Control-Request-Private-Network": "true", **asked}
        preflight = httpx.options(f"{address}/v1/completions", headers=headers)
        assert preflight.status_code == 204
        assert preflight.headers["access-control-allow-origin"] == FRIEND
        assert preflight.headers["access-control-allow-headers"] == asked["Access-Control-Request-Headers"]
        assert "DELETE" in preflight.headers["access-control-allow-methods"]
        assert preflight.headers["access-control-allow-private-network"] == "true"
        answer = sent(address, Origin=FRIEND, Sec_Fetch_Site="cross-site")
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, FRIEND)
        assert answer.headers["vary"] == "Origin"
        plain = sent(address, "text/plain", Origin=FRIEND)
        assert (plain.status_code, plain.headers["access-control-allow-origin"]) == (415, FRIEND)
        assert code(sent(address, Origin=FRIEND, Host="evil.example")) == (403, "host_not_allowed")
        refused = httpx.options(f"{address}/v1/completions", headers={"Origin": FOREIGN, **asked})
        assert (refused.status_code, "access-control-allow-origin" in refused.headers) == (403, False)
        assert code(sent(address, Origin=FOREIGN)) == (403, "origin_not_allowed")


def test_with_keys(engine: msrnn.Engine) -> None:
    """A page does not know the key, under any name; pages of other origins still need leave."""
    with running(engine, Limits(keys=[KEY], origins=Origins(cors=("*",)))) as address:
        key = {"Authorization": f"Bearer {KEY}"}
        assert sent(address, Host="any.example", **key).status_code == 200
        assert httpx.get(address, headers={"Host": "any.example"}).status_code == 200
        for origin in (FOREIGN, "null"):
            answer = sent(address, Origin=origin, Sec_Fetch_Site="cross-site", **key)
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, origin)
        wrong = sent(address, Origin=FOREIGN)
        assert (wrong.status_code, wrong.headers["access-control-allow-origin"]) == (401, FOREIGN)
    with running(engine, Limits(keys=[KEY])) as address:
        assert code(sent(address, Origin=FOREIGN, **key)) == (403, "origin_not_allowed")


def test_the_front_checks_and_its_replicas_do_not() -> None:
    async def test(router: Router, replicas: list[Local], client: httpx.AsyncClient) -> None:
        for headers in ({"Host": "evil.example"}, {"Origin": FOREIGN}, {"Sec-Fetch-Site": "same-site"}):
            found = await client.post("/v1/completions", json=body(), headers=headers)
            assert found.status_code == 403
        assert [replica.asked for replica in replicas] == [[], [], []]
        for headers in ({"Host": "mybox"}, {"Origin": FRIEND, "Sec-Fetch-Site": "cross-site"}):
            found = await client.post("/v1/completions", json=body(), headers=headers)
            assert (found.status_code, found.headers.get("access-control-allow-origin")) == (200, headers.get("Origin"))
        plain = await client.post("/v1/completions", content=CONTENT, headers={"Origin": FRIEND})
        assert plain.status_code == 415

    with_router(test, origins=Origins(hosts=("mybox",), cors=(FRIEND,)))
