"""`msrnn.serve` from Python: with a model that is loaded, or with the name of one."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import msrnn
from msrnn.errors import UsageError
from tests.helpers.characters import character_model, character_tokenizer
from tests.helpers.live_server import wait_until


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as other:
        return int(other.getsockname()[1])


@contextmanager
def asking(port: int, found: dict[str, Any]) -> Iterator[None]:
    """A client in another thread: asks once, and then stops the server with Ctrl-C."""

    def is_up() -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def ask() -> None:
        try:
            wait_until(is_up)
            found["model"] = httpx.get(f"http://127.0.0.1:{port}/v1/models").json()["data"][0]
            body = {"prompt": "hello", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
            found["answer"] = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60).json()
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    client = threading.Thread(target=ask)
    client.start()
    try:
        yield
    finally:
        client.join()


@pytest.mark.parametrize("loaded", [True, False])
def test_a_server_from_python(loaded: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It returns after Ctrl-C, and Ctrl-C is the caller's again."""
    model, tokenizer, port = character_model(), character_tokenizer(), free_port()
    found: dict[str, Any] = {}
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with asking(port, found):
        if loaded:
            rnn = msrnn.MultiStateRNN(model, "echo", 16)
            msrnn.serve(rnn, tokenizer, port=port, slots=2, served_model_name="tiny", quiet=True)
        else:
            model.save_pretrained(tmp_path)
            tokenizer.save_pretrained(tmp_path)
            recall: Any = {"recall": 8, "recall_every": 4, "archive": str(tmp_path / "archive")}
            recall |= {"archive_bytes": 10**9, "search": "exact"}
            made: Any = {"policy": "echo", "size": 16, "device": "cpu", "served_model_name": "tiny", **recall}
            msrnn.serve(tmp_path, port=port, slots=2, **made)
            shown = {"rows": 8, "every": 4, "while_reading": None, "archive": "folder", "token_bytes": 1}
            shown["device_token_bytes"] = 0  # the host searches a folder
            shown |= {"archive_bytes": 10**9, "search": "exact"}
            assert {**found["model"]["recall"], "token_bytes": 1} == shown
            assert found["model"]["recall"]["token_bytes"] > 1
    assert (found["model"]["id"], found["model"]["policy"], found["model"]["size"]) == ("tiny", "echo", 16)
    assert found["answer"]["usage"]["completion_tokens"] == 3
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    said = capsys.readouterr().err
    assert f"tiny at http://127.0.0.1:{port}/v1" in said
    assert ("POST /v1/completions 200" in said) is not loaded
    assert ("in its archive, which has the last 3,906,250 at most" in said) is not loaded


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"port": 70000}, "port=70000: must be a whole number from 0 to 65535"),
        ({"port": "8000"}, "port='8000': must be a whole number"),
        ({"served_model_name": 5}, "served_model_name=5: must be a word or more"),
        ({"slots": 0}, "slots=0: must be a whole number, 1 or more"),
        ({"policy": "tofu"}, "tofu"),
        ({"api_key": " "}, "api_key: must not be empty"),
        ({"api_key": 5}, "api_key: is of type int, and must be a string or a list of strings"),
        ({"api_key": ["key", 5]}, "api_key: is of type list, and must be a string or a list of strings"),
        ({"allowed_host": b"host"}, "allowed_host: is of type bytes"),
        ({"cors_origin": True}, "cors_origin: is of type bool"),
        ({"tokenizer": "mine"}, "tokenizer: is loaded with the model; leave it out"),
        ({"replicas": 2}, "replicas=2: they are processes of a Ray cluster"),
        ({"recall": -1}, "recall=-1: must be a whole number"),
        ({"recall": 4, "recall_every": 0}, "recall_every=0: must be a whole number"),
        ({"archive": "device"}, "archive='device': nothing is archived"),
        ({"sessions": __file__}, "test_start.py': is a file; name a folder"),
        ({"chat_template": "no-such-file"}, "chat_template='no-such-file': cannot be read"),
        ({"ssl_keyfile": "key.pem"}, "ssl_keyfile='key.pem': is the key of a certificate; give ssl_certfile as well"),
        ({"ssl_certfile": "no-such-file"}, "ssl_certfile='no-such-file': no such file"),
        ({"sessions": "a", "prefix_states": "a"}, "prefix_states='a': is the folder of the sessions"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    """They are refused before a model is loaded."""
    with pytest.raises(UsageError) as error:
        msrnn.serve("there-is-no-such-model", **arguments)
    assert message in str(error.value)


def test_arguments_that_contradict_a_loaded_model() -> None:
    rnn, tokenizer = msrnn.MultiStateRNN(character_model(), "tova", 16), character_tokenizer()
    model: Any = rnn.model
    with pytest.raises(UsageError, match="must be a name, a folder or a MultiStateRNN; wrap it"):
        msrnn.serve(model, tokenizer)
    with pytest.raises(UsageError, match="tokenizer: is needed with a MultiStateRNN"):
        msrnn.serve(rnn)
    with pytest.raises(UsageError, match="recall=4: the MultiStateRNN has its own"):
        msrnn.serve(rnn, tokenizer, recall=4)
    with pytest.raises(UsageError, match="revision='v1': the MultiStateRNN has its own"):
        msrnn.serve(rnn, tokenizer, revision="v1")
    with pytest.raises(UsageError, match="lora='adapter': the MultiStateRNN has its own"):
        msrnn.serve(rnn, tokenizer, lora="adapter")
    with pytest.raises(UsageError, match="policy='tova': the MultiStateRNN has its own"):
        msrnn.serve(rnn, tokenizer, policy="tova")
    with pytest.raises(UsageError, match="ray: replicas load the model themselves"):
        msrnn.serve(rnn, tokenizer, ray="auto")
