"""The application: all routes of a lighthouse put together, with the operator's and the supervisor's.

An operator's order is journaled before it is carried out.
"""

from __future__ import annotations

from email.utils import formatdate

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ft_hsdp import bounded, protocol
from ft_hsdp.config.running import MAX_REPLICAS
from ft_hsdp.core.grant import Holders
from ft_hsdp.errors import ProtocolViolation, one_line
from ft_hsdp.protocol import MAX_COUNT, ProcessReport, SupervisorReply
from lighthouse.http.access import Bearer, Keys
from lighthouse.http.journal_routes import views
from lighthouse.http.metrics import Meter, metrics
from lighthouse.http.openapi import describe
from lighthouse.http.quorum_route import QuorumRoute, read
from lighthouse.http.schemas import JobStatus
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


class OrderAnswer(BaseModel):
    detail: str


def admin(service: Service, keys: Keys) -> APIRouter:
    """Return the routes POST /v1/admin/..., for a holder of the admin's token.

    They answer {"detail": one line} with 200, 404, 409 or 422. The same order once more changes nothing and is
    answered with 200.
    """
    router = APIRouter(
        prefix="/v1/admin",
        dependencies=[Depends(Bearer(keys, "admin"))],
        responses={
            404: {"model": OrderAnswer, "description": "there is no such replica"},
            409: {"model": OrderAnswer, "description": "it cannot be done now"},
        },
    )

    def carry_out(
        request: Request, order: OperatorOrder | None, action: Action, replica: int = 0, target: int = 0
    ) -> OrderAnswer:
        order = order or OperatorOrder()
        reason = one_line(order.reason)
        address = request.client.host if request.client else "unknown"
        done = service.command(action, replica, reason or "no reason was given", address, order.force, target)
        if isinstance(done, Impossible):
            raise HTTPException(done.status, done.detail)
        return OrderAnswer(detail=done)

    @router.post("/replicas/{id}/evict")
    async def evict(request: Request, id: int, order: OperatorOrder | None = None) -> OrderAnswer:  # noqa: A002
        """Have the supervisor of a replica kill it, stopped processes included, and start it again."""
        return carry_out(request, order, "evict", id)

    @router.post("/replicas/{id}/drain")
    async def drain(request: Request, id: int, order: OperatorOrder | None = None) -> OrderAnswer:  # noqa: A002
        """Have a replica leave at the next step boundary, and keep it away until it is undrained."""
        return carry_out(request, order, "drain", id)

    @router.post("/replicas/{id}/undrain")
    async def undrain(request: Request, id: int, order: OperatorOrder | None = None) -> OrderAnswer:  # noqa: A002
        """Let a drained replica come back."""
        return carry_out(request, order, "undrain", id)

    @router.post("/checkpoint")
    async def checkpoint(request: Request, order: OperatorOrder | None = None) -> OrderAnswer:
        """Have one replica write the next state to durable storage."""
        return carry_out(request, order, "checkpoint")

    @router.post("/scale")
    async def scale(request: Request, size: Size) -> OrderAnswer:
        """Have the job go on with another number of replicas, from the next step boundary on."""
        return carry_out(request, size, "scale", target=size.replicas)

    return router


_PROCESSES = bounded.checker(ProcessReport)
_REPLY: TypeAdapter[SupervisorReply] = TypeAdapter(SupervisorReply)


def create_app(
    service: Service, keys: Keys, journal: JobJournal | None = None, meter: Meter | None = None
) -> QuorumRoute:
    """Return the application of a lighthouse that leads. Errors are {"detail": one line}.

    GET /openapi.json says which errors come where.

    POST /v1/quorum     `protocol.encode(QuorumRequest)` -> `protocol.encode` of the answer; a long poll
    POST /v1/processes  fields of `ProcessReport` -> fields of `SupervisorReply`; tagged -> tagged
    GET  /v1/status     the job, its members, and each replica's state
    GET  /v1/holders    fields of `core.grant.Holders`: where copies of the newest state may be
    GET  /healthz       200 while the lighthouse serves; needs no token, as the page itself at /

    Args:
        journal: Adds the routes of `views`; None: there is no page.
        meter: Counts the requests, and adds GET /metrics if there is a journal.
    """
    app = FastAPI(title="lighthouse", docs_url=None, redoc_url=None, openapi_url=None)
    v1 = APIRouter(prefix="/v1")
    worker, viewer = [Depends(Bearer(keys, "worker"))], [Depends(Bearer(keys, "viewer"))]

    @v1.post("/processes", dependencies=worker)
    async def processes(request: Request) -> Response:
        """A supervisor says what runs and gets orders to evict."""
        report, tagged = _process_report(await read(request.receive))
        reply = service.processes(report)
        answer = protocol.encode(reply) if tagged else _REPLY.dump_json(reply)
        return Response(answer, media_type="application/json")

    @v1.get("/status", dependencies=viewer)
    async def status() -> JobStatus:
        """The state of the running job."""
        document = service.status()
        pauses = {} if journal is None else journal.pauses()
        for row in document["replicas"]:
            row["pause"] = pauses.get(row["replica"], "")
        if journal is not None:
            document["protection"] = journal.protection()
        return JobStatus.model_validate(document)

    @v1.get("/holders", dependencies=worker)
    async def holders(replica: int | None = Query(None, ge=0, lt=MAX_REPLICAS)) -> Holders:
        """Where copies of the newest state may be; for a replica that starts again."""
        return service.holders(replica)

    @app.get("/healthz", response_class=PlainTextResponse)
    async def healthz() -> Response:
        """Tell whether the lighthouse serves."""
        return PlainTextResponse("ok\n", headers={"date": formatdate(usegmt=True)})

    @app.exception_handler(ProtocolViolation)
    async def violation(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": " ".join(str(error).split())}, 422)

    @app.exception_handler(StoreFailed)
    async def store_failed(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": " ".join(str(error).split())}, 503)

    app.include_router(v1)
    if journal is not None:
        app.include_router(views(journal, service, keys))
        if meter is not None:
            app.include_router(metrics(journal, meter, keys))
    app.include_router(admin(service, keys))
    describe(app, keys)
    return QuorumRoute(app, service, Bearer(keys, "worker"), None if meter is None else meter.request)


def _process_report(body: bytes) -> tuple[ProcessReport, bool]:
    """Return a supervisor's report, and whether it is tagged as by `protocol.encode`. Raises ProtocolViolation."""
    if body.startswith(b'{"type":'):
        return protocol.decode(body, ProcessReport), True
    try:
        return _PROCESSES.validate_json(body), False
    except ValidationError as error:
        raise ProtocolViolation(bounded.complaint(error)) from None
