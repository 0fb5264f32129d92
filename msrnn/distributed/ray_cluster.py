"""A Ray cluster: the connection to it, and what each worker gets of it. Ray is imported when it is asked for."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from msrnn.errors import UsageError

ANY = "auto"


class Cluster:
    """The cluster at an address; "auto" is the one of this machine, or a new one that ends with this process.

    device  of each worker: "cuda" is a GPU of its own, "auto" is that where the cluster has GPUs
    cpus    of each worker, which then uses no GPU unless the device says so; None: 1
    """

    def __init__(self, address: str = ANY, device: str = "auto", cpus: int | None = None) -> None:
        if device not in ("auto", "cpu", "cuda"):
            raise UsageError(f"device={device!r}: a worker has one GPU at most; use 'auto', 'cpu' or 'cuda'")
        self.ray = _connected(address)
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        self.gpus, self.cpus = (int(sum(node.get(kind, 0) for node in nodes)) for kind in ("GPU", "CPU"))
        if device == "cuda" and not self.gpus:
            raise UsageError(f"device={device!r}: this Ray cluster has no GPU; use 'cpu' or 'auto'")
        self.device = "cuda" if device == "cuda" or (device == "auto" and self.gpus and cpus is None) else "cpu"
        each, on_gpu = cpus or 1, self.device == "cuda"
        self.worker: dict[str, Any] = {"num_cpus": each, "num_gpus": int(on_gpu)}
        most = int(max((node.get("CPU", 0) for node in nodes), default=0))
        if each > most:
            raise UsageError(f"cpus={each}: no machine of this Ray cluster has more than {most}")
        # How many there is room for, if nobody else uses the cluster.
        self.workers = sum(
            int(min(node.get("CPU", 0) // each, node.get("GPU", 0) if on_gpu else most)) for node in nodes
        )

    def summary(self) -> str:
        each = f"{self.worker['num_cpus']} CPU" + (" and a GPU" if self.device == "cuda" else "")
        return f"Ray: {self.cpus} CPUs, {self.gpus} GPUs; {each} for each of {self.workers} workers"

    def close(self) -> None:
        self.ray.shutdown()


def reachable(model: str | None) -> str | None:
    """The model's name for a process that runs in another folder."""
    return str(Path(model).resolve()) if model and Path(model).exists() else model


def _connected(address: str) -> Any:
    try:
        import ray
    except ImportError as error:
        raise UsageError("the package ray is not installed: pip install 'msrnn[ray]'") from error
    try:
        where = None if address == ANY else address
        ray.init(where, log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=True)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"--ray {address}: no Ray cluster answers there ({str(error).splitlines()[0][:200]}); "
            "start one with `ray start --head`, or leave the address out"
        ) from error
    return ray
