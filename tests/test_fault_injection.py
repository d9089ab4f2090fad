from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ft_hsdp import fault_injection
from ft_hsdp.config import FailpointConfig, parse
from ft_hsdp.fault_injection import LIGHTHOUSE, FaultOrder
from ft_hsdp.jsonl import LineWriter

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
def test_it_fires_once_at_its_step_or_the_first_time_after_it(
    sent: list[int], replica: int, rank: int, life: int
) -> None:
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


ME = 1
Enforced = Callable[..., contextlib.ExitStack]


@pytest.fixture
def force(tmp_path: Path) -> Iterator[Enforced]:
    """Puts orders into force in this process, as replica ME; a call ends what the one before began."""
    with contextlib.ExitStack() as faked:

        def put(*orders: FaultOrder) -> contextlib.ExitStack:
            faked.close()
            fault_injection.enforce(orders, tmp_path.resolve(), ME, faked)
            return faked

        yield put
        put()


@pytest.mark.parametrize(
    ("order", "hit"),
    [
        (FaultOrder("clock", replica=1), [(1, 0), (1, 1)]),
        (FaultOrder("clock", replica=1, rank=1), [(1, 1)]),
        (FaultOrder("clock", supervisor=True), [(None, None)]),
        (FaultOrder("partition", edge=(0, 1)), [(0, 0), (0, 1), (1, 0), (1, 1)]),
        (FaultOrder("partition", edge=(1, LIGHTHOUSE)), [(1, 0), (1, 1)]),
    ],
)
def test_who_is_meant(order: FaultOrder, hit: list[tuple[int | None, int | None]]) -> None:
    everybody = [(None, None), *((replica, rank) for replica in range(3) for rank in range(2))]
    assert [who for who in everybody if order.hits(*who)] == hit


def test_a_full_disk_takes_nothing_below_the_run_and_everything_elsewhere(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, force: Enforced
) -> None:
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "file"
    force(FaultOrder("disk_full", ME))
    for write in (
        lambda: os.write(log, b"x"),
        lambda: (tmp_path / "new").write_text("x"),
        lambda: os.open(tmp_path / "made", os.O_WRONLY | os.O_CREAT),
    ):
        with pytest.raises(OSError, match="No space left on device") as caught:
            write()
        assert caught.value.errno == errno.ENOSPC
    elsewhere.write_text("x")
    assert os.read(os.open(tmp_path / "log", os.O_RDONLY | os.O_CREAT), 9) == b""
    force()
    assert os.write(log, b"x") == 1
    os.close(log)


def test_a_full_disk_takes_what_fits_into_the_last_block(tmp_path: Path, force: Enforced) -> None:
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(log, b"x" * 100)
    os.fsync(log)
    room = os.fstat(log).st_blocks * 512 - 100
    force(FaultOrder("disk_full", ME))
    assert os.write(log, b"y" * (room - 10)) == room - 10
    assert os.write(log, b"y" * 100) == 10, "a line is torn"
    with pytest.raises(OSError, match="No space left"):
        os.write(log, b"y")
    over = os.open(tmp_path / "log", os.O_WRONLY)
    assert os.write(over, b"z" * 100) == 100, "it needs no new block"
    os.close(over)
    os.close(log)


def test_a_full_disk_takes_no_output_either(tmp_path: Path) -> None:
    code = (
        "import contextlib, sys; from pathlib import Path; run = Path(sys.argv[1])\n"
        "from ft_hsdp.fault_injection import FaultOrder, enforce\n"
        "print('before', flush=True)\n"
        "with contextlib.ExitStack() as faked:\n"
        "    enforce([FaultOrder('disk_full', 0)], run, 0, faked)\n"
        "    try:\n        print('lost', flush=True)\n    except OSError as error:\n        said = error.errno\n"
        "print(said, flush=True)\n"
    )
    with (tmp_path / "rank.log").open("w") as log:
        subprocess.run([sys.executable, "-c", code, str(tmp_path.resolve())], stdout=log, check=True, timeout=60)
    assert (tmp_path / "rank.log").read_text().split() == ["before", str(errno.ENOSPC)]


def test_a_slow_disk_takes_its_time(tmp_path: Path, force: Enforced, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    lines = LineWriter(tmp_path / "log.jsonl")
    force(FaultOrder("slow_disk", ME, seconds=0.3))
    monkeypatch.setattr(time, "sleep", slept.append)
    lines.write({"n": 1})
    lines.close()
    assert slept == [0.3]


def test_the_wall_clock_jumps_alone(force: Enforced) -> None:
    right, monotonic = time.time(), time.monotonic()
    force(FaultOrder("clock", ME, seconds=-3600.0))
    assert time.time() < right - 3000
    assert time.time_ns() < (right - 3000) * 1e9
    assert time.monotonic() >= monotonic
    force()
    assert time.time() >= right


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


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_an_order_resets_the_connections_to_the_neighbours_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
