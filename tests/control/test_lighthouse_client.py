from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import httpx
import pytest

from ft_hsdp import protocol
from ft_hsdp.control.lighthouse_client import LighthouseClient
from ft_hsdp.core.grant import Answer, CatchUp, Continue, Finish, Grant, Member, Refused, Report
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import LighthouseUnreachable
from ft_hsdp.protocol import ProcessReport, QuorumRequest, SupervisorReply, Wait

TOKEN = "ab" * 32
STATE = StateId(0, 0, "0" * 32)
ASK = QuorumRequest(Report(0, "0-x-0", STATE, 1), ("r",), ("s",), "hash", "layout")
GRANT = protocol.sign(TOKEN, Grant(1, 1, STATE, (Member(0, "0-x-0", "contribute"),), 1, "first"))


def run(
    handler: Callable[[httpx.Request], httpx.Response],
    body: Callable[[LighthouseClient], Coroutine[Any, Any, Any]],
):
    """The outcome of ``body`` with a client whose lighthouse is ``handler``."""

    async def main() -> Any:
        client = LighthouseClient(("http://lighthouse",), TOKEN)
        real = client._lighthouses._client
        client._lighthouses._client = httpx.AsyncClient(
            headers=real.headers, transport=httpx.MockTransport(handler)
        )
        await real.aclose()
        try:
            async with asyncio.timeout(5):
                return await body(client)
        finally:
            await client.close()

    return asyncio.run(main())


def answer(message: object) -> Callable[[httpx.Request], httpx.Response]:
    return lambda request: httpx.Response(200, content=protocol.encode(message))


@pytest.mark.parametrize(
    "message", [GRANT, Continue(3, 4), CatchUp(STATE, GRANT.members), Finish(), Refused("gone", 75)]
)
def test_an_answer(message: Answer) -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return answer(message)(request)

    assert run(handler, lambda c: c.ask(ASK)) == message
    assert (seen[0].method, seen[0].url.path) == ("POST", "/v1/quorum")
    assert seen[0].headers["Authorization"] == f"Bearer {TOKEN}"
    assert protocol.decode(seen[0].content, QuorumRequest) == ASK


def test_wait_asks_again_with_the_same_report() -> None:
    bodies: list[bytes] = []

    def handler(request: httpx.Request) -> httpx.Response:
        bodies.append(request.content)
        return answer(Wait("for replica 2") if len(bodies) < 4 else GRANT)(request)

    assert run(handler, lambda c: c.ask(ASK)) == GRANT
    assert len(bodies) == 4
    assert len(set(bodies)) == 1


@pytest.mark.parametrize(
    "forged", [replace(GRANT, mac=""), replace(GRANT, epoch=2), protocol.sign("cd" * 32, GRANT)]
)
def test_a_grant_of_somebody_else_is_no_grant(forged: Grant) -> None:
    with pytest.raises(LighthouseUnreachable, match="wrong MAC"):
        run(answer(forged), lambda c: c.ask(ASK))


def _fails(error: Exception) -> Callable[[httpx.Request], httpx.Response]:
    def handler(request: httpx.Request) -> httpx.Response:
        raise error

    return handler


@pytest.mark.parametrize(
    ("handler", "said"),
    [
        (lambda _: httpx.Response(401, text="no\nreally"), "401: no"),
        (lambda _: httpx.Response(503), "503"),
        (lambda _: httpx.Response(302, headers={"Location": "http://elsewhere"}), "302"),
        (lambda _: httpx.Response(200, text="<html>"), "not a valid message"),
        (lambda _: httpx.Response(200, content=b"x" * ((1 << 20) + 1)), "allowed"),
        (answer(SupervisorReply((), 0, 0, False)), "not expected"),
        (lambda _: httpx.Response(200, content=json.dumps({"type": "Grant", "body": {}})), "not a valid message"),
        (_fails(httpx.ConnectError("refused")), "ConnectError refused"),
        (_fails(httpx.ReadTimeout("slow")), "ReadTimeout slow"),
    ],
)
def test_everything_else_is_unreachable(handler: Callable[[httpx.Request], httpx.Response], said: str) -> None:
    with pytest.raises(LighthouseUnreachable, match=said):
        run(handler, lambda c: c.ask(ASK))


def test_a_report_of_predecessors() -> None:
    seen: list[ProcessReport] = []

    def handler(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/v1/processes"
        seen.append(protocol.decode(request.content, ProcessReport))
        return answer(SupervisorReply((), 3, 4, False))(request)

    sent = ProcessReport({1: "1-x-1"}, ("1-x-0",))
    run(handler, lambda c: c.report(sent))
    assert seen == [sent]


def test_no_proxy_and_no_redirect_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")

    async def body() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            content = protocol.encode(Continue(1, 2))
            writer.write(
                b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(content) + content
            )
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = LighthouseClient((f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}",), TOKEN)
        assert await client.ask(ASK) == Continue(1, 2)
        await client.close()
        server.close()
        await asyncio.sleep(0.02)

    asyncio.run(body())
