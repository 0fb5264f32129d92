"""Replicas of a server as Ray Serve deployments: Ray places them, watches them and starts them again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from time import monotonic
from typing import Any
from uuid import uuid4

from starlette.types import Message, Scope

from msrnn.core.ray_cluster import Cluster
from msrnn.errors import UsageError
from msrnn.server.in_process import answer_in_process
from msrnn.server.replica_pool import LostReplicaError
from msrnn.server.server import Server

# Seconds without a ping from the router, after which a replica removes itself. The first ping may come late: the
# router begins when all replicas are up.
ABANDONED, NEVER_ASKED = 120.0, 3600.0
MOST_REQUESTS = 100_000  # of a replica at once: its server has its own limit


class RayReplicas:
    """Starts replicas; `make` makes the server of a replica from its number. They are up when this returns."""

    def __init__(self, cluster: Cluster, count: int, make: Callable[[int], Server]) -> None:
        if count > cluster.workers:
            raise UsageError(
                f"this Ray cluster has room for {cluster.workers} ({cluster.summary()})",
                name="replicas",
                value=count,
                advice="use fewer, or fewer cpus for each",
            )
        from ray import serve

        self._serve, self._cluster = serve, cluster
        serve.start(proxy_location="Disabled", logging_config={"log_level": logging.ERROR})
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        name = f"msrnn-{uuid4().hex[:8]}"
        self._names = [f"{name}-{number}" for number in range(count)]
        deployment = serve.deployment(
            _Deployment,
            name="server",
            num_replicas=1,
            max_ongoing_requests=MOST_REQUESTS,
            ray_actor_options=cluster.worker,
            health_check_period_s=1,
            max_constructor_retry_count=2,
            logging_config={"log_level": logging.ERROR},
        )
        targets = [
            serve.RunTarget(deployment.bind(make, number, name), name=name, route_prefix=None)
            for number, name in enumerate(self._names)
        ]
        try:
            handles = serve.run_many(targets)
        except BaseException as error:
            self.close()
            if isinstance(error, RuntimeError):
                raise UsageError(f"the replicas cannot be started: {_reason(error)}") from error
            raise
        self.replicas = [RayReplica(handle) for handle in handles]

    def close(self) -> None:
        """End all replicas, and remove them from the cluster."""
        for name in self._names:
            self._serve.delete(name, _blocking=False)
        for name in self._names:
            self._serve.delete(name)


def _reason(error: RuntimeError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if "UsageError" in line or "Error:" in line]
    return lines[-1][:300] if lines else str(error).splitlines()[0][:300]


class RayReplica:
    """A replica as the router sees it."""

    def __init__(self, handle: Any) -> None:
        self._stream, self._handle = handle.options(stream=True), handle

    async def answer(self, scope: Scope, body: bytes) -> AsyncGenerator[Message, None]:
        messages = self._stream.answer.remote(scope, body)
        try:
            while True:
                with _naming_lost_replicas():
                    message = await anext(messages, None)
                if message is None:
                    return
                yield message
        finally:
            messages.cancel()

    async def ping(self) -> None:
        with _naming_lost_replicas():
            await self._handle.ping.remote()


@contextmanager
def _naming_lost_replicas() -> Iterator[None]:
    """Turn what Ray raises for a lost replica, machine or deployment into LostReplicaError."""
    from ray.exceptions import RayError, RayTaskError
    from ray.serve.exceptions import RayServeException

    try:
        yield
    except RayTaskError:  # an error of our own code
        raise
    except (RayError, RayServeException) as error:
        raise LostReplicaError from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise LostReplicaError from error  # Ray has cancelled it, and not we


class _Deployment:
    """The deployment: a server without a socket."""

    def __init__(self, make: Callable[[int], Server], number: int, name: str) -> None:
        self._server, self._name = make(number), name
        self._app = self._server.app()
        self._heard, self._patience = monotonic(), NEVER_ASKED

    async def answer(self, scope: Scope, body: bytes) -> AsyncGenerator[Message, None]:
        async with aclosing(answer_in_process(self._app, scope, body)) as messages:
            async for message in messages:
                yield message

    async def ping(self) -> None:
        self._heard, self._patience = monotonic(), ABANDONED

    def check_health(self) -> None:
        """Ray asks every second, and starts a replica again that fails."""
        if not self._server.engine.healthy:
            raise RuntimeError("steps of the engine fail, one after another")
        if monotonic() - self._heard > self._patience:
            from ray import serve

            serve.delete(self._name, _blocking=False)

    def __del__(self) -> None:
        if hasattr(self, "_server"):
            self._server.engine.close()
