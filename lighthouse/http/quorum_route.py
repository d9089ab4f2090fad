"""POST /v1/quorum, the route on the path of every step: plain ASGI, in front of the framework's own routing.

Every request that the gate lets through passes here, so requests are counted and timed here, too.

A request that the current membership settles is answered without a task, a timer or a second copy. Only one that
has to wait is watched: for its deadline, and for the end of its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from ft_hsdp import protocol
from ft_hsdp.core.grant import Answer, Continue
from ft_hsdp.errors import ProtocolViolation
from ft_hsdp.protocol import QuorumRequest, Wait
from lighthouse.http.access import Bearer, refuse, too_large
from lighthouse.http.rate_limits import MAX_BODY
from lighthouse.service import Service
from lighthouse.store import StoreFailed

PATH = "/v1/quorum"
T = TypeVar("T")
BODY_S = 10.0  # longest time for a body to arrive


async def read(receive: Receive) -> bytes:
    """Return the body of a request, counted while it arrives.

    Raises:
        HTTPException: 400 if the connection closes within it, 408 if it takes longer than `BODY_S`, 413 if it is
            larger than `MAX_BODY`.
    """
    message = await _next(receive)
    body: bytes = message.get("body", b"")
    if message.get("more_body", False):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BODY_S):
                return await _rest(body, receive)
        raise HTTPException(408, f"body: not complete after {BODY_S:g} s")
    return _bounded(body)


async def _rest(body: bytes, receive: Receive) -> bytes:
    """Return ``body`` and what still arrives; stop at `MAX_BODY`."""
    parts = [body]
    size, more = len(body), True
    while more:
        message = await _next(receive)
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        more = message.get("more_body", False)
        if size > MAX_BODY:
            break
    return _bounded(b"".join(parts))


async def _next(receive: Receive) -> Message:
    """Return the next message of a body. Raises HTTPException 400."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise HTTPException(400, "body: the connection closed within it")
    return message


def _bounded(body: bytes) -> bytes:
    if len(body) > MAX_BODY:
        raise too_large(MAX_BODY)
    return body


class QuorumRoute:
    """An ASGI application: answers `PATH` itself and passes every other request on to ``api``.

    Args:
        bearer: Says who may ask.
        count: Called after each answer with the request's path, the status and the seconds that it took.
    """

    def __init__(
        self,
        api: FastAPI,
        service: Service,
        bearer: Bearer,
        count: Callable[[str, int, float], None] | None = None,
    ) -> None:
        self.api = api
        self._count = count
        self._service = service
        self._bearer = bearer
        self._last: tuple[Answer | Wait | None, bytes] = (None, b"")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._count is None or scope["type"] != "http":
            return await self._route(scope, receive, send)
        began, code = time.perf_counter(), 500

        async def sent(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
            await send(message)

        try:
            await self._route(scope, receive, sent)
        finally:
            self._count(scope["path"], code, time.perf_counter() - began)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            return await self.api(scope, receive, send)
        try:
            answer = await self._answer(scope, receive)
        except HTTPException as error:
            await refuse(send, error)
        except ProtocolViolation as error:
            await refuse(send, HTTPException(422, str(error)))
        except StoreFailed as error:
            await refuse(send, HTTPException(503, str(error)))
        else:
            body = self._encoded(answer)
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope, receive: Receive) -> Answer | Wait:
        """Check the token, read and decode the request, and return its answer."""
        if scope["method"] != "POST":
            raise HTTPException(405, headers={"Allow": "POST"})
        self._bearer.admit(scope["headers"], scope.get("role"))
        data = await read(receive)
        client = scope.get("client")
        asked = self._service.submit(protocol.decode(data, QuorumRequest), client[0] if client else None)
        if asked.answer.done():
            return asked.answer.result()
        return await attended(self._service.answered(asked), receive)

    def _encoded(self, answer: Answer | Wait) -> bytes:
        """Return the answer's bytes; members get equal answers, so the newest one is kept encoded."""
        last, data = self._last
        if answer is not last and not (isinstance(answer, Continue) and answer == last):
            data = protocol.encode(answer)
            self._last = answer, data
        return data


async def attended(answer: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Return an answer; it is cancelled if the connection ends before it. The body has been read before.

    Raises:
        HTTPException: 400, then.
    """
    waiting, over = asyncio.current_task(), False

    def end(gone: asyncio.Task[None]) -> None:
        if waiting is not None and not (over or gone.cancelled()):
            waiting.cancel()

    gone = asyncio.ensure_future(_disconnected(receive))
    gone.add_done_callback(end)
    try:
        return await answer
    except asyncio.CancelledError:
        if not gone.done() or waiting is None:
            raise
        waiting.uncancel()
        raise HTTPException(400, "the connection closed before the answer") from None
    finally:
        over = True
        gone.cancel()


async def _disconnected(receive: Receive) -> None:
    """Return when the client is gone; the body has been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass
