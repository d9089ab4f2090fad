"""With which state a replica comes back whose number of ranks is not that of the shards in memory."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ft_hsdp.core.grant import Member
from ft_hsdp.core.state_id import StateId
from ft_hsdp.memory.recovery import Holding
from ft_hsdp.state.transfer.reshape import WantedShard
from ft_hsdp.state.transfer.shard_manifest import Layout
from ft_hsdp.train.state.known_shards import OtherWidths, donors_of
from tests.support.state.memory_of_hosts import AGAINST, AgentOfHost, Key, Lighthouse, restored, state
from tests.support.state.widths import layout


class Job:
    """Replica 0, with its ranks on ``own``, beside the agents of all hosts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.hosts: list[AgentOfHost] = []

    def host(self, replica: int, name: str, *kept: Key) -> AgentOfHost:
        self.hosts.append(AgentOfHost(replica, name, *kept))
        return self.hosts[-1]

    def restore(
        self, own: Sequence[AgentOfHost], head: int = 5, layouts: Callable[[int, int], Layout] = layout
    ) -> list[StateId]:
        found = restored(self._folder, own, Lighthouse(head, self.hosts), layouts=layouts)
        assert found.right
        (self.record,) = found.events("StateRestored")
        return found.states


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    for host in made.hosts:
        host.close()


LEAST = sum(tensor.nbytes for rank in range(3) for tensor in layout(3, rank).tensors)


def test_a_replica_that_lost_a_rank_goes_on_with_three_of_four(job: Job) -> None:
    """Host r0h1 is lost with rank 3; r0h0 kept a copy of that shard."""
    here = job.host(0, "r0h0", *((step, 4, rank) for step in (4, 5) for rank in range(4)))
    assert job.restore([here] * 3) == [state(5)] * 3
    row = job.record
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
    row = job.record
    assert (row["rung"], row["ranks"], row["width"], row["step"]) == ("copy", 4, 3, 6)


def test_shards_of_other_replicas_count_too(job: Job) -> None:
    """The own replica has no shard of rank 3; replica 1 has it, and replica 2 has the state on 2 ranks."""
    own = job.host(0, "r0h0", (5, 4, 0), (5, 4, 1), (5, 4, 2))
    job.host(1, "r1h0", (5, 4, 2), (5, 4, 3))
    job.host(2, "r2h0", (5, 2, 0), (5, 2, 1))
    assert job.restore([own] * 3) == [state(5)] * 3
    row = job.record
    assert (row["rung"], row["width"]) == ("replica", 4), "of the widths that are whole the largest"


def test_the_own_width_comes_first(job: Job) -> None:
    own = job.host(0, "r0h0", *((5, 4, rank) for rank in range(4)), *((5, 3, rank) for rank in range(3)))
    assert job.restore([own] * 3) == [state(5)] * 3
    assert (job.record["rung"], job.record["bytes"]) == ("agent", 0)
    assert "width" not in job.record


def test_a_newer_state_of_another_width_comes_before_an_older_one_of_the_own(job: Job) -> None:
    own = job.host(0, "r0h0", *((5, 4, rank) for rank in range(4)), *((4, 3, rank) for rank in range(3)))
    assert job.restore([own] * 3) == [state(5)] * 3


def test_shards_of_two_states_or_widths_are_never_combined(job: Job) -> None:
    own = job.host(0, "r0h0", (5, 4, 0), (5, 4, 1), (5, 4, 2), (4, 4, 3), (5, 3, 2), (4, 3, 0))
    assert job.restore([own] * 3) == [AGAINST] * 3


def test_without_a_head_its_own_hosts_are_asked(job: Job) -> None:
    """The lighthouse does not know the job: what the own hosts have in another width counts, too."""
    own = job.host(0, "r0h0", *((5, 4, rank) for rank in range(4)))
    job.host(1, "r1h0", *((6, 4, rank) for rank in range(4)))
    assert job.restore([own] * 3, head=0) == [state(5)] * 3


def test_a_state_that_is_cut_otherwise_comes_from_a_checkpoint(job: Job) -> None:
    def tensor_parallel(width: int, rank: int) -> Layout:
        place = layout(width, rank)
        return Layout((replace(place.tensors[0], cut="other"), *place.tensors[1:]), place.nbytes)

    own = job.host(0, "r0h0", *((5, 4, rank) for rank in range(4)))
    assert job.restore([own] * 3, layouts=tensor_parallel) == [AGAINST] * 3


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
    assert donors[1][0].address == "r1:1"
