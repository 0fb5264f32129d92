"""The router's part of one request: forward it to a replica, and send the answer back to the client."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from msrnn.server.asgi import wait_for_disconnect
from msrnn.server.backlog import with_backlog
from msrnn.server.errors import ApiError, internal_error, shutting_down_error
from msrnn.server.limits import read_body
from msrnn.server.replies import format_error

if TYPE_CHECKING:
    from msrnn.server.router import Router


class Proxy:
    """The ASGI application of all paths that replicas answer."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._router.active += 1
        try:
            http = Request(scope, receive)
            if self._router.draining:
                raise shutting_down_error()
            body = await read_body(http, self._router.limits)
            work = asyncio.ensure_future(self._answer(http, body, send))
            gone = asyncio.ensure_future(wait_for_disconnect(receive))
            ending = asyncio.ensure_future(self._router.ending.wait())
            try:
                await asyncio.wait({work, gone, ending}, return_when=asyncio.FIRST_COMPLETED)
                if ending.done():
                    work.cancel()
                    await asyncio.wait({work})
                if work.cancelled():  # before it began
                    raise shutting_down_error()
                if work.done():
                    work.result()
            finally:
                for task in (work, gone, ending):
                    task.cancel()
                await asyncio.gather(work, gone, ending, return_exceptions=True)
        except ClientDisconnect:
            pass
        except ApiError as error:
            await JSONResponse(error.body, error.status, error.headers)(scope, receive, send)
        finally:
            self._router.active -= 1

    async def _answer(self, http: Request, body: bytes, send: Send) -> None:
        begun = more = False
        try:
            job = await self._router.job(http, body)
            if isinstance(job, Response):
                return await job(http.scope, http.receive, send)
            answer = with_backlog(self._router.pool.stream_answer(job), self._router.limits.behind)
            async with aclosing(answer) as messages:
                async for message in messages:
                    begun, more = True, message.get("more_body", message["type"] == "http.response.start")
                    await send(message)
        except ApiError as error:
            if not begun:
                raise
            await _send_last(send, error)
        except asyncio.CancelledError:
            if not self._router.ending.is_set():
                raise
            if not begun:
                raise shutting_down_error() from None
            if more:
                await _send_last(send, shutting_down_error())
        except Exception as error:  # its text is not shown, since it may hold a prompt
            if not begun:
                raise internal_error(f"internal error ({type(error).__name__})") from error
            await _send_last(send, internal_error("the replica that answered has ended: ask again"))
        return None


async def _send_last(send: Send, error: ApiError) -> None:
    """End a stream with an error."""
    await send({"type": "http.response.body", "body": format_error(error.body), "more_body": False})
