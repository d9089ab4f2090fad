"""The service: saves before it answers, waits without spinning, and says no to what cannot be."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
from lighthouse_helpers import CONFIG_HASH, START, TOKEN, ask, at, name, run_async

from ft_hsdp import protocol
from ft_hsdp.core.assignment import Continue, Grant, Refused
from ft_hsdp.core.lineage import StateId
from ft_hsdp.errors import ProtocolViolation
from ft_hsdp.protocol import Processes, Wait
from lighthouse import service as services
from lighthouse.service import Service
from lighthouse.state import Policy
from lighthouse.store import MemoryStore, StoreFailed


class Full(MemoryStore):
    """A store whose disk can be full."""

    full = False

    def _write(self, rows):
        if self.full:
            raise StoreFailed("lighthouse store: disk is full")
        super()._write(rows)


def make(total=2, store=None, config_hash=None, long_poll_s=5.0, **policy):
    """(service, journal's rows)"""
    rows = []
    store = store or MemoryStore()
    policy = Policy(**{"total": total, "steps": 10, **policy})
    state = store.load(policy)
    return Service(
        state, store, TOKEN, rows.append, name="job", config_hash=config_hash, long_poll_s=long_poll_s
    ), rows


def events(rows, *names):
    return [r for r in rows if not names or r["event"] in names]


async def granted(service, *replicas):
    """The first epoch of these replicas."""
    return await asyncio.gather(*(service.ask(ask(r)) for r in replicas))


async def quiet(service):
    """Let everything that is ready run."""
    for _ in range(5):
        await asyncio.sleep(0)


# Answers.


def test_a_grant_is_signed_and_holds_the_addresses():
    async def main():
        service, rows = make()
        one, two = await granted(service, 0, 1)
        assert one == two
        protocol.verify(TOKEN, one)
        with pytest.raises(ProtocolViolation, match="wrong MAC"):
            protocol.verify(TOKEN, replace(one, epoch=2))
        assert [m.ring for m in one.members] == [("127.0.0.1:7000",), ("127.0.0.1:7001",)]
        (row,) = events(rows, "EpochGranted")
        assert row["source"] == "lighthouse"
        assert abs(row["t"] - time.time()) < 5
        assert {"term", "epoch", "step", "base", "members", "roles", "reason"} <= row.keys()

    run_async(main())


def test_steady_state_needs_no_timer():
    async def main():
        service, _ = make()
        await granted(service, 0, 1)
        for step in range(1, 6):
            for r in (0, 1):
                assert await service.ask(ask(r, at(1, step), epoch=1)) == Continue(1, step + 1)
                assert service._timer is None

    run_async(main())


def test_a_grace_runs_out_by_itself_and_the_timer_stops():
    async def main():
        service, rows = make(suspect_grace_s=0.1, evict_s=0.2)
        await granted(service, 0, 1)
        answer = await service.ask(ask(0, epoch=1, after=1))
        assert isinstance(answer, Grant)
        assert answer.ring == (0,)
        assert service._timer is not None, "the silent one is still to be evicted"
        async with asyncio.timeout(5):
            while not events(rows, "ReplicaEvicted"):
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.1)
        assert service._timer is None

    run_async(main())


def test_a_long_poll_ends_with_what_is_waited_for():
    async def main():
        service, _ = make(long_poll_s=0.05)
        assert await service.ask(ask(0)) == Wait("waiting for replica 1")

    run_async(main())


def test_between_two_long_polls_the_ask_still_counts(monkeypatch):
    async def main():
        monkeypatch.setattr(services, "LINGER_S", 0.2)
        service, _ = make(long_poll_s=0.05)
        await service.ask(ask(0))
        first = await service.ask(ask(1))
        assert isinstance(first, Grant)
        assert first.ring == (0, 1)
        assert await service.ask(ask(0)) == first, "the answer that nobody took is given again"

        service, _ = make(long_poll_s=0.05)
        await service.ask(ask(0))
        await asyncio.sleep(0.3)
        assert service.state.views[0].ask is None
        assert isinstance(await service.ask(ask(1)), Wait)

    run_async(main())


