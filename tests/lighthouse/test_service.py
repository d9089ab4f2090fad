import asyncio
import json
import time
from dataclasses import replace
from unittest import mock

import pytest

from ft_hsdp import protocol
from ft_hsdp.core.grant import Continue, Grant, Refused
from ft_hsdp.errors import ProtocolViolation
from ft_hsdp.protocol import ProcessReport, Wait
from lighthouse import service as services
from lighthouse.overview.alarms import Facts
from lighthouse.overview.overview import JobInfo, JournalEntry, Overview
from lighthouse.quorum.commands import CULPRIT_S, Culprit
from lighthouse.runtime import LoggedFindings
from lighthouse.store import StoreFailed
from tests.support.lighthouse.lighthouse_helpers import (
    TOKEN,
    MemoryStore,
    ask,
    at,
    commit_row,
    events,
    granted,
    heard,
    hosted,
    make_service,
    name,
    quiet,
)
from tests.support.waiting import async_until


class Looks:
    """A clock that counts how often it is read: a timer of the service reads it."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> float:
        self.count += 1
        return time.monotonic()

    async def go_on(self) -> bool:
        before = self.count
        await asyncio.sleep(4 * services.TICK_S)
        return self.count > before


async def test_a_grant_is_signed_and_holds_the_addresses():
    service, rows = make_service()
    one, two = await granted(service, 0, 1)
    assert one == two
    protocol.verify(TOKEN, one)
    with pytest.raises(ProtocolViolation, match="wrong MAC"):
        protocol.verify(TOKEN, replace(one, epoch=2))
    assert [m.ring for m in one.members] == [("127.0.0.1:7000",), ("127.0.0.1:7001",)]
    (row,) = events(rows, "EpochGranted")
    assert row["source"] == "lighthouse"
    assert abs(row["t"] - time.time()) < 600
    assert {"term", "epoch", "step", "base", "members", "roles", "reason"} <= row.keys()


async def test_steady_state_needs_no_timer():
    looks = Looks()
    service, _ = make_service(clock=looks)
    await granted(service, 0, 1)
    for step in range(1, 3):
        for r in (0, 1):
            assert await service.ask(ask(r, at(1, step), epoch=1)) == Continue(1, step + 1)
            assert not await looks.go_on()


async def test_a_grace_runs_out_by_itself_and_the_timer_stops():
    looks = Looks()
    service, rows = make_service(silence_grace_s=0.1, evict_s=1.0, clock=looks)
    await granted(service, 0, 1)
    answer = await service.ask(ask(0, epoch=1, after=1))
    assert isinstance(answer, Grant)
    assert answer.ring == (0,)
    assert await looks.go_on(), "the silent one is still to be evicted"
    await async_until(lambda: events(rows, "ReplicaEvicted"))
    assert not await looks.go_on()


async def test_between_two_long_polls_the_ask_still_counts(monkeypatch):
    monkeypatch.setattr(services, "LINGER_S", 0.2)
    service, _ = make_service(long_poll_s=0.05)
    await service.ask(ask(0))
    first = await service.ask(ask(1))
    assert isinstance(first, Grant)
    assert first.ring == (0, 1)
    assert await service.ask(ask(0)) == first, "the answer that nobody took is given again"

    service, _ = make_service(long_poll_s=0.05)
    await service.ask(ask(0))
    await asyncio.sleep(0.3)
    assert service.state.views[0].ask is None
    assert isinstance(await service.ask(ask(1)), Wait)


async def test_an_older_ask_of_the_same_replica_withdraws_nothing():
    service, _ = make_service()
    old = asyncio.create_task(service.ask(ask(0)))
    await quiet()
    new = asyncio.create_task(service.ask(ask(0)))
    await quiet()
    old.cancel()
    await asyncio.gather(old, return_exceptions=True)
    await service.ask(ask(1))
    assert isinstance(await new, Grant)


async def test_nothing_is_told_that_is_not_durable():
    store = MemoryStore()
    service, rows = make_service(store=store)
    waiting = asyncio.create_task(service.ask(ask(0)))
    await quiet()
    store.full = True
    for _ in range(40):  # it repeats its first request: no other incarnation asks, so it is not one too many
        with pytest.raises(StoreFailed):
            await service.ask(ask(1))
    assert not waiting.done()
    assert not events(rows, "EpochGranted")
    assert service.state.epoch == 0
    with pytest.raises(StoreFailed):
        heard(service, {0: None}, name(0, 7))
    assert not service.state.exited
    store.full = False
    assert isinstance(await service.ask(ask(1)), Grant)
    assert isinstance(await waiting, Grant)
    assert '"epoch":1' in store.rows["grant"]


async def test_a_store_that_fails_at_a_tick_is_tried_again(monkeypatch, caplog):
    monkeypatch.setattr(services, "STORE_RETRY_S", 0.05)
    store = MemoryStore()
    service, _ = make_service(store=store, silence_grace_s=0.1)
    await granted(service, 0, 1)
    waiting = asyncio.create_task(service.ask(ask(0, epoch=1, after=1)))
    await quiet()
    store.full = True
    await asyncio.sleep(0.4)
    assert not waiting.done()
    store.full = False
    assert (await waiting).ring == (0,)
    service.close()
    assert "lighthouse store: full" in caplog.text


@pytest.mark.parametrize("placed", [False, True])
async def test_the_journal_says_once_what_is_waited_for(placed):
    looks = Looks()
    service, rows = make_service(total=3, start_wait_s=100.0, clock=looks)
    service.state = hosted(service.state) if placed else service.state
    tasks = [asyncio.create_task(service.ask(ask(0)))]
    await quiet()
    assert await looks.go_on()
    tasks.append(asyncio.create_task(service.ask(ask(1))))
    await asyncio.sleep(0.2)
    assert [r["reason"] for r in events(rows, "Waiting")] == ["waiting for replica 1,2", "waiting for replica 2"]
    await service.ask(ask(2))
    await asyncio.gather(*tasks)
    assert placed or not await looks.go_on()
    again = [asyncio.create_task(service.ask(ask(r, epoch=1, after=1))) for r in (0, 1)]
    await asyncio.sleep(0.2)
    assert [r["reason"] for r in events(rows, "Waiting")][2:] == ["waiting for replica 2"]
    service.close()
    await asyncio.gather(*again)


async def test_the_end_is_told_to_replicas_and_supervisors():
    looks = Looks()
    service, rows = make_service(steps=1, clock=looks)
    await granted(service, 0, 1)
    await asyncio.gather(*(service.ask(ask(r, at(1, 1), epoch=1)) for r in (0, 1)))
    assert service.processes(ProcessReport()).finished
    assert service.status()["finished"]
    assert not await looks.go_on()
    assert events(rows, "JobFinished")


async def test_the_head_may_lag_in_the_store_but_a_grant_takes_it_along_and_it_is_saved_soon_and_at_the_end():
    store = MemoryStore()
    service, _ = make_service(store=store)
    await granted(service, 0, 1)
    writes = store.writes
    for replica in (0, 1):
        assert await service.ask(ask(replica, at(1, 1), epoch=1)) == Continue(1, 2)
    assert store.writes == writes
    both = (service.ask(ask(replica, at(1, 1), epoch=1, after=1)) for replica in (0, 1))
    assert (await asyncio.gather(*both))[0].epoch == 2
    assert json.loads(store.rows["head"])["step"] == 1
    for step in (2, 3):
        for replica in (0, 1):
            await service.ask(ask(replica, at(2, step), epoch=2))
        async with asyncio.timeout(30):
            while step == 2 and json.loads(store.rows["head"])["step"] < step:
                await quiet()
    service.close()
    assert json.loads(store.rows["head"])["step"] == 3


async def test_a_newer_ask_of_a_replica_closes_the_older_one_but_a_fenced_one_does_not() -> None:
    service, _ = make_service(total=3)
    await granted(service, 0, 1, 2)
    waiting = service.submit(ask(0, at(1, 1), epoch=1, after=1))
    fenced = service.submit(ask(0, at(1, 1), life=0, epoch=1, after=1))
    assert isinstance(await waiting.answer, Wait)
    assert not fenced.answer.done()
    service.submit(ask(1, at(1, 1), life=1))  # a new life of replica 1 asks, then the old one again
    newer = service.submit(ask(1, at(1, 1), life=1))
    old = service.submit(ask(1, at(1, 1), life=0, epoch=1))
    assert isinstance(await old.answer, Refused)
    assert not newer.answer.done()


# The word that people see for each replica.


async def test_status_names_every_state():
    service, _ = make_service(total=7, steps=3)
    running: dict[int, str | None] = {0: name(0), 1: name(1), 2: name(2), 3: name(3), 4: name(4)}
    heard(service, running | {5: None, 6: None}, lost=(6,))
    heard(service, {2: None, 3: None, 4: None})
    await granted(service, 0, 1)
    heard(service, running)
    joiner = asyncio.create_task(service.ask(ask(2)))
    await quiet()
    first = asyncio.create_task(service.ask(ask(0, at(1, 1), epoch=1)))
    await service.ask(ask(1, at(1, 1), epoch=1))
    await asyncio.gather(first, joiner)
    waiting = asyncio.create_task(service.ask(ask(3)))
    await quiet()
    status = service.status()
    assert (status["epoch"], status["step"], status["finished"], status["members"]) == (2, 1, False, [0, 1, 2])
    states = [r["state"] for r in status["replicas"]]
    assert states == ["training", "training", "behind", "asking", "booting", "down", "lost"]
    assert all(r["reason"] for r in status["replicas"])
    assert status["replicas"][0]["incarnation"] == name(0)
    assert status["replicas"][0]["step"] == 1
    final = asyncio.create_task(service.ask(ask(0, at(2, 3), epoch=2)))
    await quiet()
    assert service.status()["replicas"][0]["state"] == "final"
    for task in (waiting, final):
        task.cancel()
    service.close()


async def test_a_culprit_that_the_journal_names_is_evicted_once_if_the_operator_wants_that():
    absent = {"event": "CulpritFound", "replica": 1, "rank": 0, "kind": "absent", "over": False, "witnesses": 2}
    slow = {**absent, "event": "StragglerSeen", "kind": "slow"}
    for row, wanted, times in (
        (absent, {"on_straggler": "demote"}, 0),
        (absent, {"on_culprit": "evict"}, 1),
        (slow, {"on_culprit": "evict"}, 0),
        (slow, {"on_straggler": "demote"}, 1),
    ):
        service, rows = make_service(3, **wanted)
        service.state = hosted(service.state)
        findings = LoggedFindings(rows.append, service)
        await granted(service, 0, 1, 2)
        for changes, evicted in (
            ({"over": True}, 0),
            ({"replica": None}, 0),
            ({}, times),
            ({"replica": 2}, times),
        ):
            findings.take("event", 1, {**row, "epoch": 1, "reason": "it hangs", **changes})
            await quiet()
            assert [row["incarnation"] for row in events(rows, "ReplicaEvicted")] == [name(1)] * evicted
        assert len(events(rows, row["event"])) == 4


async def test_the_overview_expects_no_replica_that_was_sent_away_before_the_lighthouse_started():
    store = MemoryStore()
    service, _ = make_service(4, store=store)
    await granted(service, 0, 1, 2, 3)
    service.command("scale", 0, "it is day", "here", target=3)
    service.command("drain", 1, "it smokes", "here")
    again, rows = make_service(4, store=MemoryStore(store.rows))
    again.started()
    overview = Overview(JobInfo("job", 4, 1, 10))
    for row in rows:
        overview.add(JournalEntry(overview.seq + 1, "event", row))
    row = {**commit_row(1), "contributors": [0], "units": None}
    overview.add(JournalEntry(overview.seq + 1, "commit", row))
    facts = Facts.of(overview, False, time.time())
    assert (facts.wanted, facts.missing) == (2, (2,))


async def test_another_lighthouse_waits_before_it_evicts_a_culprit():
    store = MemoryStore()
    await granted(make_service(3, store=store)[0], 0, 1, 2)
    service, rows = make_service(3, store=MemoryStore(store.rows), on_culprit="evict")
    service.state = hosted(service.state)
    heard(service, {r: name(r) for r in range(3)})
    service.suspect(Culprit(1, "absent", 2, 1, "it hangs"))
    await quiet()
    assert not events(rows, "ReplicaEvicted")


@mock.patch.object(services, "AGAIN_S", 0.0)
async def test_a_slow_replica_that_stays_for_now_is_looked_at_again_until_it_catches_up():
    seconds = [100.0]
    store = MemoryStore()
    await granted(make_service(3, store=store)[0], 0, 1, 2)
    for over, evicted in ((False, 1), (True, 0)):
        service, rows = make_service(
            3, store=MemoryStore(store.rows), on_straggler="demote", clock=lambda: seconds[0]
        )
        service.state = hosted(service.state)
        heard(service, {r: name(r) for r in range(3)})
        findings = LoggedFindings(rows.append, service)
        row = {"event": "StragglerSeen", "replica": 1, "rank": 0, "kind": "slow", "witnesses": 2, "epoch": 1}
        findings.take("event", 1, {**row, "over": False, "reason": "it is slow"})
        await quiet()
        assert not events(rows, "ReplicaEvicted"), "another lighthouse may have evicted one just now"
        if over:
            findings.take("event", 2, {**row, "over": True, "reason": "it is not"})
        seconds[0] += CULPRIT_S + 1
        await quiet()
        assert len(events(rows, "ReplicaEvicted")) == evicted
        service.close()
