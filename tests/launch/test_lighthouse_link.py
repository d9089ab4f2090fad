from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from ft_hsdp import protocol
from ft_hsdp.control.lighthouse_client import LighthouseClient
from ft_hsdp.errors import LighthouseUnreachable
from ft_hsdp.launch.lighthouse_link import LighthouseLink
from ft_hsdp.launch.progress import Progress
from tests.support.launch.squatter import STATUSES, SquatterServer
from tests.support.lighthouse.signed import line_of
from tests.support.waiting import async_until

ANSWER = {"evict": [], "epoch": 3, "step": 7, "finished": False, "halted": "", "drained": []} | {
    "leases": {},
    "rivals": {},
    "lease_s": 5.0,
}


def answer(**changed: Any) -> dict[str, Any]:
    """The lighthouse's answer to a report."""
    return {"type": "Overview", "body": {**ANSWER, **changed}}


Handler = Callable[[httpx.Request], httpx.Response]


class Scene:
    """A link to a lighthouse that answers as `handler` does."""

    def __init__(self, handler: Handler) -> None:
        self.progress = Progress()
        self.evictions: list[tuple[int, str, str]] = []
        self.client = httpx.AsyncClient(transport=httpx.MockTransport(handler))
        self.link = LighthouseLink(("http://there",), "secret", self.progress, self._evicted, http=self.client)

    def _evicted(self, *order: Any) -> None:
        self.evictions.append(order)


async def test_the_picture_is_full_each_time_and_the_answer_is_taken() -> None:
    sent: list[Any] = []

    def handler(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content)["body"])
        evict = [{"replica": 1, "incarnation": "1-a-0", "reason": "silent"}]
        return httpx.Response(200, json=answer(evict=evict))

    scene = Scene(handler)
    scene.link.started(1, "1-a-0")
    scene.link.started(0, "0-a-0")
    await scene.link.report()
    assert scene.link.settled
    scene.link.exited(1, "1-a-0")
    scene.link.started(1, "1-a-1")
    scene.link.exited(1, "1-a-0")  # late, about an incarnation that was followed already
    scene.link.lost(2)
    await scene.link.report()
    whose = {"owner": scene.link.owner, "leases": {}, "ended": [], "machines": [], "host": None}
    assert sent[0] == {"running": {"0": "0-a-0", "1": "1-a-0"}, "exited": [], "lost": [], **whose}
    assert sent[1]["running"] == {"0": "0-a-0", "1": "1-a-1"}
    assert set(sent[1]["exited"]) == {"1-a-0"}
    assert sent[1]["lost"] == [2]
    assert scene.evictions[0] == (1, "1-a-0", "silent")
    assert (scene.progress.step, scene.progress.epoch) == (7, 3)
    await scene.client.aclose()


async def test_a_lease_is_counted_from_the_report_and_lost_to_another_supervisor(monkeypatch) -> None:
    now = [100.0]
    answers: list[dict[str, Any]] = [{"leases": {"1": 7}}, {"leases": {"1": 7}}, {"rivals": {"1": "bbbb"}}]
    sent: list[Any] = []
    monkeypatch.setattr("ft_hsdp.launch.lighthouse_link.time", SimpleNamespace(monotonic=lambda: now[0]))

    def handler(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content)["body"])
        now[0] += 2.0  # the answer takes its time
        return httpx.Response(200, json=answer(**answers[len(sent) - 1]))

    scene = Scene(handler)
    scene.link.claims(1)
    assert not scene.link.holds(1)
    assert not scene.link.settled
    await scene.link.report()
    assert (scene.link.holds(1), scene.link.settled) == (True, True)
    now[0] = 104.9
    assert scene.link.holds(1)
    now[0] = 105.0
    assert not scene.link.holds(1), "another supervisor may have got it by now"
    scene.link.started(1, "1-a-0")
    await scene.link.report()
    assert (sent[0]["leases"], sent[1]["leases"], scene.link.holds(1)) == ({"1": 0}, {"1": 7}, True)
    await scene.link.report()
    assert (scene.link.holds(1), scene.link.rival(1)) == (False, "bbbb")
    assert [evicted[:2] for evicted in scene.evictions] == [(1, "1-a-0")]
    scene.link.releases(1)
    assert (scene.link.rival(1), scene.link.settled) == ("", False)
    await scene.client.aclose()


@pytest.mark.parametrize(
    "response",
    [
        httpx.Response(503, text="busy"),
        httpx.Response(401, json={}),
        httpx.Response(200, text="no json"),
        httpx.Response(200, json={"type": "Overview", "body": {"evict": []}}),
        httpx.Response(200, json=[1]),
        httpx.Response(200, json=answer(evict=[3])),
        None,
    ],
)
async def test_no_answer_of_the_lighthouse_reaches_the_supervisor_as_an_error(response) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        if response is None:
            raise httpx.ConnectError("refused")
        return response

    scene = Scene(handler)
    scene.link.started(0, "0-a-0")
    await scene.link.report()
    assert scene.link.problem
    assert not scene.link.settled
    assert scene.progress.step == 0
    await scene.client.aclose()