def test_a_cancelled_ask_is_withdrawn():
    async def main():
        service, _ = make()
        waiting = asyncio.create_task(service.ask(ask(0)))
        await quiet(service)
        assert service.state.views[0].ask is not None
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert service.state.views[0].ask is None
        assert not service._open

    run_async(main())


def test_an_older_ask_of_the_same_replica_withdraws_nothing():
    async def main():
        service, _ = make()
        old = asyncio.create_task(service.ask(ask(0)))
        await quiet(service)
        new = asyncio.create_task(service.ask(ask(0)))
        await quiet(service)
        old.cancel()
        await asyncio.gather(old, return_exceptions=True)
        await service.ask(ask(1))
        assert isinstance(await new, Grant)

    run_async(main())


def test_close_answers_what_is_open():
    async def main():
        service, _ = make()
        waiting = asyncio.create_task(service.ask(ask(0)))
        await quiet(service)
        service.close()
        assert await waiting == Wait("the lighthouse is going down")
        assert isinstance(await service.ask(ask(1)), Wait)

    run_async(main())


# The store comes first.


def test_nothing_is_told_that_is_not_durable():
    async def main():
        store = Full()
        service, rows = make(store=store)
        waiting = asyncio.create_task(service.ask(ask(0)))
        await quiet(service)
        store.full = True
        with pytest.raises(StoreFailed):
            await service.ask(ask(1))
        assert not waiting.done()
        assert not events(rows, "EpochGranted")
        assert service.state.epoch == 0
        with pytest.raises(StoreFailed):
            service.processes(Processes({0: None}, (name(0, 7),)))
        assert not service.state.exited
        store.full = False
        assert isinstance(await service.ask(ask(1)), Grant)
        assert isinstance(await waiting, Grant)
        assert '"epoch":1' in store.rows["grant"]

    run_async(main())


def test_a_store_that_fails_at_a_tick_is_tried_again(monkeypatch, caplog):
    async def main():
        monkeypatch.setattr(services, "STORE_RETRY_S", 0.05)
        store = Full()
        service, _ = make(store=store, suspect_grace_s=0.1)
        await granted(service, 0, 1)
        waiting = asyncio.create_task(service.ask(ask(0, epoch=1, after=1)))
        await quiet(service)
        store.full = True
        await asyncio.sleep(0.4)
        assert not waiting.done()
        store.full = False
        assert (await waiting).ring == (0,)
        service.close()

    run_async(main())
    assert "disk is full" in caplog.text


def test_the_same_epoch_goes_on_after_a_restart():
    async def main():
        store = MemoryStore()
        service, _ = make(store=store)
        await granted(service, 0, 1)
        again, rows = make(store=MemoryStore(store.rows))
        again.started()
        assert events(rows)[0]["event"] == "LighthouseStarted"
        assert again.state.term == service.state.term + 1
        assert await again.ask(ask(0, at(1, 1), epoch=1)) == Continue(1, 2)

    run_async(main())


# What cannot be.


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (ask(2), "replica is 2; possible: 0 to 1"),
        (ask(-1), "replica is -1"),
        (ask(0, at(1, 13)), "state.step is 13; possible: 0 to 12"),
        (ask(0, at(1, 2**62)), "state.step"),
        (ask(0, step=2**62), "step"),
        (ask(0, epoch=2**20 + 1), "epoch"),
        (ask(0, after=2**20 + 1), "after"),
        (ask(0, at(2**20 + 1, 1)), "state.commit_epoch"),
        (ask(0, max_term=2**60), "max_term"),
        (ask(0, equal=(5,)), "equal"),
        (ask(0, leaving=(5,)), "leaving"),
        (ask(0, StateId(0, 0, "not hex")), "state.lineage"),
        (replace(ask(0), report=replace(ask(0).report, incarnation="1-run-0")), "incarnation"),
        (replace(ask(0), report=replace(ask(0).report, incarnation="0-a b")), "incarnation"),
        (replace(ask(0), ring=("nowhere",)), "host:port"),
        (replace(ask(0), state=("h:1",) * 65), "host:port"),
    ],
    ids=lambda v: v[:20] if isinstance(v, str) else "",
)
def test_an_ask_that_cannot_be_true_is_refused(bad, field):
    async def main():
        service, rows = make()
        before = service.state
        with pytest.raises(ProtocolViolation, match=field):
            await service.ask(bad)
        assert service.state == before
        assert [r["event"] for r in rows] == ["AskRefused"]

    run_async(main())


