"""POST /v1/quorum, the route on the path of every step: plain ASGI, in front of the framework's own routing.

A request that the current membership settles is answered without a task, a timer or a second copy. Only one that
has to wait is watched: for its deadline, and for the end of its connection.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from ft_hsdp import protocol
from ft_hsdp.core.grant import Answer, Continue
from ft_hsdp.errors import ProtocolViolation
from ft_hsdp.protocol import QuorumRequest, Wait
from lighthouse.http import middleware
from lighthouse.http.auth import Bearer
from lighthouse.service import Open, Service
from lighthouse.store import StoreFailed

PATH = "/v1/quorum"
_JSON = (b"content-type", b"application/json")


class QuorumRoute:
    """An ASGI application: answers `PATH` itself and passes every other request on to ``api``."""

    def __init__(self, api: FastAPI, service: Service, bearer: Bearer) -> None:
        self.api = api
        self._service = service
        self._bearer = bearer
        self._last: tuple[Answer | Wait | None, bytes] = (None, b"")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; errors are {"detail": one line}."""
        if scope["type"] != "http" or scope["path"] != PATH:
            await self.api(scope, receive, send)
            return
        try:
            answer = await self._answer(scope, receive)
        except HTTPException as error:
            named = (error.headers or {}).items()
            extra = [(name.lower().encode(), value.encode()) for name, value in named]
            await _say(send, error.status_code, error.detail, *extra)
        except ProtocolViolation as error:
            await _say(send, 422, str(error))
        except StoreFailed as error:
            await _say(send, 503, str(error))
        else:
            await _send(send, 200, self._encoded(answer))

    async def _answer(self, scope: Scope, receive: Receive) -> Answer | Wait:
        """Check the token, read and decode the request, and return its answer."""
        if scope["method"] != "POST":
            raise HTTPException(405, headers={"Allow": "POST"})
        self._bearer.admit(scope["headers"], scope.get("role"))
        data = await middleware.read(receive)
        client = scope.get("client")
        asked = self._service.submit(protocol.decode(data, QuorumRequest), client[0] if client else None)
        if asked.answer.done():
            return asked.answer.result()
        return await self._wait(asked, receive)

    async def _wait(self, asked: Open, receive: Receive) -> Answer | Wait:
        """Wait for the answer; a request whose connection ends is withdrawn."""
        gone = asyncio.ensure_future(_disconnected(receive))
        gone.add_done_callback(lambda task: None if task.cancelled() else asked.answer.cancel())
        try:
            return await self._service.answered(asked)
        except asyncio.CancelledError:
            if gone.done() and not gone.cancelled():
                raise HTTPException(400, "the connection closed before the answer") from None
            raise
        finally:
            gone.cancel()

    def _encoded(self, answer: Answer | Wait) -> bytes:
        """Return the answer's bytes; members get equal answers, so the newest one is kept encoded."""
        last, data = self._last
        if answer is not last and not (isinstance(answer, Continue) and answer == last):
            data = protocol.encode(answer)
            self._last = answer, data
        return data


async def _disconnected(receive: Receive) -> None:
    """Return when the client is gone; the body has been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _say(send: Send, status: int, detail: str, *headers: tuple[bytes, bytes]) -> None:
    await _send(send, status, json.dumps({"detail": " ".join(detail.split())}).encode(), *headers)


async def _send(send: Send, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    length = (b"content-length", b"%d" % len(body))
    start: dict[str, Any] = {"type": "http.response.start", "status": status, "headers": [_JSON, length, *headers]}
    await send(start)
    await send({"type": "http.response.body", "body": body})
