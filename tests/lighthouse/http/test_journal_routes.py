"""The views over real HTTP: who may see what, what the answers are, and a stream that loses nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from ft_hsdp import protocol
from ft_hsdp.control.lighthouse_client import TokenProof
from ft_hsdp.protocol import RankBeat, Telemetry
from lighthouse.http.access import Keys, view_key
from lighthouse.http.app import create_app
from lighthouse.http.journal_routes import FOLDER, SECURITY, Static, views
from lighthouse.http.rate_limits import STREAMS
from lighthouse.journal.database import DatabaseFailed, MemoryDatabase
from lighthouse.journal.journal import JobJournal
from lighthouse.overview.overview import JobInfo
from tests.support.lighthouse.lighthouse_helpers import TOKEN, make_service
from tests.support.lighthouse.signed import gated

ADMIN = "ad" * 32
KEYS = Keys(TOKEN, ADMIN)
ABOUT = JobInfo("job", 2, 1, 10)


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


VIEWER = bearer(view_key(TOKEN))
WORKER = TokenProof(TOKEN)


class Site:
    """A lighthouse with a journal, in process."""

    def __init__(self, database=None):
        self.journal = JobJournal(database or MemoryDatabase(), ABOUT)
        self.service, _ = make_service(2)
        self.app = create_app(self.service, KEYS, self.journal)

    def client(self, headers=VIEWER, auth=None):
        transport = httpx.ASGITransport(app=gated(self.app, KEYS))
        return httpx.AsyncClient(transport=transport, base_url="http://lighthouse", headers=headers, auth=auth)


async def call(method, path, site=None, headers=VIEWER, auth=None, **arguments):
    async with (site or Site()).client(headers, auth) as http:
        return await http.request(method, path, **arguments)


def row(n, **facts):
    return {"t": 1_780_000_000.0 + n, "event": f"E{n}", "source": "lighthouse", "reason": "why", **facts}


def commit(step):
    return {
        "t": 1_780_000_000.0 + step,
        "step": step,
        "epoch": 1,
        "lineage": f"{step:032x}",
        "contributors": [0, 1],
        "total": 2,
        "loss": float("nan"),
        "step_s": 1.0,
        "waits": {},
        "role": "contribute",
    }


# Who may see what.


@pytest.fixture
def site():
    return Site()


@pytest.mark.parametrize("path", ["/v1/overview", "/v1/events", "/v1/stream"])
async def test_a_stranger_sees_no_data(path):
    assert (await call("GET", path, headers={})).status_code == 401
    assert (await call("GET", path, headers=bearer("no"))).status_code == 401


async def test_a_viewer_tells_nothing_and_an_admin_neither():
    message = protocol.encode(Telemetry("0-a-0"))
    assert (await call("POST", "/v1/telemetry", headers={}, content=message)).status_code == 401
    assert (await call("POST", "/v1/telemetry", content=message)).status_code == 403
    assert (await call("POST", "/v1/telemetry", auth=TokenProof(ADMIN), content=message)).status_code == 403
    assert (await call("POST", "/v1/telemetry", auth=WORKER, content=message)).status_code == 204


# Telemetry, the overview, the log.


async def test_what_is_told_is_shown(site):
    told = Telemetry(
        "1-a-0", (row(1, source="replica"),), (commit(1) | {"units": 6},), (RankBeat(0, 7, "node", 3),)
    )
    answer = await call("POST", "/v1/telemetry", site, auth=WORKER, content=protocol.encode(told))
    assert (answer.status_code, answer.content) == (204, b"")
    site.journal._flush()
    overview = (await call("GET", "/v1/overview", site)).json()
    assert overview["head"] | {"steps_per_s": 0} == {
        "step": 1,
        "epoch": 1,
        "loss": None,
        "lr": None,
        "lr_scale": None,
        "step_s": 1.0,
        "steps_per_s": 0,
        "tokens_per_s": 0.0,
        "contributors": [0, 1],
        "healthy": 2,
        "units": 6,
        "units_wanted": None,
    }
    assert overview["replicas"][1]["ranks"][0]["host"] == "node"
    assert overview["job"]["live"]
    (event,) = (await call("GET", "/v1/events?replica=1&text=WHY", site)).json()["events"]
    assert (event["seq"], event["event"], event["source"]) == (1, "E1", "replica")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"\xff\xfe",
        b"{" * 5000,
        protocol.encode(protocol.Wait("x")),
        protocol.encode(Telemetry("nobody")),
        b'{"type": "Telemetry", "body": {"source": "0-a-0", "events": [{"event": ["x"]}]}}',
        b'{"type": "Telemetry", "body": {"source": "0-a-0", "events": [{"event": "E", "source": [{}]}, 3]}}',
    ],
)
async def test_junk_is_answered_with_one_line(body):
    answer = await call("POST", "/v1/telemetry", auth=WORKER, content=body)
    assert answer.status_code == 422
    assert "\n" not in answer.json()["detail"]


async def test_what_is_too_large_is_not_read():
    assert (await call("POST", "/v1/telemetry", auth=WORKER, content=b" " * 300_000)).status_code == 413


@pytest.mark.parametrize(
    "query",
    ["points=0", "points=5001", "at=nan", "at=inf", "start=-1", "end=1e300", "at=x", "points=1.5"],
)
async def test_an_overview_of_nonsense_is_refused(query):
    assert (await call("GET", f"/v1/overview?{query}")).status_code == 422


@pytest.mark.parametrize(
    "query",
    ["limit=0", "limit=1001", "after=-1", f"before={2**60}", "replica=-1", f"text={'x' * 201}", "after=x"],
)
async def test_a_page_of_nonsense_is_refused(query):
    assert (await call("GET", f"/v1/events?{query}")).status_code == 422


async def test_pages_of_the_log_do_not_overlap(site):
    site.journal.note([row(n) for n in range(1, 11)])
    newest = (await call("GET", "/v1/events?limit=4", site)).json()
    older = (await call("GET", f"/v1/events?limit=4&before={newest['first']}", site)).json()
    assert [e["seq"] for e in older["events"] + newest["events"]] == [3, 4, 5, 6, 7, 8, 9, 10]
    assert (older["first"], older["last"]) == (3, 6)


async def test_the_overview_as_it_was_and_a_part_of_it(site):
    site.journal.note([row(0), row(100, event="JobFinished")])
    now = (await call("GET", "/v1/overview", site)).json()
    then = (await call("GET", "/v1/overview?at=1780000050&points=10", site)).json()
    assert (now["job"]["finished"], then["job"]["finished"]) == (True, False)
    assert (then["now"], then["seq"]) == (1780000050.0, 1)


async def test_the_overview_says_what_the_service_decides_by(site):
    assert (await call("GET", "/v1/overview", site)).json()["lighthouse"]["term"] == site.service.state.term


async def test_a_journal_that_cannot_be_read_is_503():
    class Gone(MemoryDatabase):
        def read(self, *_, **__):
            raise DatabaseFailed("disk I/O error")

        events = read

    database = Gone()
    site = Site(database)
    site.journal._caught_up = False
    for path in ("/v1/overview", "/v1/events"):
        answer = await call("GET", path, site)
        assert (answer.status_code, answer.json()) == (503, {"detail": "disk I/O error"})


async def test_answers_are_as_the_description_says():
    paths = (await call("GET", "/openapi.json")).json()["paths"]
    assert {"/v1/telemetry", "/v1/overview", "/v1/events", "/v1/stream"} <= set(paths)
    assert "204" in paths["/v1/telemetry"]["post"]["responses"]
    schema = paths["/v1/overview"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert schema == {"$ref": "#/components/schemas/OverviewView"}
    stream = paths["/v1/stream"]["get"]["responses"]["200"]["content"]
    assert set(stream) == {"text/event-stream"}


# The page's files.


async def test_the_page_is_for_everybody_and_safe():
    answer = await call("GET", "/", headers={})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    for name, value in SECURITY.items():
        assert answer.headers[name] == value
    assert "default-src 'self'" in SECURITY["Content-Security-Policy"]
    assert "unsafe" not in SECURITY["Content-Security-Policy"]
    known = {"If-None-Match": f'W/"x", {answer.headers["etag"]}'}
    again = await call("GET", "/", headers=known)
    assert (again.status_code, again.content) == (304, b"")


async def test_every_file_of_the_page_is_served_and_none_holds_inline_code(site):
    for file in sorted(FOLDER.rglob("*.js")) + sorted(FOLDER.rglob("*.css")):
        answer = await call("GET", f"/assets/{file.relative_to(FOLDER).as_posix()}", site, headers={})
        assert (answer.status_code, answer.content) == (200, file.read_bytes())
        assert answer.headers["x-content-type-options"] == "nosniff"
    page = (FOLDER / "index.html").read_text()
    assert "<style" not in page
    assert " style=" not in page
    assert page.count("<script") == page.count("<script src=") + page.count('<script type="module" src=')


@pytest.mark.parametrize(
    "path",
    [
        "../api.py",
        "..%2Fapi.py",
        "%2e%2e/auth.py",
        "vendor/../../api.py",
        "/etc/passwd",
        "%2Fetc%2Fpasswd",
        "index.html%00",
        "",
        "vendor",
        "vendor/",
        "..\\api.py",
    ],
)
async def test_nothing_else_is_served(path):
    assert (await call("GET", f"/assets/{path}", headers={})).status_code in (401, 404)


def test_files_are_read_once(tmp_path: Path):
    (tmp_path / "a.js").write_text("1")
    (tmp_path / "secret.key").write_text("2")
    (tmp_path / "link.txt").symlink_to("/etc/passwd")
    files = Static(tmp_path)
    (tmp_path / "b.js").write_text("3")
    assert set(files._files) == {"a.js"}


# The stream, over a real socket.


async def until(true):
    """Wait for a condition."""
    async with asyncio.timeout(10):
        while not true():  # noqa: ASYNC110 - it is about what others do
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def served(app):
    """The URL of a server for ``app``."""
    config = uvicorn.Config(app, port=0, lifespan="off", log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None
    task = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task


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
        site.journal.take(Telemetry("0-a-0", (), (commit(1),)))
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
        for _ in range(3):
            async with http.stream("GET", f"{url}/v1/stream"):
                pass
        await until(lambda: not site.journal._subscribers._open)
        async with http.stream("GET", f"{url}/v1/stream") as response:
            reader = asyncio.create_task(read(response, 1))
            await until(lambda: site.journal._subscribers._open)
            site.journal.close()
            assert await reader == []


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


async def test_too_many_streams_are_429(site, monkeypatch):
    site.journal._subscribers._open = STREAMS
    answer = await call("GET", "/v1/stream", site)
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "5"


async def test_a_page_without_a_service_shows_a_job_that_is_over():
    journal = JobJournal(MemoryDatabase(), JobInfo("job", 2, 1, 10, live=False))
    app = FastAPI()
    app.include_router(views(journal, None, KEYS))

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://x") as http:
        answer = await http.get("/v1/overview", headers=VIEWER)
    assert answer.status_code == 200
    assert not answer.json()["job"]["live"]
