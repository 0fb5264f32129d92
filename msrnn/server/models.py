"""Endpoints of models: a server has one, which it lists and describes."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from msrnn.core.fingerprint import WEIGHTS
from msrnn.engine.engine import Engine
from msrnn.engine.lanes import LongEngine
from msrnn.server.errors import wrong_model_error
from msrnn.server.protocol import Served
from msrnn.server.sessions import Guard

PATH = "/v1/models"


class ModelEndpoints:
    def __init__(self, engine: Engine, served: Served) -> None:
        self._engine, self._served = engine, served

    def routes(self, guard: Guard) -> list[Route]:
        return [
            Route(PATH, guard(self.list), methods=["GET"]),
            Route(f"{PATH}/{{model:path}}", guard(self.show), methods=["GET"]),  # names on the hub have a slash
        ]

    async def list(self, _: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._describe_model()]})

    async def show(self, http: HttpRequest) -> Response:
        name = str(http.path_params["model"])
        if name != self._served.name:
            raise wrong_model_error(name, self._served.name)
        return JSONResponse(self._describe_model())

    def _describe_model(self) -> dict[str, Any]:
        model = {"id": self._served.name, "object": "model", "created": 0, "owned_by": "msrnn"}
        facts = self._engine.executor.facts
        made = {name: facts.fingerprint[name] for name in ("policy", "size", "positions")}
        if not isinstance(made["size"], int):
            made |= {"size": facts.mean_size, "sizes": facts.sizes}
        if WEIGHTS in facts.fingerprint:
            made[WEIGHTS] = facts.fingerprint[WEIGHTS]
        made["bytes"] = facts.slot_nbytes
        if facts.recall is not None:
            bytes_of = {"token_bytes": facts.archived_row_nbytes, "device_token_bytes": facts.index_row_nbytes}
            made["recall"] = {**facts.recall.shown, **bytes_of}
        if isinstance(self._engine, LongEngine):
            long = self._engine.long_executor.facts.fingerprint
            made["long"] = {"above": self._engine.length, "policy": long["policy"], "positions": long["positions"]}
        made["max_model_len"] = self._engine.find_longest(self._served.most_tokens)
        return {**model, **made, **self._served.shown}
