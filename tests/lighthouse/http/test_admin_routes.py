"""The operator's routes over HTTP: who may, what is answered, and what stands in the journal before it is done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from ft_hsdp.protocol import ProcessReport
from lighthouse.http.app import MAX_REASON
from lighthouse.quorum.state import Policy
from tests.support.lighthouse.lighthouse_helpers import ADMIN, MemoryStore, Row, ask, heard, hosted, name
from tests.support.lighthouse.site import Site


class Place:
    """A lighthouse of three members, its journal, and a client that is an admin."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.now = 0.0
        self.store = MemoryStore()
        self.noted: list[Any] = []  # the state when each row was written
        site = Site(3, store=self.store, note=self._journal, clock=lambda: self.now)
        self.service, self.http = site.service, site.client(ADMIN, "192.0.2.7")

    def _journal(self, row: Row) -> None:
        self.rows.append(row)
        self.noted.append(self.service.state)

    async def order(self, path: str, **arguments: Any) -> httpx.Response:
        """One order."""
        return await self.http.post(f"/v1/admin/{path}", **arguments)

    def audited(self) -> list[Row]:
        """What the journal says of operators."""
        return [row for row in self.rows if row["source"] == "admin"]


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    """A place that is started."""
    place = Place()
    async with place.http:
        place.service.state = hosted(place.service.state)
        await asyncio.gather(*(place.service.ask(ask(r)) for r in range(3)))
        yield place


@pytest.mark.parametrize(
    ("path", "order"), [("replicas/1/evict", "evict"), ("replicas/1/drain", "drain"), ("checkpoint", "checkpoint")]
)
async def test_an_order_is_in_the_journal_before_it_is_carried_out_and_only_once(
    place: Place, path: str, order: str
) -> None:
    before = place.service.state
    response = await place.order(path, json={"reason": "a new\nfan \x1b[31m"})
    assert response.status_code == 200
    (row,) = place.audited()
    assert (row["order"], row["reason"], row["address"]) == (order, "a new fan [31m", "192.0.2.7")
    assert row["will"] == response.json()["detail"]
    assert row.get("replica") == (1 if "replicas" in path else None)
    assert place.noted[place.rows.index(row)] == before
    again = await place.order(path)
    assert again.status_code == 200
    assert len(place.audited()) == 1


async def test_an_eviction_ends_with_the_exit(place: Place) -> None:
    await place.order("replicas/1/evict", json={"reason": "hot"})
    (eviction,) = [row for row in place.rows if row["event"] == "ReplicaEvicted"]
    assert (eviction["incarnation"], eviction["reason"]) == (name(1), "by the operator: hot")
    heard(place.service, {1: None}, name(1))
    assert (await place.order("replicas/1/evict")).json() == {"detail": "replica 1 does not run"}


async def test_a_scale_is_in_the_journal_is_told_to_supervisors_and_outlives_the_lighthouse(place: Place) -> None:
    response = await place.order("scale", json={"replicas": 2, "reason": "a guest"})
    assert response.json()["detail"].startswith("replica 2 leaves")
    (row,) = place.audited()
    assert (row["order"], row["replicas"], row["reason"]) == ("scale", 2, "a guest")
    assert "replica" not in row
    assert place.service.processes(ProcessReport()).drained == (2,)
    assert place.service.status()["target"] == 2
    again = await place.order("scale", json={"replicas": 2})
    assert (again.status_code, len(place.audited())) == (200, 1)
    assert MemoryStore(place.store.rows).load(place.service.state.policy).target == 2
    assert MemoryStore(place.store.rows).load(Policy(slots=1, steps=10)).target == 1


@pytest.mark.parametrize(
    ("path", "arguments", "status"),
    [
        ("replicas/3/drain", {}, 404),
        ("replicas/one/drain", {}, 422),
        ("replicas/1/reboot", {}, 404),
        ("replicas/1/drain", {"json": {"reason": "x" * (MAX_REASON + 1)}}, 422),
        ("replicas/1/drain", {"json": {"speed": "slow"}}, 422),
        ("replicas/1/drain", {"content": b"{"}, 422),
        ("replicas/1/drain", {"content": b'{"reason": "\\ud800"}'}, 422),
        ("scale", {"json": {"replicas": 4}}, 409),
        ("scale", {"json": {"replicas": 0}}, 422),
        ("scale", {"json": {"replicas": 10**30}}, 422),
    ],
)
async def test_what_makes_no_sense_gets_one_line(place: Place, path: str, arguments: Any, status: int) -> None:
    response = await place.order(path, **arguments)
    assert response.status_code == status
    detail = response.json()["detail"]
    assert isinstance(detail, str)
    assert "\n" not in detail
    assert not place.audited()
    assert (place.service.state.drained, place.service.state.target) == (frozenset(), 3)
