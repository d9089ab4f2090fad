"""The views over real HTTP: who may see what, what the answers are, and a stream that loses nothing."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from ft_hsdp import protocol
from ft_hsdp.protocol import RankBeat, Telemetry
from lighthouse.ha.election import Election
from lighthouse.http.journal_routes import SECURITY, Static
from lighthouse.http.rate_limits import STREAMS
from lighthouse.journal.database import DatabaseFailed, MemoryDatabase
from lighthouse.overview.overview import JournalEntry
from tests.support.lighthouse.lighthouse_helpers import NOW, TOKEN, commit_row, served
from tests.support.lighthouse.site import KEY, VIEWER, Site
from tests.support.waiting import async_until

COMMIT = commit_row(1, contributors=[0, 1], total=2, loss=float("nan"))


def row(n, **facts):
    return {"t": NOW + n, "event": f"E{n}", "source": "lighthouse", "reason": "why", **facts}


@pytest.fixture
def site():
    return Site()


# Telemetry, the overview, the log.


async def test_what_is_told_is_shown(site):
    told = Telemetry("1-a-0", (row(1, source="replica"),), ({**COMMIT, "units": 6},), (RankBeat(0, 7, "node", 3),))
    answer = await site.call("POST", "/v1/telemetry", TOKEN, content=protocol.encode(told))
    assert (answer.status_code, answer.content) == (204, b"")
    overview = (await site.call("GET", "/v1/overview", KEY)).json()
    head = overview["head"]
    assert (head["step"], head["loss"], head["healthy"], head["units"]) == (1, None, 2, 6)
    assert overview["replicas"][1]["ranks"][0]["host"] == "node"
    assert overview["job"]["live"]
    assert overview["lighthouse"]["term"] == site.service.state.term
    (event,) = (await site.call("GET", "/v1/events?replica=1&text=WHY", KEY)).json()["events"]
    assert (event["seq"], event["event"], event["source"]) == (1, "E1", "replica")


OVERVIEWS = ["points=0", "points=5001", "at=nan", "at=inf", "start=-1", "end=1e300", "at=x", "points=1.5"]
PAGES = ["limit=0", "limit=1001", "after=-1", f"before={2**60}", "replica=-1", f"text={'x' * 201}", "after=x"]


@pytest.mark.parametrize("path", [*(f"overview?{q}" for q in OVERVIEWS), *(f"events?{q}" for q in PAGES)])
async def test_a_view_of_nonsense_is_refused(path):
    assert (await Site().call("GET", f"/v1/{path}", KEY)).status_code == 422


async def test_a_journal_that_cannot_be_read_is_503():
    class Gone(MemoryDatabase):
        def read(self, *_, **__):
            raise DatabaseFailed("disk I/O error")

        events = read

    database = Gone()
    database.append([JournalEntry(1, "event", row(1))])
    site = Site(database=database)
    for path in ("/v1/overview", "/v1/events"):
        answer = await site.call("GET", path, KEY)
        assert (answer.status_code, answer.json()) == (503, {"detail": "disk I/O error"})


async def test_views_that_take_long_keep_no_lease_from_being_renewed():
    class Slow(MemoryDatabase):
        def events(self, **_):
            began.set()
            over.wait()
            return []

    class Etcd:
        def keep_alive(self, lease):
            return 0.0

    began, over, site = threading.Event(), threading.Event(), Site(database=Slow())
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    asked = [asyncio.create_task(site.call("GET", "/v1/events", KEY)) for _ in range(3)]
    try:
        await async_until(began.is_set, "a search that takes long")
        assert await asyncio.wait_for(Election(Etcd(), "key", "url", lease_s=1).keep(), 10)
        other = loop.run_in_executor(None, over.wait)  # as a call to etcd that takes long
        assert (await asyncio.wait_for(site.call("GET", "/v1/diagnosis", KEY), 10)).status_code == 200
    finally:
        over.set()
    assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200] * 3
    await other


# The page's files.


async def test_the_page_is_for_everybody_and_safe(site):
    answer = await site.call("GET", "/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    for name, value in SECURITY.items():
        assert answer.headers[name] == value
    assert "default-src 'self'" in SECURITY["Content-Security-Policy"]
    assert "unsafe" not in SECURITY["Content-Security-Policy"]
    known = {"If-None-Match": f'W/"x", {answer.headers["etag"]}'}
    again = await site.call("GET", "/", headers=known)
    assert (again.status_code, again.content) == (304, b"")
    asset = await site.call("GET", "/assets/app.js")
    assert (asset.status_code, asset.headers["x-content-type-options"]) == (200, "nosniff")


def test_files_are_read_once(tmp_path: Path):
    (tmp_path / "a.js").write_text("1")
    (tmp_path / "secret.key").write_text("2")
    (tmp_path / "link.txt").symlink_to("/etc/passwd")
    files, request = Static(tmp_path), Request({"type": "http", "headers": []})
    (tmp_path / "a.js").write_text("changed")
    (tmp_path / "b.js").write_text("3")
    assert files.answer(request, "a.js").body == b"1"
    for other in ("b.js", "secret.key", "link.txt"):
        with pytest.raises(HTTPException):
            files.answer(request, other)


# The stream, over a real socket.


async def read(response, n):
    """The next messages of a stream: (id, event, row)."""
    found, fields = [], {}
    async for line in response.aiter_lines():
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
            continue
        if "data" in fields:
            found.append((int(fields["id"]), fields["event"], json.loads(fields["data"])))
        fields = {}
        if len(found) == n:
            break
    return found


async def test_a_stream_goes_on_where_the_last_one_was_cut(site):
    site.journal.note([row(1), row(2)])
    async with served(site.app) as url, httpx.AsyncClient(headers=VIEWER, timeout=10) as http:
        async with http.stream("GET", f"{url}/v1/stream?after=0") as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            first = await read(response, 2)
        site.journal.note([row(3)])
        site.journal.take(Telemetry("0-a-0", (), (COMMIT,)))
        resume = {"Last-Event-ID": str(first[-1][0])}
        async with http.stream("GET", f"{url}/v1/stream", headers=resume) as response:
            second = await read(response, 2)
        site.journal.close()
    found = first + second
    assert [(seq, kind) for seq, kind, _ in found] == [(1, "event"), (2, "event"), (3, "event"), (4, "commit")]
    assert all(body["seq"] == seq for seq, _, body in found)
    assert [body.get("said") for _, _, body in found] == ["E1", "E2", "E3", None]
    assert found[3][2]["loss"] is None, "strict JSON"


async def test_streams_end_with_the_journal_and_hold_nothing_when_their_reader_is_gone(site):
    async with served(site.app) as url, httpx.AsyncClient(headers=VIEWER, timeout=10) as http:
        for _ in range(STREAMS + 1):
            await async_until(lambda: not site.journal.subscribers.full)
            async with http.stream("GET", f"{url}/v1/stream") as response:
                assert response.status_code == 200
        site.journal.note([row(1)])
        async with http.stream("GET", f"{url}/v1/stream?after=0") as response:
            lines = response.aiter_lines()
            while not (await anext(lines)).startswith("id"):
                pass
            site.journal.close()
            assert [line for line in [line async for line in lines] if line.startswith("id")] == []


async def test_a_silent_stream_is_kept_alive(monkeypatch):
    monkeypatch.setattr("lighthouse.http.journal_routes.PING_S", 0.05)
    site = Site()
    async with (
        served(site.app) as url,
        httpx.AsyncClient(headers=VIEWER, timeout=10) as http,
        http.stream("GET", f"{url}/v1/stream") as response,
    ):
        lines = response.aiter_lines()
        found = [await anext(lines) for _ in range(5)]
        site.journal.note([row(1)])
        async for line in lines:
            if line.startswith("id"):
                break
        site.journal.close()
    found, last = found, line
    assert found[:2] == ["retry: 1000", ""]
    assert found[2].startswith(":"), "a comment"
    assert last == "id: 1", "the ping did not eat the row"
