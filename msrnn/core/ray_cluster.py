"""A Ray cluster: the connection to it, and what each worker gets of it. Ray is imported when it is asked for."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path
from typing import Any

from msrnn.checks import check_count
from msrnn.errors import UsageError

ANY = "auto"
ANSWER = 10.0  # seconds within which the cluster's address must answer; Ray itself tries for minutes
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # RFC 9113, 3.4: preface and settings


def check_cpus(ray: str | None, cpus: int | None) -> None:
    """Refuse CPUs of workers without a cluster at the address `ray`."""
    if cpus is not None and ray is None:
        raise UsageError("is for workers of a Ray cluster", name="cpus", value=cpus, advice="add ray (--ray)")
    if cpus is not None:
        check_count("cpus", cpus)


class Cluster:
    """The cluster at an address; "auto" is the one of this machine, or a new one that ends with `close`.

    A connection that the caller has made (`ray.init`) is used and stays open.

    device  of each worker: "cuda" is a GPU of its own, "auto" is that where the cluster has GPUs
    cpus    of each worker, which then uses no GPU unless the device says so; None: 1
    """

    def __init__(self, address: str = ANY, device: str = "auto", cpus: int | None = None) -> None:
        if device not in ("auto", "cpu", "cuda"):
            raise UsageError(
                "a worker has one GPU at most", name="device", value=device, advice="use 'auto', 'cpu' or 'cuda'"
            )
        self.ray, self._opened = _connect(address)
        try:
            self._divide(device, cpus)
        except BaseException:
            self.close()
            raise

    def _divide(self, device: str, cpus: int | None) -> None:
        """Find what each worker gets, and how many workers there is room for."""
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        self.gpus, self.cpus = (int(sum(node.get(kind, 0) for node in nodes)) for kind in ("GPU", "CPU"))
        if device == "cuda" and not self.gpus:
            raise UsageError("this Ray cluster has no GPU", name="device", value=device, advice="use 'cpu' or 'auto'")
        self.device = "cuda" if device == "cuda" or (device == "auto" and self.gpus and cpus is None) else "cpu"
        each, on_gpu = cpus or 1, self.device == "cuda"
        self.worker: dict[str, Any] = {"num_cpus": each, "num_gpus": int(on_gpu)}
        most = int(max((node.get("CPU", 0) for node in nodes), default=0))
        if each > most:
            raise UsageError(f"no machine of this Ray cluster has more than {most}", name="cpus", value=each)
        # How many there is room for, if nobody else uses the cluster.
        self.workers = sum(
            int(min(node.get("CPU", 0) // each, node.get("GPU", 0) if on_gpu else most)) for node in nodes
        )

    def summary(self) -> str:
        each = f"{self.worker['num_cpus']} CPU" + (" and a GPU" if self.device == "cuda" else "")
        return f"Ray: {self.cpus} CPUs, {self.gpus} GPUs; {each} for each of {self.workers} workers"

    def close(self) -> None:
        """Leave the cluster, unless the caller had connected to it before."""
        if self._opened:
            self._opened = False
            self.ray.shutdown()


def reachable(model: str | None) -> str | None:
    """The model's name for a process that runs in another folder."""
    return str(Path(model).resolve()) if model and Path(model).exists() else model


def _connect(address: str) -> tuple[Any, bool]:
    """Ray, connected to a cluster; and whether the connection was made here."""
    try:
        import ray
    except ImportError as error:
        raise UsageError("the package ray is not installed: pip install 'msrnn[ray]'") from error
    from ray._private.services import canonicalize_bootstrap_address  # no public function resolves "auto"
    from ray.util.client import ray as client

    named = (os.environ.get("RAY_ADDRESS") or ANY) if address == ANY else address
    if "://" in named or client.is_connected():
        raise UsageError(
            "Ray Client cannot stream what workers compute",
            name="ray",
            value=named,
            advice="run msrnn on a machine of the cluster, with HOST:PORT",
        )
    asked = None if address == ANY else address
    try:
        where = canonicalize_bootstrap_address(asked)  # HOST:PORT; None: no cluster is known, so Ray starts one
    except ValueError as error:
        raise UsageError("not the address of a Ray cluster", name="ray", value=named, advice="use HOST:PORT") from error
    if ray.is_initialized():
        connected = ray.get_runtime_context().gcs_address
        if address != ANY and where is not None and not same_address(where, connected):
            raise UsageError(
                f"this process is connected to the Ray cluster at {connected}",
                name="ray",
                value=address,
                advice="call ray.shutdown() first, or leave the address out",
            )
        return ray, False
    if where is not None:
        check_answer(address, where)
    try:
        ray.init(asked, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise _no_answer(address, where, str(error).splitlines()[0][:200]) from error
    return ray, True


def check_answer(given: str, where: str) -> None:
    """Refuse an address (`where`, HOST:PORT) at which no gRPC server answers soon."""
    host, _, port = where.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), ANSWER) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):  # the server waits for a TLS greeting
                return
            connection.sendall(b"".join(HTTP2))
            with connection.makefile("rb") as answer:
                frame = answer.read(9)
    except (OSError, OverflowError, ValueError) as error:
        raise _no_answer(given, where, getattr(error, "strerror", None) or str(error)) from error
    if frame[3:4] != HTTP2[1][3:4]:
        raise _no_answer(given, where, "another service listens there")


def same_address(one: str, other: str) -> bool:
    """Whether two addresses (HOST:PORT) mean the same port of the same machine."""
    (host, _, port), (other_host, _, other_port) = one.rpartition(":"), other.rpartition(":")
    if port != other_port:
        return False
    try:
        return host == other_host or socket.gethostbyname(host) == socket.gethostbyname(other_host)
    except OSError:
        return False


def _no_answer(given: str, where: str | None, reason: str) -> UsageError:
    if given == ANY:
        return UsageError(
            f"no Ray cluster answers at {where}, which RAY_ADDRESS or the last `ray start` names ({reason})",
            name="ray",
            advice="start it again, or end it with `ray stop`",
        )
    return UsageError(
        f"no Ray cluster answers there ({reason})",
        name="ray",
        value=given,
        advice="start one with `ray start --head`, or leave the address out",
    )
