import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import pytest
import torch

from ft_hsdp import protocol
from ft_hsdp.core.commit import AttemptId, CommitToken
from ft_hsdp.errors import PeerDead, PeerTimeout, ProtocolViolation, RemoteAbort
from ft_hsdp.ftar import Communicator, Settings
from ft_hsdp.ftar.connections import Peer
from ft_hsdp.ftar.heartbeat import HostLoadReader, HostSentinel, is_stopped
from ft_hsdp.ftar.transport.sender import StreamSender
from ft_hsdp.protocol import RingBeat
from tests.support.forked import Forked
from tests.support.ftar.ring_helpers import TOKEN, Replica, Ring, Transport, error, lane_of
from tests.support.waiting import async_until, until

MINUTE_S = 60.0


def mute(peer: Replica) -> None:
    """It says nothing more on its control connections, and its process is there."""
    beats = lane_of(peer.group).heartbeat
    assert beats is not None
    beats.stop()


@pytest.mark.parametrize("victim", [0, 1])
async def test_who_falls_silent_is_suspected_by_all(victim: int) -> None:
    async with Ring(0, 1, 2, timeout_s=MINUTE_S) as ring:
        await ring.form(1)
        others = [p for p in ring.peers if p.replica != victim]
        works = [p.reduce(1, torch.empty(9)) for p in others]
        mute(ring.peers[victim])
        for work in works:
            failed = await error(work)
            assert isinstance(failed, PeerDead | RemoteAbort)
            assert failed.suspect == victim
            assert "no sign of life" in str(failed)
        for peer in others:
            (abort,) = peer.broken
            assert (abort.suspect, abort.planned, abort.stuck) == (victim, False, False)
        await async_until(lambda: ring.peers[victim].broken, "the silent one hears of it")
        await ring.form(2, others)
        await ring.check(2, others)


async def test_who_stood_still_itself_suspects_nobody() -> None:
    """The whole loop stands still, so no member sends: when it runs again, no member is accused of that.

    The patience for a loaded host is off: it would be enough for short stops.
    """

    with mock.patch.object(HostSentinel, "stall_s", return_value=0.0):
        async with Ring(0, 1, 2) as ring:
            await ring.form(1)
            await ring.check(1)
            for _ in range(3):
                stand_still(1.0)  # longer than any silence that is accepted
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.5)
            assert not any(p.broken for p in ring.peers)
            await ring.check(1)


async def test_after_standing_still_a_silence_is_found_again_in_a_ring_without_work() -> None:
    async with Ring(0, 1) as ring:
        await ring.form(1)
        stand_still(1.0)
        await asyncio.sleep(0.2)
        mute(ring.peers[1])
        await async_until(lambda: ring.peers[0].broken, "it is suspected")
        assert ring.peers[0].broken[0].suspect == 1


@pytest.mark.parametrize(("victim", "transport"), [(0, "tcp"), (1, "auto"), (2, "c10d")])
async def test_only_who_does_not_enter_is_blamed(victim: int, transport: Transport) -> None:
    """Its beats come. The member that has waited longest has a neighbour that waits itself, and blames nobody."""
    async with Ring(0, 1, 2, timeout_s=0.5, transport=transport) as ring:
        await ring.form(1)
        await ring.check(1)
        right, far = (ring.peers[(victim + side) % 3] for side in (1, 2))
        works = [far.reduce(1, torch.empty(9), 2)]
        await asyncio.sleep(0.25)
        works.append(right.reduce(1, torch.empty(9), 2))
        failures = [await error(work) for work in works]
        assert [f.suspect for f in failures if isinstance(f, PeerTimeout | RemoteAbort)] == [victim] * 2
        assert isinstance(failures[1], PeerTimeout), "its right neighbour says so"
        await async_until(lambda: ring.peers[victim].broken, "it is told")
        for peer in ring.peers:
            (abort,) = peer.broken
            assert (abort.suspect, abort.stuck) == (victim, True)


