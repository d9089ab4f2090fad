"""The application: all routes of a lighthouse put together, with the operator's and the supervisor's.

An operator's order is journaled before it is carried out.
"""

from __future__ import annotations

from email.utils import formatdate
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field

from ft_hsdp import protocol
from ft_hsdp.config.running import MAX_REPLICAS
from ft_hsdp.core.grant import Holders
from ft_hsdp.errors import ProtocolViolation, one_line
from ft_hsdp.protocol import MAX_COUNT, ProcessReport, QuorumRequest
from lighthouse.http.access import Bearer, Keys
from lighthouse.http.journal_routes import takes, views
from lighthouse.http.metrics import Meter, metrics
from lighthouse.http.quorum_route import QuorumRoute, attended, read
from lighthouse.journal.journal import JobJournal
from lighthouse.quorum.commands import Impossible
from lighthouse.quorum.events import Action
from lighthouse.service import Service
from lighthouse.store import StoreFailed

MAX_REASON = 500  # characters


class OperatorOrder(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    reason: str = Field("", max_length=MAX_REASON, description="why; it stands in the journal")
    force: bool = Field(False, description="even if fewer than quorum.min_replicas are left")


class Size(OperatorOrder):
    replicas: int = Field(ge=1, le=MAX_COUNT, description="those with lower ids take part; at most max_replicas")


class OneLine(BaseModel):
    """What an order answers, and every route with a status of 400 or more."""

    detail: str = Field(description="what was done, or what is wrong, in one line")


ERRORS = {
    400: "no HTTP request, another body than was signed, or the connection closed within it",
    401: "no token, an unknown one, or a challenge that is not valid",
    403: "a token of another role",
    404: "there is no such replica or host",
    408: "the body did not come in time",
    409: "it cannot be done now",
    413: "the body is too large",
    422: "what was sent cannot be true, or cannot be read",
    429: "too many requests; Retry-After says when there is room again",
    431: "the head of the request is too large",
    503: "the store took no write, or another lighthouse leads; ask again",
}


def admin(service: Service, keys: Keys) -> APIRouter:
    """Return the routes POST /v1/admin/..., for a holder of the admin's token.

    They answer {"detail": one line} with 200, 404, 409 or 422. The same order once more changes nothing and is
    answered with 200.
    """
    router = APIRouter(prefix="/v1/admin", dependencies=[Depends(Bearer(keys, "admin"))])

    def carry_out(
        request: Request,
        order: OperatorOrder | None,
        action: Action,
        replica: int = 0,
        target: int = 0,
        host: str = "",
    ) -> OneLine:
        order = order or OperatorOrder()
        reason = one_line(order.reason) or "no reason was given"
        address = request.client.host if request.client else "unknown"
        done = service.command(action, replica, reason, address, order.force, target, host)
        if isinstance(done, Impossible):
            raise HTTPException(done.status, done.detail)
        return OneLine(detail=done)

    @router.post("/replicas/{id}/evict")
    async def evict(request: Request, id: int, order: OperatorOrder | None = None) -> OneLine:  # noqa: A002
        """Have the supervisor of a replica kill it, stopped processes included, and start it again."""
        return carry_out(request, order, "evict", id)

    @router.post("/replicas/{id}/drain")
    async def drain(request: Request, id: int, order: OperatorOrder | None = None) -> OneLine:  # noqa: A002
        """Have a replica leave at the next step boundary, and keep it away until it is undrained."""
        return carry_out(request, order, "drain", id)

    @router.post("/replicas/{id}/undrain")
    async def undrain(request: Request, id: int, order: OperatorOrder | None = None) -> OneLine:  # noqa: A002
        """Let a drained replica come back."""
        return carry_out(request, order, "undrain", id)

    @router.post("/checkpoint")
    async def checkpoint(request: Request, order: OperatorOrder | None = None) -> OneLine:
        """Have one replica write the next state to durable storage."""
        return carry_out(request, order, "checkpoint")

    @router.post("/scale")
    async def scale(request: Request, size: Size) -> OneLine:
        """Have the job go on with another number of replicas, from the next step boundary on."""
        return carry_out(request, size, "scale", target=size.replicas)

    @router.post("/hosts/{name}/lost")
    async def host_lost(request: Request, name: str, order: OperatorOrder | None = None) -> OneLine:
        """Have the ranks on a host count as ended: the machine is gone, and nobody there can say so."""
        return carry_out(request, order, "host-lost", host=name)

    @router.post("/hosts/{name}/drain")
    async def drain_host(request: Request, name: str, order: OperatorOrder | None = None) -> OneLine:
        """Have the ranks of a host move to a spare one at the next step boundary; it gets no others."""
        return carry_out(request, order, "drain-host", host=name)

    @router.post("/hosts/{name}/undrain")
    async def undrain_host(request: Request, name: str, order: OperatorOrder | None = None) -> OneLine:
        """Let a host have ranks again that was drained, or cordoned because of failures."""
        return carry_out(request, order, "undrain-host", host=name)

    return router


def create_app(
    service: Service, keys: Keys, journal: JobJournal | None = None, meter: Meter | None = None
) -> QuorumRoute:
    """Return the application of a lighthouse that leads. Errors are {"detail": one line}.

    POST /v1/quorum     `protocol.encode(QuorumRequest)` -> `protocol.encode` of the answer; a long poll
    POST /v1/processes  `protocol.encode(ProcessReport)` -> `protocol.encode(SupervisorReply)`
    GET  /v1/status     the job, its members, and each replica's state
    GET  /v1/holders    fields of `core.grant.Holders`: where copies of the newest state may be
    GET  /healthz       200 while the lighthouse serves; needs no token, as the page itself at /

    Args:
        journal: Adds the routes of `views`; None: there is no page.
        meter: Counts the requests, and adds GET /metrics if there is a journal.
    """
    errors: dict[int | str, dict[str, Any]] = {
        status: {"model": OneLine, "description": why} for status, why in ERRORS.items()
    }
    app = FastAPI(title="lighthouse", docs_url=None, redoc_url=None, openapi_url=None, responses=errors)
    v1 = APIRouter(prefix="/v1")
    worker, viewer = [Depends(Bearer(keys, "worker"))], [Depends(Bearer(keys, "viewer"))]
    hosts = Bearer(keys, "host")

    @v1.post("/quorum", dependencies=worker, openapi_extra=takes(QuorumRequest))
    async def quorum() -> None:
        """A replica asks for a step, and withdraws that if it goes away; `QuorumRoute`, in front, answers it."""

    @v1.post("/processes", dependencies=worker, openapi_extra=takes(ProcessReport))
    async def processes(request: Request) -> Response:
        """A rank says which ranks live or have ended; a host's agent gets what its host is to run."""
        report = protocol.decode(await read(request.receive), ProcessReport)
        if report.host is None:
            reply = service.processes(report)
        else:
            hosts.admit(request.scope["headers"], request.scope.get("role"))
            peer = request.client.host if request.client is not None else None
            reply = await attended(service.host(report, peer), request.receive)
        return Response(protocol.encode(reply), media_type="application/json")

    @v1.get("/status", dependencies=viewer)
    async def status() -> JSONResponse:
        """The state of the running job."""
        document = service.status()
        pauses = {} if journal is None else journal.pauses()
        for row in document["replicas"]:
            row["pause"] = pauses.get(row["replica"], "")
        document["protection"] = None if journal is None else journal.protection()
        return JSONResponse(document)

    @v1.get("/holders", dependencies=worker)
    async def holders(replica: int | None = Query(None, ge=0, lt=MAX_REPLICAS)) -> Holders:
        """Where copies of the newest state may be; for a replica that starts again."""
        return service.holders(replica)

    @app.get("/healthz", response_class=PlainTextResponse)
    async def healthz() -> Response:
        """Tell whether the lighthouse serves."""
        return PlainTextResponse("ok\n", headers={"date": formatdate(usegmt=True)})

    @app.get("/openapi.json", dependencies=viewer)
    async def description() -> dict[str, Any]:
        """The description of all routes."""
        return app.openapi()

    @app.exception_handler(RequestValidationError)
    async def unreadable(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        where = ".".join(str(part)[:80] for part in first["loc"])
        return JSONResponse({"detail": f"{where}: {str(first['msg'])[:160]}"}, 422)

    @app.exception_handler(ProtocolViolation)
    @app.exception_handler(StoreFailed)
    async def refused(_: Request, error: Exception) -> JSONResponse:
        status = 422 if isinstance(error, ProtocolViolation) else 503
        return JSONResponse({"detail": " ".join(str(error).split())}, status)

    app.include_router(v1)
    if journal is not None:
        app.include_router(views(journal, service, keys))
        if meter is not None:
            app.include_router(metrics(journal, meter, keys))
    app.include_router(admin(service, keys))
    return QuorumRoute(app, service, Bearer(keys, "worker"), None if meter is None else meter.request)
