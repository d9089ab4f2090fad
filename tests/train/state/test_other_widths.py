"""With which state a replica comes back whose number of ranks is not that of the shards in memory."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from ft_hsdp.core.grant import Holders, Member
from ft_hsdp.core.state_id import StateId
from ft_hsdp.jsonl import Journal
from ft_hsdp.memory.recovery import Holding
from ft_hsdp.state.agent.messages import CompleteSnapshot
from ft_hsdp.state.shared_memory import Bytes, InMemorySnapshots, SnapshotBuffer
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.http import StateServer
from ft_hsdp.state.transfer.reshape import WantedShard
from ft_hsdp.state.transfer.shard_manifest import HeldShard, Layout, ShardManifest
from ft_hsdp.train.state import recovery
from ft_hsdp.train.state.checkpointing import Checkpoints
from ft_hsdp.train.state.known_shards import OtherWidths, Recoverer, donors_of
from ft_hsdp.train.state.recovery import Restoration
from tests.support.state import widths
from tests.support.state.widths import TOKEN, content, layout

DEADLINE_S = 30.0


def state(step: int) -> StateId:
    return StateId(1, step, f"{step:032x}")


CHECKPOINT = state(2)


def shard(step: int, width: int, rank: int) -> tuple[ShardManifest, Bytes]:
    """A shard of a state: its counters tell the step."""
    data = content(width, rank)
    place = layout(width, rank).tensors[-1]
    data[place.offset : place.offset + place.nbytes] = step
    made = replace(widths.manifest(width, rank), state=state(step), cursors=(step,))
    return shard_manifest.seal(made, data.data), data


class Host(InMemorySnapshots):
    """The agent of one host: shards of any width, and a rank's line to it."""

    def __init__(self, replica: int, name: str, *kept: tuple[int, int, int]) -> None:
        super().__init__()
        self.replica, self.name = replica, name
        self.rooms: dict[tuple[int, int, int], SnapshotBuffer] = {}
        self.flipped: set[tuple[int, int, int]] = set()
        for step, width, rank in kept:
            manifest, data = shard(step, width, rank)
            room = SnapshotBuffer(len(data))
            room.bytes[: len(data)] = data
            self.add(manifest, room)
        self.server = StateServer("127.0.0.1", 0, self, TOKEN)
        self.address = self.server.address

    def add(self, manifest: ShardManifest, room: SnapshotBuffer) -> None:
        self.put(manifest, room)
        self.rooms[manifest.state.step, manifest.ranks, manifest.rank] = room

    def flip(self, step: int, width: int, rank: int) -> None:
        """A bit on the way: the part is sealed from the right bytes before."""
        self.flipped.add((step, width, rank))
        self.rooms[step, width, rank].bytes[0] ^= 1

    def held(self) -> list[HeldShard]:
        return [
            HeldShard(
                state(step), self.replica, rank, width, layout(width, rank).fingerprint, room.bytes.nbytes, True
            )
            for (step, width, rank), room in self.rooms.items()
        ]


class Line:
    """A rank's line to its host's agent."""

    def __init__(self, host: Host, width: int, rank: int) -> None:
        self._host, self._width, self._rank = host, width, rank
        self.address = host.address

    def list(self) -> tuple[CompleteSnapshot, ...]:
        mine = [step for step, width, rank in self._host.rooms if (width, rank) == (self._width, self._rank)]
        return tuple(CompleteSnapshot(state(step), True) for step in sorted(mine, reverse=True))

    def acquire(self, wanted: StateId) -> tuple[ShardManifest, Bytes] | None:
        room = self._host.rooms.get((wanted.step, self._width, self._rank))
        if room is None:
            return None
        return shard(wanted.step, self._width, self._rank)[0], room.bytes[: layout(self._width, self._rank).nbytes]

    def allocate(self, _: StateId) -> Bytes:
        nbytes = layout(self._width, self._rank).nbytes
        self._room = SnapshotBuffer(nbytes)
        self._room.bytes[:] = 255
        return self._room.bytes[:nbytes]

    def complete(self, manifest: ShardManifest) -> None:
        self._host.add(manifest, self._room)

    def release(self) -> None: ...

    def release_taken(self) -> None: ...


class Live:
    def __init__(self, width: int, rank: int) -> None:
        self._width, self._rank = width, rank
        self.layout: Any = layout(width, rank)
        self.state = state(0)
        self.changes: tuple[object, ...] = ()

    def load(self, manifest: ShardManifest, packed: Bytes) -> None:
        made, data = shard(manifest.state.step, self._width, self._rank)
        assert manifest == made, "as if it had always been of this width"
        assert (packed == data).all()
        self.state = manifest.state