@pytest.mark.parametrize("transport", ["auto", "c10d"])
async def test_who_has_announced_a_pause_is_waited_for_by_all_and_then_counts_as_ever(transport) -> None:
    async with Ring(0, 1, 2, timeout_s=0.3, transport=transport) as ring:
        await ring.form(1)
        await ring.check(1)
        ring.peers[1].pause_until = time.monotonic() + 5
        outs = [torch.empty(9) for _ in ring.peers]
        works = [ring.peers[at].reduce(1, outs[at], 2) for at in (0, 2)]
        await asyncio.sleep(1.2)  # four times what a hang may last, twice what a data connection waits without it
        assert not any(work.done() for work in works)
        works.append(ring.peers[1].reduce(1, outs[1], 2))
        for work in works:
            assert await error(work) is None
        ring.peers[1].pause_until = time.monotonic() + 0.6
        failed = await error(ring.peers[2].reduce(1, torch.empty(9), 3))
        assert isinstance(failed, PeerTimeout)
        assert failed.suspect == 1
        assert time.monotonic() > ring.peers[1].pause_until, "from the end of the pause on it is a hang"


async def test_who_dies_in_a_pause_is_found_as_ever() -> None:
    async with Ring(0, 1, 2, timeout_s=MINUTE_S) as ring:
        await ring.form(1)
        ring.peers[1].pause_until = time.monotonic() + MINUTE_S
        work = ring.peers[2].reduce(1, torch.empty(9))
        await asyncio.sleep(0.2)  # its beats say that it pauses
        mute(ring.peers[1])
        failed = await error(work)
        assert isinstance(failed, PeerDead | RemoteAbort)
        assert "no sign of life" in str(failed)


async def test_a_slow_member_that_enters_in_time_is_not_blamed() -> None:
    async with Ring(0, 1, timeout_s=0.5) as ring:
        await ring.form(1)
        for step in range(1, 4):
            works = [ring.peers[0].reduce(1, torch.empty(9), step)]
            await asyncio.sleep(0.3)
            works.append(ring.peers[1].reduce(1, torch.empty(9), step))
            await asyncio.gather(*map(asyncio.wrap_future, works))
        await asyncio.sleep(0.7)  # nobody waits for anybody
        assert not any(p.broken for p in ring.peers)


async def test_chunks_that_do_not_arrive_are_the_left_neighbours() -> None:
    async with Ring(0, 1, 2, timeout_s=0.5) as ring:
        await ring.form(1)
        right = ring.peers[0].rendezvous.right
        assert right is not None
        sender = right.sender
        assert isinstance(sender, StreamSender)

        def lose(*_: object) -> None:
            sender.frames += 1

        with mock.patch.object(sender, "send", lose):
            failures = [await error(w) for w in [p.reduce(1, torch.empty(9)) for p in ring.peers]]
        assert [getattr(f, "suspect", None) for f in failures] == [0, 0, 0]
        assert isinstance(failures[1], PeerDead)
        assert not any(p.broken[0].stuck for p in ring.peers), "its trainer is not to blame"


async def test_beats_do_not_outlive_their_ring() -> None:
    async with Ring(0, 1) as ring:
        for epoch in (1, 2, 3):
            await ring.form(epoch)
        left = ring.peers[0].rendezvous.left
        assert left is not None
        await async_until(lambda: left.newest.epoch == 3, "beats of the new epoch")
        for peer in ring.peers:
            peer.group.stop(3, "for a test")
        with mock.patch.object(Peer, "send_heartbeat") as sent:
            await asyncio.sleep(0.5)  # several beats
        sent.assert_not_called()


def stand_still(seconds: float) -> None:
    """Nothing runs on the loop meanwhile."""
    time.sleep(seconds)


def pair() -> tuple[socket.socket, socket.socket]:
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    return ends


async def test_an_empty_message_is_no_heartbeat() -> None:
    ours, theirs = pair()
    said: list[object] = []
    peer = Peer(ours, lambda _, message: said.append(message))
    peer.listen()
    theirs.send(protocol.LENGTH.pack(0))
    await async_until(lambda: peer.gone, "the end")
    assert isinstance(said[0], ProtocolViolation)
    theirs.close()
    await peer.close()


