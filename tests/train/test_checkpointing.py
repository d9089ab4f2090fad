"""What a rank comes back with, where copies in its host's memory are damaged or gone."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh

from ft_hsdp.core.state_id import StateId
from ft_hsdp.jsonl import Journal
from ft_hsdp.state.agent.messages import CompleteSnapshot
from ft_hsdp.state.replica_group import ReplicaGroup
from ft_hsdp.train import checkpointing as module
from ft_hsdp.train import checkpointing as restoring
from ft_hsdp.train.checkpointing import Checkpoints, restore
from ft_hsdp.train.live_state import LiveState
from ft_hsdp.train.snapshots import SnapshotWriter
from tests.train.test_live_state import START, hold
from tests.train.test_snapshots import DEADLINE_S, Place, done, until, walk
from tests.train.test_snapshots import place as place

CHECKPOINTED = StateId(1, 1, "c" * 32)


def came_back(
    live: LiveState, writer: SnapshotWriter, place: Place, monkeypatch: pytest.MonkeyPatch
) -> StateId | None:
    """The state of a fresh rank after it has restored; CHECKPOINTED stands for that of a checkpoint."""

    def resume(live: LiveState, *_: object) -> None:
        live.state = CHECKPOINTED

    monkeypatch.setattr(restoring, "load_checkpoint", resume)
    checkpoints = Checkpoints(place.folder, "", 1, 1, (1, 1), None)
    restore(live, writer, ReplicaGroup(), checkpoints, current=True, journal=place.journal)
    return live.state


def test_a_damaged_copy_is_passed_over(mesh: DeviceMesh, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    live, sharded = hold(mesh)
    writer = place.writer(live)
    walk(live, sharded, writer, 2)
    older = live.state
    walk(live, sharded, writer, 1)
    assert writer._agent is not None
    writer._agent.flip()
    fresh, _ = hold(mesh, seed=5)
    again = place.writer(fresh)
    assert older is not None
    assert came_back(fresh, again, place, monkeypatch) == older
    assert "SnapshotCorrupt" in place.events()
    assert [kept.state for kept in again.list()] == [older]
    last, _ = hold(mesh, seed=6)
    again.mark_current(older)  # another copy of what is held
    assert done(again)
    assert again._agent is not None
    again._agent.flip()
    again.request(older, 60.0)  # a donor finds it, and makes one more
    until(lambda: (again.mark_settled(older, True), done(again), place.events().count("SnapshotCorrupt") == 2)[-1])
    again.close()
    final = place.writer(last)
    assert came_back(last, final, place, monkeypatch) == older
    assert last.digest() == fresh.digest()


def test_an_agent_that_dies_with_what_it_kept_leaves_the_checkpoint(
    mesh: DeviceMesh, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, sharded = hold(mesh)
    writer = place.writer(live)
    walk(live, sharded, writer, 2)
    fresh, _ = hold(mesh, seed=5)
    again = place.writer(fresh)
    acquire = again.acquire

    def dies(state: StateId) -> object:
        process = place.starter.started[-1]
        os.kill(process.pid, signal.SIGKILL)
        process.wait(DEADLINE_S)
        return acquire(state)

    monkeypatch.setattr(again, "acquire", dies)
    assert came_back(fresh, again, place, monkeypatch) == CHECKPOINTED
    assert live.state != START


# With which state a replica comes when its host's agent dies after it has said what it keeps.


KEPT = StateId(3, 40, "a" * 32)
WRITTEN = StateId(2, 20, "b" * 32)


class Alone:
    rank = 0

    def gather(self, mine: bytes) -> list[bytes]:
        return [mine]


class Keeper:
    """Its agent answers once, and is gone then."""

    def list(self) -> tuple[CompleteSnapshot, ...]:
        return (CompleteSnapshot(KEPT, settled=True),)

    def acquire(self, state: StateId) -> None:
        return None

    def release_taken(self) -> None:
        pass


class Held:
    state = StateId(0, 0, "0" * 32)


@pytest.mark.parametrize("current", [True, False])
def test_a_checkpoint_is_taken_if_the_agent_dies_between_its_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, current: bool
) -> None:
    looked: list[Path] = []

    def resume(live: Any, ranks: object, checkpoints: Checkpoints) -> None:
        looked.append(checkpoints.folder)
        live.state = WRITTEN

    monkeypatch.setattr(module, "load_checkpoint", resume)
    live: Any = Held()
    ranks: Any = Alone()
    writer: Any = Keeper()
    checkpoints = Checkpoints(tmp_path, "hash", 1, 1, (1, 1), None)
    restore(live, writer, ranks, checkpoints, current, Journal(tmp_path / "events.jsonl"))
    assert looked == [tmp_path], "once"
    assert live.state == WRITTEN