def test_limits_follow_the_head_and_the_epoch():
    async def main():
        service, _ = make(total=1)
        answer = await service.ask(ask(0, at(2**20, 3), epoch=2**20))
        assert answer.epoch == 2**20 + 1
        assert (await service.ask(ask(0, at(2**20, 3), epoch=2**20))).epoch == 2**20 + 1

    run_async(main())


@pytest.mark.parametrize(
    "bad",
    [
        Processes({2: None}),
        Processes({}, ("2-run-0",)),
        Processes({}, (), (9,)),
        Processes({0: "1-run-0"}),
        Processes({}, ("nonsense",)),
        Processes({0: name(0)}, (name(0),)),
    ],
)
def test_a_picture_that_cannot_be_true_is_refused(bad):
    service, _ = make()
    with pytest.raises(ProtocolViolation):
        service.processes(bad)


def test_another_configuration_is_refused_and_named():
    async def main():
        service, rows = make(config_hash="d" * 32)
        answer = await service.ask(ask(0))
        assert isinstance(answer, Refused)
        assert answer.exit_code == 64
        assert answer.reason.startswith("config hash 'cccc")
        (row,) = events(rows, "AskRefused")
        assert (row["replica"], row["incarnation"]) == (0, name(0))
        assert service.state.views[0].incarnation is None

    run_async(main())


def test_another_layout_than_that_of_the_first_is_refused():
    async def main():
        service, _ = make(config_hash=CONFIG_HASH)
        first = asyncio.create_task(service.ask(ask(0)))
        await quiet(service)
        answer = await service.ask(replace(ask(1), layout="other"))
        assert isinstance(answer, Refused)
        assert answer.exit_code == 64
        assert "model layout" in answer.reason
        assert isinstance(await service.ask(ask(1)), Grant)
        await first

    run_async(main())


def test_without_a_hash_of_its_own_the_first_ask_says_it():
    async def main():
        service, _ = make()
        await granted(service, 0, 1)
        answer = await service.ask(replace(ask(0), config_hash="other"))
        assert isinstance(answer, Refused)

    run_async(main())


def test_a_fenced_incarnation_is_refused_and_its_report_forgotten():
    async def main():
        service, rows = make()
        await granted(service, 0, 1)
        service.processes(Processes({0: name(0, 1)}, ()))
        answer = await service.ask(ask(0, at(1, 1), epoch=1))
        assert isinstance(answer, Refused)
        assert answer.exit_code == 75
        assert service.status()["replicas"][0]["state"] == "booting"
        assert events(rows, "AskRefused")

    run_async(main())


# Supervisors.


def test_an_order_to_evict_stands_until_the_exit_is_reported():
    async def main():
        service, rows = make(suspect_grace_s=0.05, evict_s=0.1)
        service.processes(Processes({0: name(0), 1: name(1)}))
        await granted(service, 0, 1)
        await service.ask(ask(0, epoch=1, after=1))
        await asyncio.sleep(0.3)
        for _ in range(2):
            (order,) = service.processes(Processes({0: name(0), 1: name(1)})).evict
            assert (order.replica, order.incarnation) == (1, name(1))
            assert "silent" in order.reason
        assert len(events(rows, "ReplicaEvicted")) == 1
        assert not service.processes(Processes({0: name(0)})).evict, "that supervisor does not own it"
        assert not service.processes(Processes({0: name(0), 1: None}, (name(1),))).evict
        assert not service.processes(Processes({0: name(0), 1: name(1, 1)}, (name(1),))).evict
        assert len(events(rows, "ExitReported")) == 1

    run_async(main())