async def test_a_change_at_the_moment_of_its_cancellation_does_not_keep_it_alive() -> None:
    link = LighthouseLink(("http://127.0.0.1:1",), "secret", Progress(), lambda *_: None)
    running = asyncio.create_task(link.run())
    await async_until(lambda: link.problem, "the first report")
    for _ in range(20):
        await asyncio.sleep(0)
    link.started(0, "0-a-0")
    running.cancel()
    done, _ = await asyncio.wait([running], timeout=30)
    assert done


class Journal:
    """A lighthouse that takes reports and telemetry on a real socket."""

    def __init__(self, port: int = 0) -> None:
        self.events: list[dict[str, Any]] = []
        self.sources: set[str] = set()
        self.reports: list[dict[str, Any]] = []
        self.port = port

    async def __aenter__(self) -> Journal:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            assert "secret" not in head
            length = int(head.lower().split("content-length:")[1].split()[0])
            body = await reader.readexactly(length)
            said = json.dumps(answer()).encode()
            if head.startswith("POST /v1/telemetry "):
                told = protocol.decode(body, protocol.Telemetry)
                self.sources.add(told.source)
                self.events += told.events
                said = b""
            else:
                self.reports.append(json.loads(body)["body"])
            status = 200 if said else 204
            begin = f"HTTP/1.1 {status} x\r\nConnection: close\r\n{line_of(head, status, said, 'secret')}"
            writer.write(f"{begin}content-length: {len(said)}\r\n\r\n".encode() + said)
        writer.close()


async def test_it_goes_on_through_an_outage_and_reports_what_changed_meanwhile() -> None:
    async with Journal() as lighthouse:
        link = LighthouseLink((lighthouse.url,), "secret", Progress(), lambda *_: None)
        running = asyncio.create_task(link.run())
        await async_until(lambda: lighthouse.reports, "the first report")
    link.started(0, "0-a-0")
    await async_until(lambda: link.problem, "the outage")
    link.exited(0, "0-a-0")
    async with Journal(lighthouse.port) as back:
        await async_until(lambda: link.settled, "the report after the outage")
        assert back.reports[-1]["exited"] == ["0-a-0"]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_what_happens_here_goes_to_the_lighthouse_too_and_the_end_is_in_it() -> None:
    async with Journal() as lighthouse:
        link = LighthouseLink((lighthouse.url,), "secret", Progress(), lambda *_: None)
        link.note({"event": "before"})
        running = asyncio.create_task(link.run())
        await async_until(lambda: lighthouse.events, "the first row")
        link.note({"event": "ReplicaStarted"})
        await async_until(lambda: len(lighthouse.events) == 2, "the second row")
        link.note({"event": "ReplicaExited"})
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert [row["event"] for row in lighthouse.events] == ["before", "ReplicaStarted", "ReplicaExited"]
        assert lighthouse.sources == {"supervisor"}


async def test_a_lighthouse_that_takes_no_telemetry_still_gets_its_pictures() -> None:
    asked: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return httpx.Response(503) if request.url.path == "/v1/telemetry" else httpx.Response(200, json=answer())

    scene = Scene(handler)
    client = LighthouseClient(("http://there",), "secret", http=scene.client)
    with pytest.raises(LighthouseUnreachable, match="503"):
        await client.tell(protocol.Telemetry("supervisor", ({"event": "x"},)))
    await scene.link.report()
    assert scene.link.problem is None
    assert asked == ["/v1/telemetry", "/v1/processes"]
    await scene.client.aclose()


async def test_nothing_is_done_on_the_word_of_a_squatter() -> None:
    """It answers with evictions, rivals, the end and a halt, and with statuses that would end a caller."""
    evictions: list[tuple[int, str, str]] = []
    progress = Progress()
    with SquatterServer() as squatter:
        link = LighthouseLink((squatter.url,), "secret", progress, lambda *e: evictions.append(e))
        for replica in range(3):
            link.started(replica, f"{replica}-a-0")
            link.claims(replica)
        running = asyncio.create_task(link.run())
        for _ in range(len(STATUSES)):
            before = squatter.asked("/v1/processes")
            link.rests(7)  # a change: it is reported at once
            await async_until(lambda before=before: squatter.asked("/v1/processes") > before, "another report")
        await async_until(lambda: link.problem, "the report is over")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        came = str(squatter.seen)
    assert "token" in (link.problem or "")
    assert (evictions, [link.rival(r) for r in range(3)], link.settled) == ([], ["", "", ""], False)
    assert (progress.step, progress.finished, progress.halted, progress.heard) == (0, False, "", False)
    assert "secret" not in came
    assert "Cookie" not in came, "what an unproved answer brings is sent back"
