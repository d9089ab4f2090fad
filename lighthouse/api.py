"""The lighthouse over HTTP: four routes, no documentation pages, bounded bodies, a token on all but one."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from pydantic import TypeAdapter, ValidationError
from starlette.requests import ClientDisconnect

from ft_hsdp import protocol
from ft_hsdp.errors import ProtocolViolation
from ft_hsdp.protocol import Ask, Overview, Processes
from lighthouse.auth import Bearer
from lighthouse.service import Service
from lighthouse.store import StoreFailed

MAX_BODY = 256 * 1024
BODY_S = 10.0  # longest time for a body to arrive

_PROCESSES: TypeAdapter[Processes] = TypeAdapter(Processes)
_OVERVIEW: TypeAdapter[Overview] = TypeAdapter(Overview)


def create_app(service: Service, token: str) -> FastAPI:
    """The application. Errors are {"detail": one line}: 401, 408, 413, 422, and 503 if the store fails.

    POST /v1/quorum     `protocol.encode(Ask)` -> `protocol.encode` of the answer; a long poll
    POST /v1/processes  fields of `protocol.Processes` -> fields of `protocol.Overview`; tagged -> tagged
    GET  /v1/status     the job, its members, and each replica's state
    GET  /healthz       200 while the lighthouse serves; the only route without the token
    """
    app = FastAPI(title="lighthouse", docs_url=None, redoc_url=None, openapi_url=None)
    v1 = APIRouter(prefix="/v1", dependencies=[Depends(Bearer(token))])

    @v1.post("/quorum")
    async def quorum(request: Request) -> Response:
        """A replica asks for a step; the ask is withdrawn if it goes away."""
        ask = protocol.decode(await _body(request), Ask)
        answer = await _unless_gone(request, service, ask)
        return Response(protocol.encode(answer), media_type="application/json")

    @v1.post("/processes")
    async def processes(request: Request) -> Response:
        """A supervisor says what runs and gets orders to evict."""
        picture, tagged = _picture(await _body(request))
        overview = service.processes(picture)
        answer = protocol.encode(overview) if tagged else _OVERVIEW.dump_json(overview)
        return Response(answer, media_type="application/json")

    @v1.get("/status")
    async def status() -> JSONResponse:
        """The running job."""
        return JSONResponse(service.status())

    @app.get("/healthz")
    async def healthz() -> Response:
        """Whether the lighthouse serves."""
        return Response("ok\n", media_type="text/plain")

    @app.exception_handler(ProtocolViolation)
    async def violation(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": " ".join(str(error).split())}, 422)

    @app.exception_handler(StoreFailed)
    async def store_failed(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": " ".join(str(error).split())}, 503)

    app.include_router(v1)
    return app


async def _body(request: Request) -> bytes:
    """The body of a request, counted while it arrives. Raises HTTPException 408 or 413."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY:
                    raise HTTPException(413, f"body: more than {MAX_BODY} bytes")
    except TimeoutError:
        raise HTTPException(408, f"body: not complete after {BODY_S:g} s") from None
    except ClientDisconnect:
        raise HTTPException(400, "body: the connection closed within it") from None
    return bytes(body)


def _picture(body: bytes) -> tuple[Processes, bool]:
    """The supervisor's message, and whether it came as `protocol.encode` makes it. Raises ProtocolViolation."""
    if body.startswith(b'{"type":'):
        return protocol.decode(body, Processes), True
    try:
        return _PROCESSES.validate_json(body), False
    except ValidationError as error:
        first: Any = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "body"
        raise ProtocolViolation(f"{where[:80]}: {first['msg'][:120]}") from None


async def _unless_gone(request: Request, service: Service, ask: Ask) -> object:
    """The answer to `ask`, which is withdrawn when the client closes the connection."""
    answer = asyncio.create_task(service.ask(ask))
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise HTTPException(400, "the connection closed before the answer")
        return answer.result()
    finally:
        for task in (answer, gone):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await gone


async def _disconnected(request: Request) -> None:
    """Return when the client is gone; the body has been read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
