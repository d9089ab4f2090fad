"""The lighthouse over HTTP: its routes, put together."""

from __future__ import annotations

from email.utils import formatdate

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import TypeAdapter, ValidationError

from ft_hsdp import bounded, protocol
from ft_hsdp.errors import ProtocolViolation
from ft_hsdp.protocol import Overview, Processes
from lighthouse import body
from lighthouse.admin import admin
from lighthouse.auth import Bearer, Keys
from lighthouse.chronicle import Chronicle
from lighthouse.metrics import Meter, metrics
from lighthouse.openapi import describe
from lighthouse.quorum_route import QuorumRoute
from lighthouse.service import Service
from lighthouse.store import StoreFailed
from lighthouse.views import views

_PROCESSES = bounded.checker(Processes)
_OVERVIEW: TypeAdapter[Overview] = TypeAdapter(Overview)


def create_app(
    service: Service, keys: Keys, chronicle: Chronicle | None = None, meter: Meter | None = None
) -> QuorumRoute:
    """The application. Errors are {"detail": one line}; GET /openapi.json says which come where.

    POST /v1/quorum     `protocol.encode(Ask)` -> `protocol.encode` of the answer; a long poll
    POST /v1/processes  fields of `protocol.Processes` -> fields of `protocol.Overview`; tagged -> tagged
    GET  /v1/status     the job, its members, and each replica's state
    GET  /healthz       200 while the lighthouse serves; needs no token, as the page itself at /
    With a chronicle those of `views` and, with a meter, of `metrics`; always those of `admin`.
    """
    app = FastAPI(title="lighthouse", docs_url=None, redoc_url=None, openapi_url=None)
    v1 = APIRouter(prefix="/v1")
    worker, viewer = [Depends(Bearer(keys, "worker"))], [Depends(Bearer(keys, "viewer"))]

    @v1.post("/processes", dependencies=worker)
    async def processes(request: Request) -> Response:
        """A supervisor says what runs and gets orders to evict."""
        picture, tagged = _picture(await body.read(request.receive))
        overview = service.processes(picture)
        answer = protocol.encode(overview) if tagged else _OVERVIEW.dump_json(overview)
        return Response(answer, media_type="application/json")

    @v1.get("/status", dependencies=viewer)
    async def status() -> JSONResponse:
        """The running job."""
        return JSONResponse(service.status())

    @app.get("/healthz")
    async def healthz() -> Response:
        """Whether the lighthouse serves."""
        return Response("ok\n", media_type="text/plain", headers={"date": formatdate(usegmt=True)})

    @app.exception_handler(ProtocolViolation)
    async def violation(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": " ".join(str(error).split())}, 422)

    @app.exception_handler(StoreFailed)
    async def store_failed(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": " ".join(str(error).split())}, 503)

    app.include_router(v1)
    if chronicle is not None:
        app.include_router(views(chronicle, service, keys))
        if meter is not None:
            app.include_router(metrics(chronicle, meter, keys))
    app.include_router(admin(service, keys))
    describe(app, keys)
    return QuorumRoute(app, service, Bearer(keys, "worker"))


def _picture(body: bytes) -> tuple[Processes, bool]:
    """The supervisor's message, and whether it came as `protocol.encode` makes it. Raises ProtocolViolation."""
    if body.startswith(b'{"type":'):
        return protocol.decode(body, Processes), True
    try:
        return _PROCESSES.validate_json(body), False
    except ValidationError as error:
        raise ProtocolViolation(bounded.complaint(error)) from None
