"""The HTTP server of one engine: routes, limits, streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import msrnn
from msrnn.engine.constraint import NAME
from msrnn.engine.engine import Engine
from msrnn.engine.requests import Request
from msrnn.errors import SessionError, UsageError
from msrnn.server.asgi import make_app, wait_for_disconnect
from msrnn.server.docs_page import docs_routes
from msrnn.server.errors import (
    ApiError,
    bad_input,
    internal_error,
    queue_full_error,
    session_error,
    shutting_down_error,
    slow_client_error,
)
from msrnn.server.feed import Feed, read_all, stream_reply
from msrnn.server.keys import owner_of
from msrnn.server.limits import RETRY_SECONDS, Checked, Limits, Parsing, read_body
from msrnn.server.metrics import Metrics, Timer
from msrnn.server.models import ModelEndpoints
from msrnn.server.openapi import PATH as OPENAPI
from msrnn.server.openapi import describe_api
from msrnn.server.page import page_routes
from msrnn.server.prompts import check_answers
from msrnn.server.protocol import Job, Served, parse_chat, parse_completion
from msrnn.server.replies import ChatReply, Reply
from msrnn.server.request_log import USAGE
from msrnn.server.response_errors import rename_error
from msrnn.server.response_replies import ResponseReply
from msrnn.server.response_requests import parse_response
from msrnn.server.responses import PATH as RESPONSES
from msrnn.server.responses import ResponseEndpoints
from msrnn.server.sessions import SessionEndpoints
from msrnn.server.structured import refuse_constraint
from msrnn.server.tokenizing import TokenEndpoints


class Server:
    """Answers HTTP requests with an engine."""

    def __init__(self, engine: Engine, served: Served, limits: Limits) -> None:
        self.engine, self.served, self.limits = engine, served, limits
        self.metrics = Metrics(engine)
        self.parsing = Parsing()
        self.active = 0  # waiting and running requests
        self.draining = False  # new requests are refused
        self._feeds: set[Feed] = set()  # of answers that are not finished

    def app(self) -> Starlette:
        routes = [
            Route("/v1/chat/completions", self._guard(self.chat), methods=["POST"]),
            Route("/v1/completions", self._guard(self.completions), methods=["POST"]),
            Route(RESPONSES, self._guard(self.respond), methods=["POST"]),
            *ResponseEndpoints(self.engine).routes(self._guard),
            *ModelEndpoints(self.engine, self.served).routes(self._guard),
            *TokenEndpoints(self.engine, self.served, self._check).routes(self._guard),
            *SessionEndpoints(self.engine, self.limits).routes(self._guard),
            Route("/health", self.health, methods=["GET"]),
            Route("/metrics", self.read_metrics, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
            Route(OPENAPI, self.read_openapi, methods=["GET"]),
            *page_routes(),
            *docs_routes(),
        ]

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            yield
            await asyncio.to_thread(self.engine.close)

        return make_app(routes, self.limits, lifespan)

    def _guard(self, endpoint: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest], Any]:
        """Turn errors into OpenAI's shape. The text of an internal error is not shown, since it may hold a prompt."""

        async def answer_or_refuse(request: HttpRequest) -> Response:
            try:
                if self.draining:
                    raise shutting_down_error()
                response: Response = await endpoint(request)
                return response
            except ApiError as error:
                return JSONResponse(error.body, error.status, error.headers)
            except SessionError as error:
                conflict = session_error(str(error), error.code)
                return JSONResponse(conflict.body, conflict.status)
            except UsageError as error:
                return JSONResponse(bad_input(error).body, 400)
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:
                return JSONResponse(internal_error(f"internal error ({type(error).__name__})").body, 500)

        return answer_or_refuse

    async def chat(self, http: HttpRequest) -> Response:
        return await self._answer(http, *await self._parse(http, parse_chat), ChatReply)

    async def completions(self, http: HttpRequest) -> Response:
        return await self._answer(http, *await self._parse(http, parse_completion), Reply)

    async def respond(self, http: HttpRequest) -> Response:
        try:
            job, requests = await self._parse(http, parse_response)
        except SessionError as error:
            raise rename_error(session_error(str(error), error.code)) from error
        try:
            return await self._answer(http, job, requests, ResponseReply)
        except ApiError as error:
            raise rename_error(error) from error

    async def _parse(self, http: HttpRequest, parse: Callable[[Any, Served, str], Job]) -> tuple[Job, list[Request]]:
        """Check a request, in another thread: long texts take long to tokenize."""
        owner = owner_of(http.scope)

        def make_requests(fields: Any) -> tuple[Job, list[Request]]:
            check_answers(fields, self._most)
            job = parse(fields, self.served, owner)
            about = (
                job.params,
                job.session,
                job.turns,
                job.retention,
                owner,
                job.protect,
                job.keeps_protected,
                job.beginning,
                job.size,
            )
            try:
                return job, [self.engine.request(prompt, *about) for prompt in job.prompts]
            except SessionError:
                raise
            except UsageError as error:
                if error.name == NAME and job.constrained_by is not None:
                    raise refuse_constraint(error, job.constrained_by) from error
                raise bad_input(error, fields) from error

        return await self._check(http, make_requests)

    async def _check(self, http: HttpRequest, check: Callable[[Any], Checked]) -> Checked:
        """What a function makes of the JSON of a request, within the limits."""
        return await self.parsing.run(await read_body(http, self.limits), check, self._most - self.active)

    @property
    def _most(self) -> int:
        """The most requests that run or wait."""
        return self.engine.capacity + self.limits.queue

    async def _answer(self, http: HttpRequest, job: Job, requests: list[Request], kind: type[Reply]) -> Response:
        if self.draining:  # by now
            raise shutting_down_error()
        if self.active + len(requests) > self._most:
            raise queue_full_error(RETRY_SECONDS)
        reply = kind(job, requests, self.served.name, self.served.tokenizer)
        http.scope.get(USAGE, []).append(reply.usage)
        feed = self._start(requests)
        if job.stream:
            return StreamingResponse(stream_reply(http, feed, reply), media_type="text/event-stream")
        work = asyncio.ensure_future(read_all(feed))
        gone = asyncio.ensure_future(wait_for_disconnect(http.receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientDisconnect
            work.result()
        finally:
            for task in (work, gone):
                task.cancel()
            with suppress(BaseException):
                await asyncio.gather(work, gone, return_exceptions=True)
        return await asyncio.to_thread(lambda: JSONResponse(reply.complete()))

    def _start(self, requests: list[Request]) -> Feed:
        """Add requests to the engine. They count until they end, even if the client does not read the reply."""
        feed = Feed(requests, asyncio.Queue(), [])

        async def collect(request: Request) -> None:
            timer = Timer(self.metrics, request)
            try:
                async for event in self.engine.stream(request):
                    timer.event(event)
                    if feed.events.qsize() >= self.limits.behind:
                        raise slow_client_error(self.limits.behind)
                    feed.events.put_nowait(event)
                feed.events.put_nowait(None)
            except Exception as error:
                feed.events.put_nowait(error)

        def count_end(_: object) -> None:
            self.active -= 1
            if all(task.done() for task in feed.tasks):
                self._feeds.discard(feed)

        self._feeds.add(feed)
        for request in requests:
            self.active += 1
            feed.tasks.append(asyncio.ensure_future(collect(request)))
            feed.tasks[-1].add_done_callback(count_end)
        return feed

    def end_answers(self) -> None:
        """End running answers with an error, after the tokens so far. Their sessions stay as they were."""
        for feed in self._feeds:
            feed.events.put_nowait(shutting_down_error())

    async def health(self, _: HttpRequest) -> Response:
        if self.draining:
            return JSONResponse({"status": "shutting down"}, 503)
        return JSONResponse({"status": "ok"}) if self.engine.healthy else JSONResponse({"status": "failing"}, 503)

    async def read_metrics(self, _: HttpRequest) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def read_openapi(self, _: HttpRequest) -> Response:
        return JSONResponse(describe_api(self.served, keyed=bool(self.limits.keys)))

    async def version(self, _: HttpRequest) -> Response:
        return JSONResponse({"version": msrnn.__version__})
