"""The gate that every request passes before any route sees it (`RequestGate`), and reading a body (`read`).

A stranger gets 401 everywhere but on the page itself and on /healthz, and learns nothing about the routes. The
route says which role it wants (`auth.Bearer`).

A request's size is bounded three times, each for a reason. `connections` bounds the bytes of the whole request,
because what a route never reads is received all the same. The gate bounds the body by its route, so that no route
can be without a bound. `read` bounds the body where a route reads it itself: such routes are also served without a
gate (the page of a run that is over), and the gate leaves POST /v1/quorum to it, because that route is on the path
of every step.
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
    """Return ``body`` if it is not too large. Raises HTTPException 413."""
    if len(body) > MAX_BODY:
        raise HTTPException(413, f"body: more than {MAX_BODY} bytes")
    return body


class RequestGate:
    """An ASGI middleware: passes a request to ``app``, or answers 401, 413, or 429 with Retry-After.

    Args:
        app: The application behind the gate.
        keys: The job's secrets.
        rates: How much each address may ask.
        clock: Monotonic seconds.
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
        """Pass one request on, or refuse it."""
        if scope["type"] != "http":
            raise ValueError("the lighthouse speaks HTTP only")
        authorization = length = None
        for name, value in scope["headers"]:
            if name == b"authorization":
                authorization = value
            elif name == b"content-length":
                length = value
        limits = rule(scope["path"])
        client = scope.get("client")
        address = source(client[0]) if client else ""
        if limits.kind != "open":
            # The only time that the token is judged: the route finds the role in the scope.
            role = scope["role"] = self._keys.role(authorization)
            if role is None:
                wait = self._rates.take("stranger", address, self._clock())
                if wait:
                    await _too_many(send, "requests without a token that is known", wait)
                else:
                    await _answer(send, 401, STRANGER, (b"www-authenticate", b"Bearer"))
                return
            # A connection that has shown a token is not closed to make room for others.
            connection = scope.get("extensions", {}).get("connection")
            if connection is not None:
                connection["known"]()
        if limits.kind != "ask" and (wait := self._rates.take(limits.kind, address, self._clock())):
            await _too_many(send, f"requests of this kind from {address}", wait)
        elif length is not None and (not length.isdigit() or len(length) > 12 or int(length) > limits.max_body):
            await _answer(send, 413, _large(limits.max_body))
        elif limits.kind == "ask":  # the route on the path of every step counts its body itself
            await self._app(scope, receive, send)
        elif limits.stream:
            await self._stream(address, scope, receive, send)
        else:
            await self._app(scope, _counted(receive, limits.max_body), send)

    async def _stream(self, address: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request whose answer has no end, if there is room for one more."""
        if not self._streams.enter(address):
            return await _too_many(send, "open streams", 5.0)
        try:
            await self._app(scope, receive, send)
        finally:
            self._streams.leave(address)


def _counted(receive: Receive, largest: int) -> Receive:
    """Return a ``receive`` that raises HTTPException 413 once more than ``largest`` bytes of a body have come."""
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
    """Answer without having read the body; `connections` bounds what of it still comes."""
    body = json.dumps({"detail": detail}).encode()
    always = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*always, *headers]})
    await send({"type": "http.response.body", "body": body})
