"""Body: the whole body of a request, with a deadline and a bound."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.exceptions import HTTPException
from starlette.types import Message, Receive

from lighthouse.limits import MAX_BODY

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
