"""What a lighthouse serves on its one port: while it stands by, who leads; then the leader's application.

While it stands by, /healthz says so, `/` redirects to the leader's page, and all other routes answer 503 with the
leader's URL.
"""

from __future__ import annotations

from collections.abc import Callable
from email.utils import formatdate

from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send


class Standby:
    """The application of a lighthouse that does not lead.

    Args:
        leader: Returns the leader's URL, or None while there is no leader.
    """

    def __init__(self, leader: Callable[[], str | None]) -> None:
        self._leader = leader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        leader = self._leader()
        response: Response
        if scope["path"] == "/" and leader is not None:
            response = RedirectResponse(f"{leader}/", 307)  # a key behind # goes along
        else:
            detail = f"this lighthouse stands by; {'another one leads' if leader else 'none leads now'}"
            response = JSONResponse({"detail": detail, "leader": leader}, 503)
        await response(scope, receive, send)


class SwitchableApp:
    """An ASGI application that is ``standby`` until `lead` is called."""

    def __init__(self, standby: ASGIApp) -> None:
        self._app = standby
        self._role = "standby"

    def lead(self, app: ASGIApp) -> None:
        self._app = app
        self._role = "leader"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/healthz":
            date = {"date": formatdate(usegmt=True)}
            await JSONResponse({"role": self._role}, headers=date)(scope, receive, send)
        else:
            await self._app(scope, receive, send)