async def test_any_bytes_are_a_sign_of_life() -> None:
    """A long message comes in pieces; while it does, its sender lives."""
    ours, theirs = pair()
    said: list[object] = []
    peer = Peer(ours, lambda _, message: said.append(message))
    peer.listen()
    token = CommitToken(AttemptId(1, 1, 0), True, True, "x" * 200)
    frame = protocol.frame(token)
    for piece in (frame[:2], frame[2:4], frame[4:50], frame[50:-1]):
        before = peer.heard_at
        await asyncio.sleep(0.01)
        theirs.send(piece)
        await async_until(lambda before=before: peer.heard_at > before, "it is heard")  # type: ignore[misc]
    assert not said
    theirs.send(frame[-1:])
    await async_until(lambda: said, "the message")
    theirs.send(protocol.frame(RingBeat(7, 3, 9)))
    await async_until(lambda: peer.newest == RingBeat(7, 3, 9), "a beat")
    assert said == [token], "a beat is for nobody else"
    theirs.send(frame + 2 * protocol.frame(RingBeat(7, 3, 9)) + frame + protocol.frame(RingBeat(7, 4, 9)))
    await async_until(lambda: peer.newest == RingBeat(7, 4, 9), "all that has come at once")
    assert said == [token] * 3
    theirs.send(protocol.LENGTH.pack(2**31))
    await async_until(lambda: peer.gone, "a message that is too large ends it")
    assert isinstance(said[3], ProtocolViolation)
    theirs.close()
    await peer.close()


async def test_no_beat_comes_between_the_parts_of_a_message() -> None:
    ours, theirs = pair()
    peer = Peer(ours, lambda *_: None)
    long = CommitToken(AttemptId(1, 1, 0), True, True, "x" * 900_000)
    sending = asyncio.get_running_loop().create_task(peer.send(long))
    await asyncio.sleep(0)
    frame, got = protocol.frame(RingBeat(1, 1, 1)), bytearray()
    while len(got) < len(protocol.frame(long)):
        peer.send_heartbeat(frame)
        await asyncio.sleep(0)
        try:
            got += theirs.recv(65536)
        except BlockingIOError:
            continue
    await sending
    assert bytes(got) == protocol.frame(long)
    peer.send_heartbeat(frame)
    await async_until(lambda: theirs.recv(100) == frame, "a beat")
    theirs.close()
    await peer.close()


def test_a_beat_that_is_cut_in_two_ends_the_connection() -> None:
    sock = mock.Mock(spec=socket.socket)
    sock.send.return_value = 5
    sock.family = socket.AF_UNIX
    Peer(sock, lambda *_: None).send_heartbeat(b"0123456789")
    sock.shutdown.assert_called_once_with(socket.SHUT_RDWR)


async def test_an_overloaded_neighbour_has_the_time_that_it_asked_for() -> None:
    """Its last beat said that its host may keep it silent for 3 s; this host asks for nothing."""
    with mock.patch.object(HostSentinel, "stall_s", return_value=0.0):
        async with Ring(0, 1, timeout_s=MINUTE_S) as ring:
            await ring.form(1)
            edges = ring.peers[0].rendezvous.edges
            await async_until(lambda: all(n.newest.epoch == 1 for n in edges), "both have said something")
            mute(ring.peers[1])
            await asyncio.sleep(0.05)  # until what it has said is read
            silent_from = time.monotonic()
            for peer in edges:
                peer.newest = replace(peer.newest, stall_ms=3000, pid=0)
            await async_until(lambda: ring.peers[0].broken, "it is suspected")
            assert time.monotonic() - silent_from > 3.0
            assert ring.peers[0].broken[0].suspect == 1


def neighbour(pipe: Connection) -> None:
    """A member in a process of its own that sums once, and stays."""
    comm = Communicator(12, token=TOKEN, settings=Settings(transport="tcp", timeout_s=MINUTE_S))
    pipe.send(comm.address)
    comm.reconfigure(1, pipe.recv())
    pipe.send(comm.all_reduce(torch.full((9,), 13.0)).wait(20)[0].item())
    pipe.recv()


