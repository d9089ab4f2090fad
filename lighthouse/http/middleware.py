"""Body: the whole body of a request, with a deadline and a bound.

Gate: what every request passes before any route sees it: the token, the rate, the size. An ASGI middleware.

A stranger gets 401 everywhere but on the page itself and on /healthz, and learns nothing about the routes. Which
role a route wants is said by the route (`auth.Bearer`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lighthouse.http.auth import STRANGER, Keys
from lighthouse.http.rate_limits import MAX_BODY, STREAMS, OpenSlots, Rates, TooMany, rule, source

BODY_S = 10.0  # longest time for a body to arrive


async def read(receive: Receive) -> bytes:
    """The body of a request, counted while it arrives. Raises HTTPException 400, 408 or 413."""
    message = await _next(receive)
    body: bytes = message.get("body", b"")
    if message.get("more_body", False):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BODY_S):
                return await _rest(body, receive)
        raise HTTPException(408, f"body: not complete after {BODY_S:g} s")
    return _bounded(body)


async def _rest(body: bytes, receive: Receive) -> bytes:
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
    message = await receive()
    if message["type"] == "http.disconnect":
        raise HTTPException(400, "body: the connection closed within it")
    return message


def _bounded(body: bytes) -> bytes:
    if len(body) > MAX_BODY:
        raise HTTPException(413, f"body: more than {MAX_BODY} bytes")
    return body


class RequestGate:
    """Lets a request through to ``app``, or answers {"detail": one line}: 401, 413, or 429 with Retry-After.

    clock: monotonic seconds.
    """

    def __init__(
        self, app: ASGIApp, keys: Keys, rates: Rates, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._app = app
        self._keys = keys
        self._rates = rates
        self._clock = clock
        self._streams = OpenSlots(STREAMS, STREAMS // 4)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            raise ValueError("the lighthouse speaks HTTP only")
        told = length = None
        for name, value in scope["headers"]:
            if name == b"authorization":
                told = value
            elif name == b"content-length":
                length = value
        way = rule(scope["path"])
        client = scope.get("client")
        address = source(client[0]) if client else ""
        if way.kind != "open":
            role = scope["role"] = self._keys.role(told)
            if role is None:
                wait = self._rates.take("stranger", address, self._clock())
                if wait:
                    await _too_many(send, "requests without a token that is known", wait)
                else:
                    await _answer(send, 401, STRANGER, (b"www-authenticate", b"Bearer"))
                return
            door = scope.get("extensions", {}).get("door")
            if door is not None:
                door["known"]()
        if way.kind != "ask" and (wait := self._rates.take(way.kind, address, self._clock())):
            await _too_many(send, f"requests of this kind from {address}", wait)
        elif length is not None and (not length.isdigit() or len(length) > 12 or int(length) > way.max_body):
            await _answer(send, 413, _large(way.max_body))
        elif way.kind == "ask":  # the route on the path of every step counts its body itself
            await self._app(scope, receive, send)
        elif way.stream:
            await self._stream(address, scope, receive, send)
        else:
            await self._app(scope, _counted(receive, way.max_body), send)

    async def _stream(self, address: str, scope: Scope, receive: Receive, send: Send) -> None:
        """An answer without an end holds a place."""
        if not self._streams.enter(address):
            return await _too_many(send, "open streams", 5.0)
        try:
            await self._app(scope, receive, send)
        finally:
            self._streams.leave(address)


def _counted(receive: Receive, largest: int) -> Receive:
    """``receive`` that raises HTTPException 413 once more than ``largest`` bytes of a body have come."""
    got = 0

    async def counted() -> Message:
        nonlocal got
        message = await receive()
        body = message.get("body")
        if body:
            got += len(body)
            if got > largest:
                raise HTTPException(413, _large(largest))
        return message

    return counted


def _large(largest: int) -> str:
    return f"body: more than {largest} bytes"


async def _too_many(send: Send, what: str, wait: float) -> None:
    error = TooMany(what, wait)
    headers = error.headers or {}
    await _answer(send, 429, error.detail, *((k.lower().encode(), v.encode()) for k, v in headers.items()))


async def _answer(send: Send, status: int, detail: str, *headers: tuple[bytes, bytes]) -> None:
    """Answer without having read the body; the door bounds what of it still comes."""
    body = json.dumps({"detail": detail}).encode()
    always = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*always, *headers]})
    await send({"type": "http.response.body", "body": body})
