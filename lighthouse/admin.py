"""The operator's routes: evict, drain, undrain, checkpoint, scale. An order is journaled before it is obeyed."""

from __future__ import annotations

from fastapi import APIRouter, Depends, HTTPException, Request
from pydantic import BaseModel, ConfigDict, Field

from lighthouse.auth import Bearer, Keys
from lighthouse.commands import Impossible
from lighthouse.intake import LIMIT
from lighthouse.service import Service
from lighthouse.state import Action

MAX_REASON = 500  # characters


class Order(BaseModel):
    """What may come with an order; ``force`` is about drain and scale alone."""

    model_config = ConfigDict(extra="forbid", strict=True)

    reason: str = Field("", max_length=MAX_REASON, description="why; it stands in the journal")
    force: bool = Field(False, description="even if fewer than quorum.min_replicas are left")


class Size(Order):
    """How many replicas the job is to have."""

    replicas: int = Field(ge=1, le=LIMIT, description="those with lower ids take part; at most max_replicas")


class Said(BaseModel):
    """What will happen, or why nothing can; one line."""

    detail: str


def admin(service: Service, keys: Keys) -> APIRouter:
    """POST /v1/admin/..., for whoever holds the admin's token. Answers {"detail": one line}: 200, 404, 409 or 422.

    The same order once more changes nothing and is answered with 200.
    """
    router = APIRouter(
        prefix="/v1/admin",
        dependencies=[Depends(Bearer(keys, "admin"))],
        responses={
            404: {"model": Said, "description": "there is no such replica"},
            409: {"model": Said, "description": "it cannot be done now"},
        },
    )

    def carry_out(
        request: Request, order: Order | None, action: Action, replica: int = 0, target: int = 0
    ) -> Said:
        order = order or Order()
        reason = " ".join("".join(c if c.isprintable() else " " for c in order.reason).split())
        address = request.client.host if request.client else "unknown"
        done = service.command(action, replica, reason or "no reason was given", address, order.force, target)
        if isinstance(done, Impossible):
            raise HTTPException(done.status, done.detail)
        return Said(detail=done)

    @router.post("/replicas/{id}/evict")
    async def evict(request: Request, id: int, order: Order | None = None) -> Said:  # noqa: A002
        """Have the supervisor of a replica kill it, stopped processes included, and start it again."""
        return carry_out(request, order, "evict", id)

    @router.post("/replicas/{id}/drain")
    async def drain(request: Request, id: int, order: Order | None = None) -> Said:  # noqa: A002
        """Have a replica leave at the next step boundary, and keep it away until it is undrained."""
        return carry_out(request, order, "drain", id)

    @router.post("/replicas/{id}/undrain")
    async def undrain(request: Request, id: int, order: Order | None = None) -> Said:  # noqa: A002
        """Let a drained replica come back."""
        return carry_out(request, order, "undrain", id)

    @router.post("/checkpoint")
    async def checkpoint(request: Request, order: Order | None = None) -> Said:
        """Have one replica write the next state to durable storage."""
        return carry_out(request, order, "checkpoint")

    @router.post("/scale")
    async def scale(request: Request, size: Size) -> Said:
        """Have the job go on with another number of replicas, from the next step boundary on."""
        return carry_out(request, size, "scale", target=size.replicas)

    return router