def test_who_comes_back_in_time_is_not_evicted():
    async def main():
        service, rows = make(suspect_grace_s=0.05, evict_s=0.4)
        await granted(service, 0, 1)
        await service.ask(ask(0, epoch=1, after=1))
        back = asyncio.create_task(service.ask(ask(1, epoch=1, after=1)))
        await asyncio.sleep(0.6)
        assert not events(rows, "ReplicaEvicted")
        assert (await service.ask(ask(0, at(2, 1), epoch=2))) == (await back)

    run_async(main())


def test_a_replica_that_a_supervisor_owns_and_does_not_run_is_down():
    async def main():
        service, _ = make(total=3)
        waiting = asyncio.create_task(service.ask(ask(0)))
        await quiet(service)
        overview = service.processes(Processes({0: name(0)}, (name(1),), (2,)))
        assert (await waiting).ring == (0,)
        assert overview.epoch == 1
        assert not overview.finished
        assert service.state.views[1].down
        assert service.state.views[2].lost

    run_async(main())


# What people see.


def test_the_journal_says_once_what_is_waited_for():
    async def main():
        service, rows = make(total=3, start_wait_s=100.0)
        tasks = [asyncio.create_task(service.ask(ask(0)))]
        await asyncio.sleep(0.2)
        assert service._timer is not None
        tasks.append(asyncio.create_task(service.ask(ask(1))))
        await asyncio.sleep(0.2)
        assert [r["reason"] for r in events(rows, "Waiting")] == [
            "waiting for replica 1,2",
            "waiting for replica 2",
        ]
        await service.ask(ask(2))
        await asyncio.gather(*tasks)
        assert service._timer is None

    run_async(main())


def test_status_names_every_state():
    async def main():
        service, _ = make(total=7, steps=3)
        running = {0: name(0), 1: name(1), 2: name(2), 3: name(3), 4: name(4)}
        service.processes(Processes(running | {5: None}, (), (6,)))
        service.processes(Processes({2: None, 3: None, 4: None}))
        await granted(service, 0, 1)
        service.processes(Processes(running))
        joiner = asyncio.create_task(service.ask(ask(2)))
        await quiet(service)
        await service.ask(ask(0, at(1, 1), epoch=1))
        await joiner
        waiting = asyncio.create_task(service.ask(ask(3)))
        await quiet(service)
        status = service.status()
        assert {k: status[k] for k in ("job", "epoch", "step", "finished", "members")} == {
            "job": "job",
            "epoch": 2,
            "step": 1,
            "finished": False,
            "members": [0, 1, 2],
        }
        states = [r["state"] for r in status["replicas"]]
        assert states == ["training", "training", "behind", "asking", "booting", "down", "lost"]
        assert all(r["reason"] for r in status["replicas"])
        assert status["replicas"][0]["incarnation"] == name(0)
        assert status["replicas"][0]["step"] == 1
        final = asyncio.create_task(service.ask(ask(0, at(2, 3), epoch=2)))
        await quiet(service)
        assert service.status()["replicas"][0]["state"] == "final"
        for task in (waiting, final):
            task.cancel()
        service.close()

    run_async(main())


def test_the_end_is_told_to_replicas_and_supervisors():
    async def main():
        service, rows = make(steps=1)
        await granted(service, 0, 1)
        await asyncio.gather(*(service.ask(ask(r, at(1, 1), epoch=1)) for r in (0, 1)))
        assert service.processes(Processes({0: name(0)})).finished
        assert service.status()["finished"]
        assert service._timer is None
        assert events(rows, "JobFinished")

    run_async(main())


def test_start_is_a_committed_state():
    assert START.step == 0
