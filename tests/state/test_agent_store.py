import errno
import os
import threading
from collections.abc import Iterator
from unittest import mock

import pytest

from ft_hsdp.control_groups import Allowance
from ft_hsdp.state import shared_memory
from ft_hsdp.state.agent import shard
from ft_hsdp.state.agent.shard import Owner
from ft_hsdp.state.agent.store import SnapshotStore
from ft_hsdp.state.shared_memory import ServedSnapshot
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.shard_manifest import ShardManifest
from tests.support.state.agent_helpers import LAYOUT, content, header, state

NBYTES = 10_000
RANK = 1
SHARD = (0, RANK, 2)


@pytest.fixture
def holdings() -> Iterator[SnapshotStore]:
    held = SnapshotStore()
    held.admit(Owner(RANK, 2, NBYTES))
    yield held
    held.close()
    for fd in held.slots(SHARD).values():
        os.close(fd)


def write(holdings: SnapshotStore, step: int, settled: bool | None = True) -> int | None:
    number = holdings.allocate(SHARD, state(step))
    if number is not None:
        shared_memory.attach(holdings.slots(SHARD)[number], NBYTES, writable=True)[:] = content(step, RANK, NBYTES)
        holdings.staged(SHARD, state(step), header(step, RANK, nbytes=NBYTES))
        holdings.mark_settled(SHARD, state(step), settled)
    return number


def read(served: ServedSnapshot | None) -> bytes:
    assert served is not None
    return shared_memory.attach(served.fd, served.nbytes, writable=False).tobytes()


def test_a_dead_rank_leaves_its_slots_and_a_living_one_takes_the_one_it_writes_along(holdings: SnapshotStore):
    holdings.prepare(SHARD)
    both = holdings.slots(SHARD)
    holdings.stage(SHARD, state(1))
    holdings.disconnect(SHARD, dead=True)
    assert holdings.list(SHARD) == ()
    number = holdings.stage(SHARD, state(2))
    assert number is not None
    assert holdings.slots(SHARD) == both
    holdings.disconnect(SHARD, dead=False)
    assert holdings.slots(SHARD) == {n: fd for n, fd in both.items() if n != number}


def test_a_slow_checksum_holds_no_rank_up(holdings: SnapshotStore, monkeypatch: pytest.MonkeyPatch):
    begun, go_on = threading.Event(), threading.Event()

    def slow(manifest: shard_manifest.ShardManifest, data: memoryview) -> tuple[int, ...]:
        begun.set()
        assert go_on.wait(10)
        return real(manifest, data)

    real = shard_manifest.damaged
    monkeypatch.setattr(shard_manifest, "damaged", slow)
    holdings.pin(SHARD, state(1), 600.0)
    write(holdings, 1)
    assert begun.wait(10)  # at once: nobody has asked for it
    holdings.unpin(SHARD)
    answers: list[ServedSnapshot | None] = []
    asking = threading.Thread(target=lambda: answers.append(holdings.borrow(state(1), RANK)))
    asking.start()
    for step in range(2, 6):
        assert write(holdings, step) is not None
    assert answers == []
    go_on.set()
    asking.join(10)
    assert read(answers[0]) == content(1, RANK, NBYTES).tobytes()


def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(nbytes: int) -> int:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(shared_memory, "create", none)


def test_without_memory_a_snapshot_is_left_out(holdings: SnapshotStore, monkeypatch: pytest.MonkeyPatch):
    write(holdings, 1)
    no_memory(monkeypatch)
    holdings.prepare(SHARD)
    assert write(holdings, 2) is None
    assert holdings.busy_reason(SHARD).startswith("no memory")
    assert [held.state for held in holdings.list(SHARD)] == [state(1)]


def test_no_slot_is_taken_that_the_container_has_no_memory_for(holdings: SnapshotStore):
    with mock.patch.object(shard, "allowance", return_value=Allowance(NBYTES - 1)):
        holdings.prepare(SHARD)
        assert write(holdings, 1) is None
    with mock.patch.object(shard, "allowance", return_value=Allowance(NBYTES)):
        assert write(holdings, 2) is not None


