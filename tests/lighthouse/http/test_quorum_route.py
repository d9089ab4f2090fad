from __future__ import annotations

import asyncio
from typing import Any

from ft_hsdp import protocol
from ft_hsdp.core.grant import Continue, Grant
from lighthouse.http.quorum_route import BODY_S
from tests.support.lighthouse.lighthouse_helpers import ask, at, quiet
from tests.support.lighthouse.site import Site


class Call:
    """One request to the application, message by message."""

    def __init__(self, app: Any, *parts: bytes) -> None:
        self._parts = [
            {"type": "http.request", "body": part, "more_body": n + 1 < len(parts)} for n, part in enumerate(parts)
        ]
        self.gone = asyncio.Event()
        self.sent: list[Any] = []
        scope = {"type": "http", "method": "POST", "path": "/v1/quorum", "headers": [], "query_string": b""}
        scope["role"] = "worker"
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> Any:
        if self._parts:
            return self._parts.pop(0)
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    async def result(self) -> tuple[int, bytes]:
        async with asyncio.timeout(BODY_S / 2):
            await self.task
        start, body = self.sent
        assert dict(start["headers"])[b"content-length"] == str(len(body["body"])).encode()
        return start["status"], body["body"]


async def test_an_ask_in_pieces_is_put_together() -> None:
    app = Site(1).app
    data = protocol.encode(ask(0))
    status, body = await Call(app, data[:10], data[10:11], data[11:]).result()
    assert status == 200
    assert protocol.decode(body, Grant).ring == (0,)


async def test_members_of_a_round_get_equal_bytes_and_the_next_round_others() -> None:
    app = Site().app

    async def both(*asks: protocol.QuorumRequest) -> list[bytes]:
        calls = [Call(app, protocol.encode(each)) for each in asks]
        return [(await call.result())[1] for call in calls]

    first, second = await both(ask(0), ask(1))
    assert first == second
    assert protocol.decode(first, Grant).epoch == 1
    steps = [await both(*(ask(r, at(1, step), epoch=1) for r in (0, 1))) for step in (1, 2)]
    decoded = [[protocol.decode(answer, Continue) for answer in answers] for answers in steps]
    assert decoded == [[Continue(1, 2)] * 2, [Continue(1, 3)] * 2]


async def test_an_ask_whose_connection_ends_is_withdrawn() -> None:
    site = Site()
    service = site.service
    call = Call(site.app, protocol.encode(ask(0)))
    await quiet()
    assert service.state.views[0].ask is not None
    call.gone.set()
    status, _ = await call.result()
    assert status == 400
    assert service.state.views[0].ask is None
