"""The routes: what comes in is bounded and authenticated, what goes out is the protocol's."""

from __future__ import annotations

import asyncio
import json

import pytest

from ft_hsdp import protocol
from ft_hsdp.core.host_report import HostReport
from ft_hsdp.core.restart import RestartPolicy
from ft_hsdp.secret import worker_token
from lighthouse.http import quorum_route
from lighthouse.placement.state import PlacementPolicy
from tests.support.lighthouse.lighthouse_helpers import TOKEN, MemoryStore, ask, at, heard, name
from tests.support.lighthouse.site import KEY, Site

V1 = [("POST", "/v1/quorum"), ("POST", "/v1/processes"), ("GET", "/v1/status"), ("GET", "/v1/holders")]


async def call(method, path, token=TOKEN, **arguments):
    """One request to a lighthouse of its own."""
    return await Site(1, database=False).call(method, path, token, **arguments)


@pytest.mark.parametrize(("token", "status"), [(TOKEN, 200), (worker_token(TOKEN), 403)])
async def test_only_the_jobs_token_speaks_for_a_host(token, status):
    """A rank has the worker's token: with it nobody starts ranks, or reports the exits of a host."""
    site = Site(1, placing=PlacementPolicy(1, 1, RestartPolicy(1, 0.0)))
    report = protocol.ProcessReport(host=HostReport("near", "a", "here", 1, "127.0.0.1:4000"))
    answer = await site.call("POST", "/v1/processes", token, content=protocol.encode(report))
    assert answer.status_code == status
    assigned = status == 200
    assert (site.service.state.placement.starts, b'"incarnation"' in answer.content) == (assigned, assigned)


async def test_status_and_health():
    status = (await Site().call("GET", "/v1/status", TOKEN)).json()
    assert [row["replica"] for row in status["replicas"]] == [0, 1]
    health = await call("GET", "/healthz", token="")
    assert (health.status_code, health.headers["date"][-3:]) == (200, "GMT")


@pytest.mark.parametrize(("method", "path"), V1)
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}])
async def test_strangers_are_turned_away_before_their_body_is_read(method, path, headers):
    site, reads = Site(), []
    gate = site.gate

    async def watched(scope, receive, send):
        async def counted():
            reads.append(True)
            return await receive()

        await gate(scope, counted, send)

    site.gate = watched
    response = await site.call(method, path, headers=headers, content=b"{")
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "FT-HMAC, Bearer"
    assert not reads


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/", "/v1"])
async def test_there_are_no_other_pages(path):
    assert (await call("GET", path)).status_code == 404


@pytest.mark.parametrize("path", ["/v1/quorum", "/v1/processes"])
@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"null", b"[]", b"[" * 100_000, b"\xff\xfe", b"1" * 5000, b'{"type": "Ask"}'),
        *(b'{"type": "Grant", "body": {}}', b'{"type": ["Ask"], "body": {}}', b'{"running": 3}'),
        *(b'{"running": {"x": null}}', b'{"running": {"7": null}}', b'{"running": {}, "exited": ["?"]}'),
        protocol.encode(ask(3)),
        json.dumps({"type": "Ask", "body": {**json.loads(protocol.encode(ask(0)))["body"], "ring": 1}}).encode(),
    ],
    ids=lambda b: repr(b[:24]),
)
async def test_nonsense_is_422_with_one_line(path, body):
    response = await call("POST", path, content=body)
    assert response.status_code == 422, response.text
    detail = response.json()["detail"]
    assert isinstance(detail, str)
    assert detail
    assert "\n" not in detail
    assert len(detail) < 300


async def test_a_body_that_never_ends_is_408(monkeypatch):
    monkeypatch.setattr(quorum_route, "BODY_S", 0.05)
    told = {"method": "POST", "path": "/v1/quorum", "raw_path": b"/v1/quorum", "query_string": b"", "headers": []}
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "role": "worker", **told}
    pieces, out = [b"{", b" "], []

    async def slow():
        await (asyncio.sleep(0.02) if pieces else asyncio.Event().wait())
        return {"type": "http.request", "body": pieces.pop(0), "more_body": True}

    async def send(message):
        out.append(message)

    await Site().app(scope, slow, send)
    assert out[0]["status"] == 408


async def test_a_store_that_fails_is_503():
    store = MemoryStore()
    site = Site(1, store=store)
    store.full = True
    response = await site.call("POST", "/v1/quorum", TOKEN, content=protocol.encode(ask(0)))
    assert (response.status_code, response.json()) == (503, {"detail": "lighthouse store: full"})


async def test_holders_are_named_for_a_replica_that_recovers():
    site = Site()
    service = site.service
    both = [service.submit(ask(replica), None) for replica in (0, 1)]
    assert all(asked.answer.done() for asked in both)
    agents = {"0": ["127.0.0.1:7000"], "1": ["127.0.0.1:7001"]}
    async with site.client(TOKEN) as http:
        found = (await http.get("/v1/holders?replica=0")).json()
        assert found == {"stands": True, "head": None, "agents": agents, "hosts": {}}
        for replica in (0, 1):
            service.submit(ask(replica, at(1, 3), epoch=1), None)
        heard(service, {}, name(1))
        found = (await http.get("/v1/holders?replica=0")).json()
        assert found["stands"] is False
        assert found["head"] == {"commit_epoch": 1, "step": 3, "lineage": at(1, 3).lineage}
        assert found["agents"] == agents, "those of the dead replica, too"
        assert (await http.get("/v1/holders?replica=1")).json()["stands"] is True, "replica 0 trains"
        assert (await http.get("/v1/holders?replica=-1")).status_code == 422
    assert (await site.call("GET", "/v1/holders", KEY)).status_code == 403
