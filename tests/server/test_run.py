from __future__ import annotations

import os
import re
import signal
import ssl
import threading
from pathlib import Path

import httpx
import pytest

import msrnn
from msrnn.errors import UsageError
from msrnn.server.http_server import bind
from msrnn.server.run import Bound, follow_server, run_server, warm_up
from msrnn.server.setup import Address, Setup
from tests.helpers.certificates import NEEDS_OPENSSL, write_certificate
from tests.helpers.characters import character_model, character_tokenizer
from tests.helpers.fake_executor import FakeExecutor
from tests.helpers.live_server import wait_until


def test_a_server_notes_its_costs_answers_and_stops(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rnn = msrnn.MultiStateRNN(character_model(), "tova", 16)
    monkeypatch.setattr(rnn.model.generation_config, "temperature", 0.5)
    engine = msrnn.Engine(rnn, slots=1, sessions=tmp_path)
    engine.add(engine.request([80], msrnn.SamplingParams(max_tokens=1), "talk"))
    while not engine.idle:
        engine.step()
    engine.close()
    setup = Setup("tiny", slots=2, sessions=tmp_path, api_key=("sk-ann",))
    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    found: list[int] = []

    def is_up() -> bool:
        try:
            found.append(httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer sk-ann"}).status_code)
        except httpx.TransportError:
            return False
        return True

    def ask() -> None:
        try:
            wait_until(is_up)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    client = threading.Thread(target=ask)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        client.start()
        bound = Bound(Address(port=0), listener, setup.make_limits(("127.0.0.1",)))
        run_server(setup, rnn, character_tokenizer(), bound)
    finally:
        client.join()
        signal.signal(signal.SIGTERM, before)
    assert found == [200]
    said = capsys.readouterr().err
    assert f"a conversation takes {rnn.state().nbytes:,} bytes, at any length; 2 are answered at once\n" in said
    assert f"sessions {tmp_path}: 1 of them were made without a key, and no key can use them" in said
    assert "the model's own sampling defaults: temperature 0.5;" in said
    assert f"tiny at {url}/v1; to chat in a browser, open {url}\n" in said
    assert "GET /v1/models 200" in said


def test_a_model_of_one_process_is_not_followed() -> None:
    """And Ctrl-C is the caller's again."""
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(UsageError, match="this model is in one process"):
        follow_server(msrnn.MultiStateRNN(character_model(), "tova", 16))
    assert signal.getsignal(signal.SIGINT) is before


@NEEDS_OPENSSL
def test_a_server_with_https(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certificate, key = write_certificate(tmp_path)
    rnn, setup, listener = msrnn.MultiStateRNN(character_model(), "tova", 16), Setup("tiny"), bind("127.0.0.1", 0)
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    trusted, found = ssl.create_default_context(cafile=certificate), dict[str, object]()

    def is_up() -> bool:
        try:
            body = {"prompt": "a", "max_tokens": 2, "ignore_eos": True}
            origin = {"Origin": f"https://{address}"}
            answer = httpx.post(f"https://{address}/v1/completions", json=body, headers=origin, verify=trusted)
        except httpx.TransportError:
            return False
        found["tokens"] = answer.json()["usage"]["completion_tokens"]
        return True

    def ask() -> None:
        try:
            wait_until(is_up)
            with pytest.raises(httpx.TransportError):
                httpx.get(f"http://{address}/health")
            found["plain"] = "is not answered"
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    client = threading.Thread(target=ask)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        client.start()
        secure = Address(port=0, ssl_certfile=certificate, ssl_keyfile=key)
        bound = Bound(secure, listener, setup.make_limits(("127.0.0.1",)))
        run_server(setup, rnn, character_tokenizer(), bound)
    finally:
        client.join()
        signal.signal(signal.SIGTERM, before)
    assert found == {"tokens": 2, "plain": "is not answered"}
    assert f"tiny at https://{address}/v1; to chat in a browser, open https://{address}" in capsys.readouterr().err


@pytest.mark.parametrize("captures", [True, False])
def test_a_warm_up_says_how_long_it_took(captures: bool, capsys: pytest.CaptureFixture[str]) -> None:
    executor = FakeExecutor()
    warm_up(msrnn.Engine(executor), captures)
    assert [what for what, _ in executor.calls] == ["prompt", "step", "guesses"]
    lines = r"compiling and capturing what requests need\ncompiled and captured in \d+ s\n"
    assert re.fullmatch(lines * captures, capsys.readouterr().err)
