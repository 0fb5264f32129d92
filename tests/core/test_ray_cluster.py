"""Addresses at which no Ray cluster answers are refused soon. Most of it needs no Ray."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from msrnn.cli import main
from msrnn.core import ray_cluster
from msrnn.core.ray_cluster import Cluster, check_answer, check_cpus, same_address
from msrnn.errors import UsageError
from tests.helpers.ray_here import cluster as cluster
from tests.helpers.ray_here import model as model

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install 'msrnn[ray]'")
SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


@contextmanager
def port(says: bytes | None, listens: bool = True) -> Iterator[str]:
    """The address of a port that answers a greeting with these bytes; None: with silence."""
    with socket.create_server(("127.0.0.1", 0)) if listens else socket.socket() as listener:
        if not listens:
            listener.bind(("127.0.0.1", 0))  # nobody else gets this port, and connections are refused

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(100)
                connection.sendall(says or b"")

        if says is not None:
            threading.Thread(target=answer, daemon=True).start()
        yield "127.0.0.1:{1}".format(*listener.getsockname())


@pytest.mark.parametrize(
    ("says", "listens", "reason"),
    [
        (None, False, "Connection refused"),
        (None, True, "timed out"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", True, "another service listens there"),
        (b"", True, "another service listens there"),
    ],
    ids=["closed", "silent", "http", "hangs-up"],
)
def test_an_address_without_a_cluster(
    says: bytes | None, listens: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "timed out":
        monkeypatch.setattr(ray_cluster, "ANSWER", 0.5)
    with port(says, listens) as address, pytest.raises(UsageError) as refused:
        check_answer(address, address)
    assert str(refused.value).startswith(f"ray={address!r}: no Ray cluster answers there ({reason}); start one with")


def test_an_address_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with port(SETTINGS) as address:
        check_answer(address, address)
    monkeypatch.setenv("RAY_USE_TLS", "1")
    with port(None) as address:  # a server that waits for a TLS greeting is silent
        check_answer(address, address)


@pytest.mark.parametrize("address", ["nobody.invalid:6379", "127.0.0.1:99999", "127.0.0.1:many"])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(UsageError, match=f"ray='{address}': no Ray cluster answers there"):
        check_answer(address, address)


def test_same_addresses() -> None:
    assert same_address("127.0.0.1:6379", "127.0.0.1:6379")
    assert same_address("localhost:6379", "127.0.0.1:6379")
    assert not same_address("127.0.0.1:6379", "127.0.0.1:6380")
    assert not same_address("nobody.invalid:6379", "127.0.0.1:6379")


@needs_ray
@pytest.mark.parametrize("command", [["eval", "story"], ["serve", "--replicas", "2"]], ids=["eval", "serve"])
def test_commands_without_a_cluster(command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def refusal(*words: str) -> str:
        began = time.monotonic()
        assert main([*command, *words]) == 2
        assert time.monotonic() < began + 30  # Ray itself gives up after minutes
        return str(capsys.readouterr().err)

    import ray

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with port(None, listens=False) as address:
        assert f"msrnn: --ray {address}: no Ray cluster answers there" in refusal("--ray", address)
        client = f"ray://{address}"
        assert f"msrnn: --ray {client}: Ray Client cannot stream" in refusal("--ray", client)
        assert "msrnn: --ray nowhere: not the address of a Ray cluster" in refusal("--ray", "nowhere")
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert f":{address.partition(':')[2]}, which RAY_ADDRESS or the last `ray start` names" in refusal("--ray")
        monkeypatch.setenv("RAY_ADDRESS", client)
        assert f"msrnn: --ray {client}: Ray Client cannot stream" in refusal("--ray")
    monkeypatch.delenv("RAY_ADDRESS")
    assert not ray.is_initialized()


@needs_ray
def test_a_connection_that_is_made_here_ends_here(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray
    from ray.cluster_utils import Cluster as Machines

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    machines = Machines(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        Cluster(machines.address).close()
        assert not ray.is_initialized()
        with pytest.raises(UsageError, match="no machine of this Ray cluster has more than 1"):
            Cluster(machines.address, cpus=2)
        assert not ray.is_initialized()
        cluster = Cluster(machines.address)
        with pytest.raises(UsageError, match="this process is connected to the Ray cluster"):
            Cluster("127.0.0.1:1")
        cluster.close()
        cluster.close()
        assert not ray.is_initialized()
    finally:
        machines.shutdown()


@needs_ray
def test_bad_clusters(cluster: str, model: Path, capsys: Any) -> None:
    for words, message in (
        (["eval", "story", "--cpus", "2"], "--cpus 2: is for workers of a Ray cluster; add ray (--ray)"),
        (["eval", "story", "--ray", "--cpus", "64"], "--cpus 64: no machine of this Ray cluster has more than 2"),
        (["eval", "story", "--ray", "--device", "cuda"], "--device cuda: this Ray cluster has no GPU"),
        (["serve", "--replicas", "2"], "--replicas 2: they are processes of a Ray cluster; add ray (--ray)"),
        (["serve", "--replicas", "3", "--ray"], "--replicas 3: this Ray cluster has room for 2"),
    ):
        assert main([*words, "--model", str(model)]) == 2
        assert f"msrnn: {message}" in capsys.readouterr().err


@needs_ray
def test_a_connection_of_the_caller_stays_open(cluster: str) -> None:
    import ray

    _, port = cluster.rsplit(":", 1)
    for address in ("auto", cluster, f"127.0.0.1:{port}"):
        Cluster(address).close()
        assert ray.is_initialized()
    with pytest.raises(UsageError, match="no machine of this Ray cluster"):
        Cluster(cpus=64)
    # Ray itself would go on with the cluster that it is connected to, without a word.
    with pytest.raises(
        UsageError, match=f"ray='127.0.0.1:1': this process is connected to the Ray cluster at {cluster}"
    ):
        Cluster("127.0.0.1:1")
    assert ray.get(ray.put("still here")) == "still here"


@pytest.mark.parametrize("cpus", [0, -1, 1.5, True])
def test_cpus_of_workers(cpus: Any) -> None:
    with pytest.raises(UsageError, match=f"^cpus={cpus}: must be a whole number, 1 or more$"):
        check_cpus("auto", cpus)
    with pytest.raises(UsageError, match=r"cpus=2: is for workers of a Ray cluster; add ray \(--ray\)"):
        check_cpus(None, 2)
    check_cpus("auto", 2)
    check_cpus(None, None)
