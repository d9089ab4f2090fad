"""Who leads, by a real etcd: never two at once, and not for long nobody."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest

from lighthouse.ha.election import Election, boot_time
from lighthouse.ha.etcd import Etcd, EtcdUnreachable

pytestmark = pytest.mark.multiproc
NAMES = itertools.count()


class Scene:
    """Candidates for the lead of one job."""

    def __init__(self, server):
        self.server = server
        self.key = f"/election/{next(NAMES)}/leader"
        self._clients = []

    def candidate(self, url, lease_s=30, clock=boot_time):
        self._clients.append(Etcd((self.server.url,), min(5.0, lease_s / 2)))
        return Election(self._clients[-1], self.key, url, lease_s, clock)

    def close(self):
        for client in self._clients:
            client.close()


@pytest.fixture
def scene(etcd):
    made = Scene(etcd)
    yield made
    made.close()


async def test_one_leads_and_who_resigns_is_followed_at_once(scene):
    one, other = scene.candidate("http://one"), scene.candidate("http://other")
    await one.win()
    assert one.holds
    assert one.leader == "http://one"
    waiting = asyncio.create_task(other.win())
    await asyncio.sleep(0.6)
    assert not waiting.done()
    assert (other.holds, other.leader) == (False, "http://one")
    one.resign()
    assert not one.holds
    await asyncio.wait_for(waiting, 2)
    assert other.holds
    assert other.revision > one.revision
    other.resign()


async def test_many_at_once_have_one_leader(scene):
    candidates = [scene.candidate(f"http://{n}") for n in range(8)]
    tries = await asyncio.gather(*(c._try() for c in candidates))
    assert sum(tries) == 1
    assert sum(c.holds for c in candidates) == 1
    for each in candidates:
        each.resign()


async def test_who_is_silent_stops_before_another_begins(scene):
    """The old leader counts its lease from before it asked for it, and not to its end."""
    silent, other = scene.candidate("http://silent", lease_s=2), scene.candidate("http://other", lease_s=2)
    await silent.win()
    winning = asyncio.create_task(other.win())
    while silent.holds:
        assert not winning.done(), "two led"
        await asyncio.sleep(0.01)
    await asyncio.wait_for(winning, 5)
    other.resign()


@pytest.mark.proof
async def test_a_lease_is_kept_for_as_long_as_etcd_answers_and_no_longer(scene):
    leader = scene.candidate("http://leader", lease_s=2)
    await leader.win()
    keeping = asyncio.create_task(leader.keep())
    await asyncio.sleep(2.5)
    assert leader.holds
    assert not keeping.done()
    scene.server.kill()
    killed = time.monotonic()
    assert "may have run out" in await asyncio.wait_for(keeping, 4)
    assert time.monotonic() - killed < 2.5
    assert not leader.holds
    scene.server.start()


async def test_who_did_not_run_for_longer_than_its_lease_leads_no_more(scene):
    """Even if etcd still took the call: what was known before is worth nothing."""
    jump = [0.0]
    leader = scene.candidate("http://leader", lease_s=4, clock=lambda: boot_time() + jump[0])
    await leader.win()
    keeping = asyncio.create_task(leader.keep())
    jump[0] = 10.0
    assert not leader.holds
    assert "did not run" in await asyncio.wait_for(keeping, 3)
    leader.resign()


async def test_a_lease_that_etcd_has_ended_is_lost_at_once(scene):
    leader = scene.candidate("http://leader", lease_s=4)
    await leader.win()
    scene._clients[0].revoke(leader._lease)
    assert "ended its lease" in await asyncio.wait_for(leader.keep(), 3)
    assert not leader.holds


async def test_a_key_of_a_campaign_that_got_no_answer_is_not_taken_for_a_new_one(scene, monkeypatch):
    """It hangs on a lease that nobody keeps."""
    candidate = scene.candidate("http://me", lease_s=2)
    client = scene._clients[0]
    create = client.create

    def lost(*arguments):
        create(*arguments)
        raise EtcdUnreachable("the answer was lost")

    monkeypatch.setattr(client, "create", lost)
    assert not await candidate._try()
    monkeypatch.undo()
    monkeypatch.setattr(client, "get", lambda key: None)  # it was not there yet
    assert not await candidate._try(), "leads by a key whose lease is not kept"
    assert not candidate.holds
    monkeypatch.undo()
