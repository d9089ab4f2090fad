import contextlib
import json
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.distributed.device_mesh import DeviceMesh

from ft_hsdp.jsonl import Journal
from ft_hsdp.state.agent.client import AgentGone, StateAgent
from ft_hsdp.state.agent.messages import Settle
from ft_hsdp.state.agent.starter import Starter, connect_newest
from ft_hsdp.state.shared_memory import Bytes
from ft_hsdp.train.state import snapshots
from ft_hsdp.train.state.live_state import LiveState
from ft_hsdp.train.state.snapshots import AgentHome, SnapshotWriter
from tests.support.waiting import until
from tests.train.state.test_live_state import START, hold, steps

DEADLINE_S = 20.0


class Place:
    """A host with a state agent for replica 0."""

    def __init__(self, folder: Path) -> None:
        self.token = secrets.token_hex(16)
        self.folder = folder
        self.starter = Starter(self.token, 0, "127.0.0.1", os.getpid(), folder / "agent.log", 60.0)
        self.journal = Journal(folder / "events.jsonl")
        self.failures: list[BaseException] = []
        self.snapshots: list[SnapshotWriter] = []

    def writer(
        self,
        live: LiveState,
        every_step: bool = True,
        answer_s: float = snapshots.ANSWER_S,
        join_s: float = DEADLINE_S,
    ) -> SnapshotWriter:
        home = AgentHome(self.token, 0, 0, 1, self.starter)
        self.starter.ensure()
        made = SnapshotWriter(live, home, every_step, join_s, self.journal, self.failures.append, answer_s)
        self.snapshots.append(made)
        return made

    def agent_pid(self) -> int:
        return self.starter.started[-1].pid

    def events(self) -> str:
        return (self.folder / "events.jsonl").read_text()

    def lost(self, *, over: bool = False) -> int:
        """How often the journal says that the agent is lost, or that this is over."""
        rows = map(json.loads, self.events().splitlines())
        return sum(row["event"] == "StateAgentLost" and row.get("over", False) is over for row in rows)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    for writer in made.snapshots:
        writer.close()
    for thread in threading.enumerate():
        if thread.name == "snapshots-seek":  # it may be starting an agent
            thread.join(DEADLINE_S + 10)
            assert not thread.is_alive()
    assert made.failures == []
    for agent in made.starter.started:
        agent.kill()
        agent.wait()


def walk(live: LiveState, sharded: Any, writer: SnapshotWriter, count: int) -> None:
    """Steps as a job does them."""
    for _ in range(count):
        before = live.state
        steps(live, sharded, 1)
        assert before is not None
        assert live.state is not None
        writer.order(Settle(before, writer.keeps(before)))
        writer.mark_current(live.state)
        assert writer.wait(DEADLINE_S)  # the vote on the next step


def test_what_was_kept_outlives_the_rank(mesh: DeviceMesh, place: Place) -> None:
    live, sharded = hold(mesh)
    writer = place.writer(live)
    walk(live, sharded, writer, 3)
    kept = writer.list()
    assert [k.state.step for k in kept] == [3, 2]
    assert [k.settled for k in kept] == [False, True]
    writer.close()
    fresh, fresh_sharded = hold(mesh, seed=5)
    again = place.writer(fresh)
    assert live.state is not None
    found = again.acquire(live.state)
    assert found is not None
    fresh.load(*found)
    again.release_taken()
    assert fresh.digest() == live.digest()
    assert fresh.ledger == live.ledger
    assert steps(fresh, fresh_sharded, 1) == steps(live, sharded, 1)


def test_on_demand_only_what_is_wanted_is_kept(mesh: DeviceMesh, place: Place) -> None:
    live, sharded = hold(mesh)
    writer = place.writer(live, every_step=False)
    walk(live, sharded, writer, 2)
    assert writer.list() == ()
    assert live.state is not None
    wanted = live.state
    writer.request(wanted, 60.0)
    assert writer.wait(DEADLINE_S)
    walk(live, sharded, writer, 3)
    assert [k.state for k in writer.list()] == [wanted]
    twin, twin_sharded = hold(mesh)
    coming = steps(twin, twin_sharded, 7)[6]
    writer.request(coming, 60.0)  # not reached yet
    walk(live, sharded, writer, 3)
    assert writer.list()[0].state == coming
    writer.forget()
    assert writer.list() == ()


def test_the_gate_is_opened_again_at_the_agent_that_comes_after(mesh: DeviceMesh, place: Place) -> None:
    live, _ = hold(mesh)
    writer = place.writer(live)
    pages: list[Bytes] = []
    writer.open_gate(pages.append)
    assert writer.wait(DEADLINE_S)
    assert len(pages) == 1
    os.kill(place.agent_pid(), signal.SIGKILL)
    writer.mark_current(START)
    until(lambda: len(pages) == 2)
    writer.close_gate()
    os.kill(place.agent_pid(), signal.SIGKILL)
    writer.order(Settle(START, True))
    until(lambda: place.lost(over=True) == 2)
    assert writer.wait(DEADLINE_S)
    assert len(pages) == 2, "it is not to be open any more"