def test_without_memory_for_a_third_slot_the_states_that_count_are_kept(
    holdings: SnapshotStore, caplog: pytest.LogCaptureFixture
):
    holdings.prepare(SHARD)
    with mock.patch.object(shard, "allowance", return_value=Allowance(0)):
        for step in range(1, 12):
            assert write(holdings, step, step % 4 == 0 or None) is not None, "none is left out"
            settled = [held.state.step for held in holdings.list(SHARD) if held.settled]
            assert settled[:1] == ([step // 4 * 4] if step > 3 else [])
    assert len(holdings.slots(SHARD)) == 2
    assert len(caplog.records) == 1, "and it is said once"
    assert write(holdings, 12, None) is not None
    assert len(holdings.slots(SHARD)) == 3, "once there is memory"


def flip(holdings: SnapshotStore, number: int | None) -> None:
    assert number is not None
    shared_memory.attach(holdings.slots(SHARD)[number], NBYTES, writable=True)[NBYTES // 3] ^= 8


def test_a_damaged_copy_is_not_served_and_its_memory_is_not_used_again(holdings: SnapshotStore):
    number = write(holdings, 1)
    flip(holdings, number)
    assert holdings.borrow(state(1), RANK) is None
    assert [damaged.state for damaged in holdings.damaged(SHARD)] == [state(1)]
    assert number not in holdings.slots(SHARD)


def test_what_is_to_become_a_copy_is_compared_by_its_reader_alone(holdings: SnapshotStore):
    number = write(holdings, 1)
    flip(holdings, number)
    served = holdings.borrow(state(1), RANK, verify=False)
    assert served is not None
    (wrong,) = shard_manifest.damaged(
        shard_manifest.decode(served.manifest), shared_memory.attach(served.fd, NBYTES, writable=False).data
    )
    assert (wrong, holdings.damaged(SHARD)) == (0, ())
    holdings.give_back(served)
    assert holdings.borrow(state(1), RANK) is None, "who recovers from it has it compared"
    assert [damaged.state for damaged in holdings.damaged(SHARD)] == [state(1)]


def test_each_pin_compares_anew(holdings: SnapshotStore):
    number = write(holdings, 1)
    holdings.pin(SHARD, state(1), 600.0)
    served = holdings.borrow(state(1), RANK)
    assert served is not None
    holdings.give_back(served)
    flip(holdings, number)  # after it was compared
    holdings.pin(SHARD, state(1), 600.0)
    assert holdings.borrow(state(1), RANK) is None


def test_a_copy_without_checksums_is_of_no_use(holdings: SnapshotStore):
    holdings.grow(SHARD)
    holdings.stage(SHARD, state(1))
    bare = shard_manifest.ShardManifest(state(1), RANK, 2, "0" * 32, NBYTES, (), (1,), ())
    holdings.staged(SHARD, state(1), shard_manifest.encode(bare))
    assert holdings.acquire(SHARD, state(1)) is None
    assert "0 checksums" in holdings.damaged(SHARD)[0].reason


def test_what_is_held_is_listed_with_whose_it_is(holdings: SnapshotStore):
    for step in (1, 2):
        write(holdings, step)
    holdings.mark_settled(SHARD, state(2), everywhere=False)
    rows = holdings.held()
    assert [(row.state, row.replica, row.rank, row.ranks) for row in rows] == [
        (state(step), 0, RANK, 2) for step in (2, 1)
    ]
    assert {(row.layout, row.nbytes, row.host) for row in rows} == {(LAYOUT, NBYTES, "")}
    assert [row.settled for row in rows] == [True, True], "what was settled once stays so"
    write(holdings, 3)  # in the slot of 1
    assert [row.state.step for row in holdings.held()] == [3, 2]
    holdings.forget(SHARD)
    assert holdings.held() == ()


def wide(step: int, rank: int, ranks: int, nbytes: int) -> bytes:
    made = ShardManifest(state(step), rank, ranks, "0" * 32, nbytes, (), (step,), ())
    return shard_manifest.encode(shard_manifest.seal(made, memoryview(bytes(nbytes))))


def kept(store: SnapshotStore, rank: int, ranks: int, *steps: int, nbytes: int = 1000) -> tuple[int, int, int]:
    key = store.admit(Owner(rank, ranks, nbytes))
    store.prepare(key)
    for step in steps:
        assert store.stage(key, state(step)) is not None
        store.staged(key, state(step), wide(step, rank, ranks, nbytes))
    return key


def rows(store: SnapshotStore) -> list[tuple[int, int, int]]:
    return sorted((each.state.step, each.rank, each.ranks) for each in store.held())


def test_what_a_replica_had_in_another_width_stays_until_a_state_is_settled_in_the_new_one() -> None:
    store = SnapshotStore()
    old = [kept(store, rank, 4, 1, 2) for rank in range(4)]
    for key in old:
        store.disconnect(key, dead=True)
    key = kept(store, 0, 3, nbytes=1400)
    assert store.list(key) == ()
    assert rows(store) == [(step, rank, 4) for step in (1, 2) for rank in range(4)]
    served = store.borrow(state(2), 0, 4)
    assert served is not None
    assert served.nbytes == 1000
    assert store.borrow(state(2), 0, 3) is None
    store.stage(key, state(3))
    store.staged(key, state(3), wide(3, 0, 3, 1400))
    store.mark_settled(key, state(3), everywhere=False)
    assert len(rows(store)) == 9, "it may be all that is left"
    store.mark_settled(key, state(3), everywhere=True)
    assert rows(store) == [(3, 0, 3)]
    assert os.pread(served.fd, 3, 0) == bytes(3), "who reads, reads on"
    store.give_back(served)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(served.fd)
    store.close()


def test_a_replica_that_goes_back_to_its_width_finds_its_snapshots() -> None:
    store = SnapshotStore()
    store.disconnect(kept(store, 0, 4, 1), dead=True)
    numbers = set(store.slots((0, 0, 4)))
    store.disconnect(kept(store, 0, 3, nbytes=1400), dead=True)
    key = kept(store, 0, 4)
    assert [each.state for each in store.list(key)] == [state(1)]
    assert set(store.slots(key)) == numbers
    assert store.grow(key)
    assert max(store.slots(key)) > max(numbers), "a number is never used again"
    store.close()


def test_where_memory_is_short_the_other_width_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    store = SnapshotStore()
    store.disconnect(kept(store, 0, 4, 1), dead=True)
    no_memory(monkeypatch)
    key = kept(store, 0, 3)
    assert rows(store) == [(1, 0, 4)]
    store.mark_settled(key, state(2), everywhere=False)  # it has committed a step
    assert rows(store) == []
    store.close()


def test_what_is_wrong_is_forgotten_in_every_width() -> None:
    store = SnapshotStore()
    store.disconnect(kept(store, 0, 4, 1), dead=True)
    key = kept(store, 0, 3, 2)
    store.forget(key)
    assert rows(store) == []
    store.close()


def test_a_slot_of_a_rank_that_has_gone_can_be_written_as_a_copy(holdings: SnapshotStore):
    assert write(holdings, 1) is not None
    served = holdings.borrow(state(1), RANK)  # which maps the slot, to verify it
    assert served is not None
    holdings.give_back(served)
    holdings.disconnect(SHARD, dead=True)
    holdings.admit_copy(0, Owner(RANK, 2, NBYTES), keeper=0, budget=None)
    holdings.prepare(SHARD)
    for step in range(2, 6):
        staged = holdings.stage(SHARD, state(step), copy=True)
        assert staged is not None
        holdings.writable(SHARD, staged)[:] = content(step, RANK, NBYTES)
        holdings.staged(SHARD, state(step), header(step, RANK, nbytes=NBYTES), staged)
        holdings.mark_settled(SHARD, state(step))
        assert holdings.writable(SHARD, staged) is holdings.writable(SHARD, staged)
    assert read(holdings.borrow(state(5), RANK)) == content(5, RANK, NBYTES).tobytes()