class Job:
    """Replica 0, with its ranks on ``own``, beside the agents of all hosts."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "events.jsonl"
        self.hosts: list[Host] = []

    def host(self, replica: int, name: str, *kept: tuple[int, int, int]) -> Host:
        self.hosts.append(Host(replica, name, *kept))
        return self.hosts[-1]

    def restore(
        self, own: Sequence[Host], head: int | None = 5, layouts: Callable[[int, int], Layout] = layout
    ) -> list[StateId]:
        size, told = len(own), [b""] * len(own)
        barrier = threading.Barrier(size, timeout=DEADLINE_S)

        def group(rank: int) -> Any:
            def gather(mine: bytes) -> list[bytes]:
                told[rank] = mine
                barrier.wait()
                found = list(told)
                barrier.wait()
                return found

            return SimpleNamespace(rank=rank, size=size, gather=gather, broadcast=lambda mine=b"": gather(mine)[0])

        lives: list[Any] = [Live(size, rank) for rank in range(size)]
        named: dict[int, list[str]] = {}
        for host in self.hosts:
            named.setdefault(host.replica, []).append(host.address)
        agents = {replica: tuple(addresses) for replica, addresses in named.items()}
        hosts = {host.address: host.name for host in self.hosts}
        found = Holders(False, None if head is None else state(head), agents, hosts)

        def load(live: Live, *_: object) -> Any:
            live.state = CHECKPOINT
            return SimpleNamespace(state=CHECKPOINT, path="checkpoint", seconds=0.0, skipped=(), other_data="")

        def run(rank: int) -> None:
            journal = Journal(self.file, rank=rank)
            lives[rank].layout = layouts(size, rank)
            about = Recoverer(0, 1, own[rank].name, TOKEN, lambda _: found, 0.0, DEADLINE_S)
            line: Any = Line(own[rank], size, rank)
            checkpoints = Checkpoints(self.file.parent, "", 1, 1, (1, 1), None)
            Restoration(lives[rank], line, group(rank), checkpoints, True, journal, about).run()
            journal.close()

        with mock.patch.object(recovery, "load_checkpoint", load), ThreadPoolExecutor(size) as threads:
            for done in [threads.submit(run, rank) for rank in range(size)]:
                done.result(DEADLINE_S)
        return [live.state for live in lives]

    def record(self) -> dict[str, Any]:
        rows = [json.loads(line) for line in self.file.read_text().splitlines()]
        (row,) = (row for row in rows if row["event"] == "StateRestored")
        return row


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    for host in made.hosts:
        host.server.close()


LEAST = sum(tensor.nbytes for rank in range(3) for tensor in layout(3, rank).tensors)


def test_a_replica_that_lost_a_rank_goes_on_with_three_of_four(job: Job) -> None:
    """Host r0h1 is lost with rank 3; r0h0 kept a copy of that shard."""
    here = job.host(0, "r0h0", *((step, 4, rank) for step in (4, 5) for rank in range(4)))
    assert job.restore([here] * 3) == [state(5)] * 3
    row = job.record()
    assert (row["rung"], row["ranks"], row["width"], row["lost_steps"]) == ("agent", 3, 4, 0)
    assert row["bytes"] == LEAST, "the least possible"
    assert {(5, 3, rank) for rank in range(3)} <= here.rooms.keys(), "what was put together is a snapshot at once"


def test_it_grows_back_from_its_own_memory(job: Job) -> None:
    """r0h1 comes back with what it had: an older state, of the width before."""
    here, back = (
        job.host(0, "r0h0", *((6, 3, rank) for rank in range(3))),
        job.host(0, "r0h1", (5, 4, 2), (5, 4, 3)),
    )
    assert job.restore([here, here, back, back], head=6) == [state(6)] * 4
    row = job.record()
    assert (row["rung"], row["ranks"], row["width"], row["step"]) == ("copy", 4, 3, 6)


def test_shards_of_other_replicas_count_too(job: Job) -> None:
    """The own replica has no shard of rank 3; replica 1 has it, and replica 2 has the state on 2 ranks."""
    own = job.host(0, "r0h0", (5, 4, 0), (5, 4, 1), (5, 4, 2))
    job.host(1, "r1h0", (5, 4, 2), (5, 4, 3))
    job.host(2, "r2h0", (5, 2, 0), (5, 2, 1))
    assert job.restore([own] * 3) == [state(5)] * 3
    row = job.record()
    assert (row["rung"], row["width"]) == ("replica", 4), "of the widths that are whole the largest"


def test_the_own_width_comes_first(job: Job) -> None:
    own = job.host(0, "r0h0", *((5, 4, rank) for rank in range(4)), *((5, 3, rank) for rank in range(3)))
    assert job.restore([own] * 3) == [state(5)] * 3
    assert (job.record()["rung"], job.record()["bytes"]) == ("agent", 0)
    assert "width" not in job.record()


def test_a_newer_state_of_another_width_comes_before_an_older_one_of_the_own(job: Job) -> None:
    own = job.host(0, "r0h0", *((5, 4, rank) for rank in range(4)), *((4, 3, rank) for rank in range(3)))
    assert job.restore([own] * 3) == [state(5)] * 3


def test_shards_of_two_states_or_widths_are_never_combined(job: Job) -> None:
    own = job.host(0, "r0h0", (5, 4, 0), (5, 4, 1), (5, 4, 2), (4, 4, 3), (5, 3, 2), (4, 3, 0))
    assert job.restore([own] * 3) == [CHECKPOINT] * 3


def test_a_source_that_fails_is_left_out_on_all_ranks(job: Job) -> None:
    """Only rank 0 needs the shard whose byte flipped; all ranks take the older state."""
    own = job.host(0, "r0h0", *((step, 4, rank) for step in (4, 5) for rank in range(4)))
    own.flip(5, 4, 0)
    with mock.patch("ft_hsdp.state.transfer.served_parts._checksums", sealed_before(own)):
        assert job.restore([own] * 3) == [state(4)] * 3
    assert job.record()["lost_steps"] == 1


def sealed_before(host: Host) -> Callable[..., tuple[str, ...]]:
    """Checksums of what a shard was before its byte flipped."""
    from ft_hsdp.state.transfer import served_parts

    seal = served_parts._checksums

    def sealed(served: Any, *of_part: Any) -> tuple[str, ...]:
        rooms = [host.rooms[key] for key in host.flipped if host.rooms[key].fd == served.fd]
        if not rooms:
            return seal(served, *of_part)
        (room,) = rooms
        room.bytes[0] ^= 1
        try:
            return seal(served, *of_part)
        finally:
            room.bytes[0] ^= 1

    return sealed


def test_a_failed_source_makes_way_for_another_replica(job: Job) -> None:
    own = job.host(0, "r0h0", *((5, 4, rank) for rank in range(4)))
    job.host(1, "r1h0", *((5, 4, rank) for rank in range(4)))
    own.flip(5, 4, 0)
    with mock.patch("ft_hsdp.state.transfer.served_parts._checksums", sealed_before(own)):
        assert job.restore([own] * 3) == [state(5)] * 3
    assert job.record()["rung"] == "replica"


def test_without_a_head_its_own_hosts_are_asked(job: Job) -> None:
    """The lighthouse does not know the job: what the own hosts have in another width counts, too."""
    own = job.host(0, "r0h0", *((5, 4, rank) for rank in range(4)))
    job.host(1, "r1h0", *((6, 4, rank) for rank in range(4)))
    assert job.restore([own] * 3, head=None) == [state(5)] * 3


def test_a_state_that_is_cut_otherwise_comes_from_a_checkpoint(job: Job) -> None:
    def tensor_parallel(width: int, rank: int) -> Layout:
        place = layout(width, rank)
        return Layout((replace(place.tensors[0], cut="other"), *place.tensors[1:]), place.nbytes)

    own = job.host(0, "r0h0", *((5, 4, rank) for rank in range(4)))
    assert job.restore([own] * 3, layouts=tensor_parallel) == [CHECKPOINT] * 3


def test_other_widths_are_worked_out_when_they_are_seen() -> None:
    found = OtherWidths(layout(3, 1), [layout(3, rank).fingerprint for rank in range(3)])
    row = Holding(state(1), 0, 0, 3, "", "h", "h:1", True)
    assert found.of([row, replace(row, ranks=0), replace(row, ranks=10**9)]) == {}
    (width,) = found.of([replace(row, ranks=4)]).values()
    assert width.layouts == tuple(layout(4, rank).fingerprint for rank in range(4))
    assert width.needs == ((0, 1), (1, 2), (2, 3))
    wrong = OtherWidths(layout(3, 1), ["0" * 32] * 3)  # another rank is cut in another way
    assert wrong.of([replace(row, ranks=4)]) == {}


def test_a_rank_that_is_behind_fetches_from_replicas_of_its_width_if_there_are_any() -> None:
    wanted = WantedShard(state(5), 1, 3, layout(3, 1))

    def member(replica: int, width: int) -> Member:
        return Member(replica, f"{replica}-x-0", "contribute", (), tuple(f"r{replica}:{k}" for k in range(width)))

    width, donors = donors_of([member(1, 4), member(2, 4), member(3, 3)], wanted)
    assert (width, {rank: [d.address for d in each] for rank, each in donors.items()}) == (3, {1: ["r3:1"]})
    width, donors = donors_of([member(1, 4), member(2, 4), member(3, 5)], wanted)
    assert (width, {rank: [d.replica for d in each] for rank, each in donors.items()}) == (
        4,
        {1: [1, 2], 2: [1, 2]},
    )
    assert donors_of([], wanted) == (3, {1: []})
    assert np.asarray(donors[1][0].address) == "r1:1"