def test_a_stopped_agent_holds_a_vote_up_once_and_is_replaced(mesh: DeviceMesh, place: Place) -> None:
    live, sharded = hold(mesh)
    writer = place.writer(live, answer_s=1.0)
    walk(live, sharded, writer, 1)
    address, pid = writer.address, place.agent_pid()
    os.kill(pid, signal.SIGSTOP)  # for now it is awaited
    walk(live, sharded, writer, 30)
    assert place.lost() == 1, "a vote waited for it again"
    os.kill(pid, signal.SIGCONT)
    until(lambda: place.lost(over=True) == 1)
    walk(live, sharded, writer, 2)
    assert writer.list()[0].state == live.state
    writer.close()
    writer = place.writer(live, answer_s=1.0, join_s=3.0)
    os.kill(pid, signal.SIGSTOP)  # for good
    until(lambda: (walk(live, sharded, writer, 1), place.lost(over=True) == 2)[1])
    assert place.lost() == 2
    assert f"(pid {pid})" in place.events()
    assert place.agent_pid() != pid
    walk(live, sharded, writer, 2)
    assert writer.list()[0].state == live.state
    writer.close()
    other = StateAgent.connect(place.token, 0, 0, 1, live.layout.nbytes, DEADLINE_S)
    assert other.address == address, "the addresses in grants no longer hold"
    other.close()


def test_copies_that_are_to_be_forgotten_are_though_their_agent_is_stopped(mesh: DeviceMesh, place: Place) -> None:
    live, sharded = hold(mesh)
    writer = place.writer(live, answer_s=0.3)
    walk(live, sharded, writer, 2)
    pid = place.agent_pid()
    os.kill(pid, signal.SIGSTOP)
    writer.forget()
    assert f"(pid {pid})" in place.events()
    again = place.writer(hold(mesh)[0])
    assert again.list() == ()


def test_a_rank_that_starts_beside_a_stopped_agent_replaces_it(mesh: DeviceMesh, place: Place) -> None:
    live, sharded = hold(mesh)
    walk(live, sharded, place.writer(live), 1)
    pid = place.agent_pid()
    os.kill(pid, signal.SIGSTOP)
    assert place.writer(hold(mesh)[0], join_s=DEADLINE_S / 2).list() == ()
    assert place.agent_pid() != pid
    assert place.lost(over=True)


def test_an_agent_that_does_not_even_die_is_stood_in_for(mesh, place, monkeypatch) -> None:
    loading = place.starter.ensure()
    first = StateAgent.connect(place.token, 0, 0, 1, 8, DEADLINE_S)
    os.kill(place.agent_pid(), signal.SIGSTOP)
    assert place.starter.renew(loading) == "", "it was killed, and listened only since a moment"
    monkeypatch.setattr(Starter, "_kill", lambda *_: False)
    assert "neither answers nor dies" in place.starter.renew(place.starter.ensure())
    second = StateAgent.connect(place.token, 0, 1, 2, 8, DEADLINE_S)
    assert second.address != first.address
    first.close()
    second.close()


def test_a_full_backlog_of_a_stopped_agent_stops_nobody(place: Place) -> None:
    place.starter.ensure()
    StateAgent.connect(place.token, 0, 0, 1, 8, DEADLINE_S).close()
    os.kill(place.agent_pid(), signal.SIGSTOP)
    callers = []
    with contextlib.suppress(BlockingIOError):
        while True:
            callers.append(socket.socket(socket.AF_UNIX))
            callers[-1].setblocking(False)
            connect_newest(callers[-1], place.token, 0)
    place.starter.ensure()  # it returns
    assert len(place.starter.started) == 1
    with pytest.raises(AgentGone):
        StateAgent.connect(place.token, 0, 0, 1, 8, 0.1)
    assert "was killed" in place.starter.renew(place.starter.ensure())
    for caller in callers:
        caller.close()
    StateAgent.connect(place.token, 0, 0, 1, 8, DEADLINE_S).close()


def test_no_agent_at_all_is_said(mesh: DeviceMesh, place: Place) -> None:
    live, _ = hold(mesh)
    with pytest.raises(AgentGone, match="no state agent of replica 0"):
        SnapshotWriter(
            live, AgentHome(place.token, 0, 0, 1, None), True, 0.1, place.journal, place.failures.append
        )


def test_a_checkpoint_gets_a_copy_that_stays_as_it_is(mesh: DeviceMesh, place: Place) -> None:
    live, sharded = hold(mesh)
    writer = place.writer(live)
    got: list[Any] = []
    writer.save(START, lambda manifest, packed: got.append((manifest, packed)))
    assert writer.wait(DEADLINE_S)
    ((manifest, packed),) = got
    before = packed.copy()
    walk(live, sharded, writer, 3)
    assert manifest.state == START
    assert np.array_equal(packed, before)


def test_a_checkpoint_without_memory_for_its_copy_is_said_and_ends_nothing(mesh, place, monkeypatch) -> None:
    live, sharded = hold(mesh)
    writer = place.writer(live)

    class Full:
        uint8 = np.uint8

        @staticmethod
        def empty(*_: object, **__: object) -> None:
            raise MemoryError

    got: list[Any] = []
    with monkeypatch.context() as without:
        without.setattr(snapshots, "np", Full)
        writer.save(START, lambda *copy: got.append(copy))
        assert writer.wait(DEADLINE_S)
    assert got == [(None, None)]
    walk(live, sharded, writer, 2)
