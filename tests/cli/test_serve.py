"""`msrnn serve` as a process of its own: it says what a conversation costs and where it listens, answers, and ends."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.helpers.command import Run


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--port", 70000), "--port 70000: must be a whole number from 0 to 65535"),
        (("--queue", 0), "--queue 0: must be a whole number, 1 or more"),
        (("--prompt-tokens", 0), "--prompt-tokens 0: must be a whole number, 1 or more"),
        (("--max-total-tokens", -1), "--max-total-tokens -1: must be a whole number, 1 or more"),
        (("--max-total-tokens", 512), "--max-tokens 512: must be less than max_total_tokens, which is 512"),
        (("--shutdown-timeout", -5), "--shutdown-timeout -5: must be a whole number from 0 to 86400 seconds"),
        (("--shutdown-timeout", 10**400), "0: must be a whole number from 0 to 86400 seconds"),
        (("--served-model-name", ""), "--served-model-name (--name) '': must be a word or more"),
        (("--served-model-name", " "), "--served-model-name (--name) ' ': must be a word or more"),
        (("--name", "a\nb"), "--served-model-name (--name) 'a\\nb': must be a word or more, without line breaks"),
        (("--api-key", " "), "--api-key: must not be empty"),
        (("--api-key", "secret\n"), "--api-key: must not be empty, must not begin or end with a space"),
        (("--allowed-host", "*"), "--allowed-host *: must be a name or an address"),
        (("--cors-origin", "null"), "--cors-origin null: must be like https://example.org"),
        (("--cors-origin", "*"), "--cors-origin *: any web page could use the model; add a key"),
        (("--host", "a..b"), "--host a..b: unknown"),
        (("--policy", "tofu"), "tofu"),
        (("--policy", "full"), "fixed size in every layer"),
        (("--generation-config", "vllm"), "--generation-config vllm: must be auto or none"),
        (("--session-days", 0), "--session-days 0: must be above 0; leave it out to delete none"),
        (("--session-days", "inf"), "--session-days inf: must be above 0"),
        (("--chat-template", "no-such-file"), "--chat-template no-such-file: cannot be read"),
        (("--ssl-certfile", "no-such-file"), "--ssl-certfile no-such-file: no such file"),
        (("--lora", "no-adapter"), "--lora no-adapter: no such folder, or one without adapter_config.json"),
        (("--revision", "v1"), "--revision v1: only models on the hub have one; leave it out"),
        (("--slots", -3), "--slots -3: must be a whole number, 1 or more"),
    ],
)
def test_bad_options(run: Run, options: tuple[object, ...], message: str) -> None:
    ran = run("serve", *(() if "--port" in options else ("--port", 0)), *options)
    assert ran.code == 2
    assert message in ran.err
    assert ran.err.count("\n") == 1


def test_a_port_in_use_is_found_before_a_model_is_loaded(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ran = run("serve", "--port", port, "--model", "there-is-no-such-model", small=True)
    assert ran.code == 2
    said = "in use by another program on 127.0.0.1; choose another, or 0 for a free one"
    assert ran.err == f"msrnn: --port {port}: {said}\n"


@contextmanager
def ending(process: subprocess.Popen[str]) -> Iterator[None]:
    """A test that fails does not wait for its server."""
    try:
        yield
    finally:
        process.kill()


def test_a_server(short: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Without a key on all addresses it warns; a finished turn of a session is a file; SIGTERM ends it with 0.

    The first turn that may pass the training length is told, once.
    """
    tmp_path = tmp_path_factory.mktemp("sessions")
    tmp_path.chmod(0o755)
    (short / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "top_k": 20}')
    command = [sys.executable, "-c", "from msrnn.cli import main; main()", "serve", "--model", str(short)]
    command += ["--size", "16", "--slots", "2", "--host", "0.0.0.0", "--port", "0", "--sessions", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server, ending(server):
        assert server.stderr is not None
        said = ""
        for line in server.stderr:
            said += line
            if found := re.search(r"http://0\.0\.0\.0:(\d+)/v1", line):
                break
        assert found is not None, said
        assert re.search(
            r"a conversation takes [\d,]+ bytes, at any length; 2 are answered at once, and 1 past the training length",
            said,
        )
        assert "(--api-key) guards it" in said
        assert f"sessions {tmp_path}: other users have access to this folder (mode 0755)" in said
        assert "the model's own sampling defaults: temperature 0.6, top_k 20;" in said
        assert f"to chat in a browser, open http://0.0.0.0:{found[1]}\n" in said
        assert "<!doctype html>" in httpx.get(f"http://127.0.0.1:{found[1]}/", timeout=60).text
        address = f"http://127.0.0.1:{found[1]}/v1"
        body = {"prompt": "hello", "max_tokens": 3, "session_id": "talk"}
        (described,) = httpx.get(f"{address}/models", timeout=60).json()["data"]
        assert described["defaults"]["temperature"] == 0.6
        answer = httpx.post(f"{address}/completions", json=body, timeout=60).json()
        rebound = httpx.get(f"{address}/models", headers={"Host": "evil.example"}, timeout=60)
        assert (rebound.status_code, rebound.json()["error"]["code"]) == (403, "host_not_allowed")
        assert answer["usage"]["completion_tokens"] <= 3
        (session,) = httpx.get(f"{address}/sessions", timeout=60).json()["data"]
        assert (session["tokens"] >= 5, session["positions"]) == (True, "original")
        for _ in range(2):
            httpx.post(f"{address}/completions", json={**body, "prompt": "hello" * 40}, timeout=60)
        (session,) = httpx.get(f"{address}/sessions", timeout=60).json()["data"]
        assert (session["turns"], session["positions"]) == (3, "compressed:lnln")
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
        rest = server.stderr.read()
        assert "hello" not in said + rest
        assert re.search(r"POST /v1/completions 200, \d+ prompt \+ \d completion tokens, \d+ ms\n", rest)
        assert rest.count("\n") == 9, rest
        assert rest.count("are answered with policy tova+1~64 and positions compressed") == 1
    assert (tmp_path / "talk.safetensors").exists()
