import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ft_hsdp import fault_injection
from ft_hsdp.config import FailpointConfig, parse
from ft_hsdp.fault_injection import LIGHTHOUSE, FaultOrder
from tests.support.os_faults import ME, Enforced, enforcing
from tests.support.waiting import until

POINTS = parse({}, ["--debug.failpoints={vote: {replicas: [0, 2], rank: 1, life: 1, step: 5, signal: STOP}}"])


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    numbers: list[int] = []

    def kill(thread: int, number: int) -> None:
        assert thread == threading.get_ident()
        numbers.append(number)

    monkeypatch.setattr(signal, "pthread_kill", kill)
    yield numbers
    fault_injection.arm({}, 0, 0, 0)


@pytest.mark.parametrize(("replica", "rank", "life"), [(0, 1, 1), (2, 1, 1)])
def test_it_fires_once_at_its_step_or_the_first_time_after_it(sent, replica, rank, life) -> None:
    fault_injection.arm(POINTS.debug.failpoints, replica, rank, life)
    fault_injection.reach("vote", 4)
    fault_injection.reach("apply-end", 9)
    assert sent == []
    fault_injection.reach("vote", 7)
    assert sent == [signal.SIGSTOP]
    fault_injection.reach("vote", 8)
    assert sent == [signal.SIGSTOP]


@pytest.mark.parametrize(("replica", "rank", "life"), [(1, 1, 1), (0, 0, 1), (0, 1, 0), (0, 1, 2)])
def test_others_are_left_alone(sent: list[int], replica: int, rank: int, life: int) -> None:
    fault_injection.arm(POINTS.debug.failpoints, replica, rank, life)
    fault_injection.reach("vote", 5)
    assert sent == []


def test_a_place_can_only_say_that_it_is_hit(sent: list[int]) -> None:
    fault_injection.arm({"record-lost": FailpointConfig(replicas=(0,), step=5)}, 0, 0, 0)
    assert not fault_injection.hit("record-lost", 4)
    assert fault_injection.hit("record-lost", 5)
    assert not fault_injection.hit("record-lost", 5)
    assert sent == []


@pytest.fixture
def force(tmp_path: Path) -> Iterator[Enforced]:
    with enforcing(tmp_path) as put:
        yield put


@pytest.mark.parametrize(
    ("order", "hit"),
    [
        (FaultOrder("reset", replica=1), [(1, 0), (1, 1)]),
        (FaultOrder("reset", replica=1, rank=1), [(1, 1)]),
        (FaultOrder("partition", edge=(0, 1)), [(0, 0), (0, 1), (1, 0), (1, 1)]),
        (FaultOrder("partition", edge=(1, LIGHTHOUSE)), [(1, 0), (1, 1)]),
    ],
)
def test_who_is_meant(order: FaultOrder, hit: list[tuple[int, int]]) -> None:
    everybody = [(replica, rank) for replica in range(3) for rank in range(2)]
    assert [who for who in everybody if order.hits(*who)] == hit


async def test_nothing_passes_to_the_other_end_of_an_edge(force: Enforced) -> None:
    force(FaultOrder("partition", edge=(ME, 2)), FaultOrder("partition", edge=(0, ME), reject=True))
    assert [peer for peer in (0, 1, 2, LIGHTHOUSE, None) if fault_injection.cut(peer)] == [0, 2]
    await fault_injection.passes(LIGHTHOUSE)
    with pytest.raises(TimeoutError):
        await fault_injection.passes(2, 0.0)
    with pytest.raises(ConnectionRefusedError):
        await fault_injection.passes(0)
    with pytest.raises(ConnectionRefusedError):
        fault_injection.hold(0, lambda: False)
    fault_injection.hold(2, lambda: True)  # whoever gives up does not wait


async def test_what_was_held_back_passes_when_the_partition_ends(force: Enforced) -> None:
    force(FaultOrder("partition", edge=(ME, 2)))
    waiting = asyncio.create_task(fault_injection.passes(2))
    await asyncio.sleep(0)
    assert not waiting.done()
    force()
    await waiting


def test_a_process_obeys_while_the_order_is_there(tmp_path: Path) -> None:
    folder = tmp_path / fault_injection.FOLDER
    fault_injection.watch(tmp_path, 7, 0)
    until(folder.is_dir)
    (folder / "broken.json").write_text("{")
    (folder / "other.json").write_text('{"kind": "partition", "edge": [5, 6]}')
    (folder / "over.json").write_text('{"kind": "partition", "edge": [7, 9], "until": 0.0}')
    (folder / "mine.json").write_text('{"kind": "partition", "edge": [7, 8]}')
    until(lambda: fault_injection.cut(8))
    assert not fault_injection.cut(6)
    assert not fault_injection.cut(9)
    (folder / "mine.json").unlink()
    until(lambda: not fault_injection.cut(8))


def test_an_order_resets_the_connections_to_the_neighbours_once(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(fault_injection, "_watched", {tmp_path})
    order = FaultOrder("reset", 0, until=5.0)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def connected() -> tuple[socket.socket, socket.socket]:
            one = socket.create_connection(server.getsockname())
            fault_injection.in_ring(one)
            return one, server.accept()[0]

        (one, other), stranger = connected(), socket.create_connection(server.getsockname())
        with one, other, stranger, server.accept()[0] as known, contextlib.ExitStack() as faked:
            fault_injection.enforce([order], tmp_path, 0, faked)
            for end in (one, other):
                with pytest.raises(ConnectionResetError):
                    end.recv(1)
            known.sendall(b"x")
            assert stranger.recv(1) == b"x", "no connection of the ring"
        one, other = connected()
        with one, other, contextlib.ExitStack() as faked:
            fault_injection.enforce([order, FaultOrder("partition", edge=(0, 1))], tmp_path, 0, faked)
            other.sendall(b"x")
            assert one.recv(1) == b"x", "the order was carried out before"
            fault_injection.enforce([], tmp_path, 0, faked)