def test_no_load_explains_a_stopped_process() -> None:
    """This host claims an overload that would explain a silence of a minute."""
    victim = Forked(neighbour)
    with ExitStack() as stack:
        stack.callback(victim.close)
        stack.enter_context(mock.patch.object(HostSentinel, "stall_s", return_value=MINUTE_S))
        usual = Peer.send_heartbeat
        beats = stack.enter_context(
            mock.patch.object(Peer, "send_heartbeat", autospec=True, side_effect=usual)  # to see the peers
        )
        comm = Communicator(10, token=TOKEN, settings=Settings(transport="tcp", timeout_s=MINUTE_S))
        stack.callback(comm.close)
        members = [(10, comm.address), (12, victim.hear())]
        victim.pipe.send(members)
        comm.reconfigure(1, members)
        assert comm.all_reduce(torch.ones(9)).wait(20)[0].item() == 14.0
        assert victim.hear() == 14.0
        until(
            lambda: any(call.args[0].newest.pid == victim.pid for call in beats.call_args_list),
            "it says who it is",
        )
        os.kill(victim.pid, signal.SIGSTOP)
        failed = comm.all_reduce(torch.ones(9)).exception(20)
        assert isinstance(failed, PeerDead), failed
        assert failed.suspect == 12


QUIET = "some avg10=0.00 avg60=0.00 avg300=0.00 total={}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"


def write(proc: Path, waited_us: int, stolen: int, runnable: int) -> None:
    (proc / "pressure").mkdir(exist_ok=True)
    (proc / "pressure/cpu").write_text(QUIET.format(waited_us))
    (proc / "stat").write_text(f"cpu  100 0 100 {800 - stolen} 0 0 0 {stolen} 0 0\ncpu0 1 2 3\n")
    (proc / "loadavg").write_text(f"9.11 6.86 3.34 {runnable}/162 22888\n")


def test_what_a_reading_says_is_of_the_time_since_the_last_one(tmp_path: Path) -> None:
    reader = HostLoadReader(tmp_path, cores=2)
    write(tmp_path, 5_000_000, 0, 9)
    first = reader.read(10.0)
    assert (first.pressure, first.stolen, first.runnable) == (0.0, 0.0, 4.5)
    (tmp_path / "pressure/cpu").write_text(QUIET.format(5_250_000))
    (tmp_path / "stat").write_text("cpu  150 0 100 825 0 0 0 25 0 0\n")
    second = reader.read(10.5)
    assert second.pressure == pytest.approx(0.5)
    assert second.stolen == pytest.approx(0.25)


@pytest.mark.parametrize(
    "text", ["", "some", "some total=\n", "some total=x", "full total=5\n", "\x00\xff", "cpu  1 2"]
)
def test_a_file_that_is_missing_or_strange_counts_as_a_quiet_host(tmp_path: Path, text: str) -> None:
    (tmp_path / "pressure").mkdir()
    for name in ("pressure/cpu", "stat", "loadavg"):
        (tmp_path / name).write_text(text)
    reader = HostLoadReader(tmp_path, cores=2)
    for now in (1.0, 1.0, 2.0):
        assert reader.read(now).stall_s == 0.0
    assert HostLoadReader(tmp_path / "none", cores=2).read(3.0).stall_s == 0.0


def test_this_host_can_be_read() -> None:
    reader = HostLoadReader()
    reader.read(1.0)
    assert 0.0 <= reader.read(2.0).pressure <= 1.0


def test_a_stopped_process_is_told_from_one_that_runs() -> None:
    named = "open('/proc/self/comm', 'wb').write(b'a) \\xd0'); print(flush=True); input()"  # a letter that is cut
    child = subprocess.Popen([sys.executable, "-c", named], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout.readline() == b"\n"
        assert not is_stopped(child.pid)
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert is_stopped(child.pid)
    finally:
        child.kill()
        child.communicate()
    assert not is_stopped(child.pid), "nothing can be said of a process that is gone"
