"""What is particular to edges over stream sockets, and to references to memory of the same host."""

import contextlib
import fcntl
import gc
import os
import resource
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ft_hsdp.errors import (
    FTARError,
    InvalidArgument,
    LocalResourceError,
    LocalSystemError,
    PeerDead,
    ProtocolViolation,
)
from ft_hsdp.ftar.allreduce import AllReduceOrder
from ft_hsdp.ftar.frame import Frame
from ft_hsdp.ftar.settings import Settings
from ft_hsdp.ftar.transport import shm
from ft_hsdp.ftar.transport.arena import SEALS, SEGMENT, Arena
from ft_hsdp.ftar.transport.base import EncodedPayload, InlineCodec, Transfer, blocking
from ft_hsdp.ftar.transport.receiver import ReceiveLane, StreamReceiver
from ft_hsdp.ftar.transport.sender import StreamSender
from ft_hsdp.ftar.transport.shm import ReferenceDecoder, ReferenceEncoder
from tests.support.descriptors import raised
from tests.support.ftar.ring_rig import FLAVOURS, Shape, framing, rig
from tests.support.ftar.ring_values import KEY, entry, same


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    a, b = socket.socketpair()
    yield blocking(a, 1.0), blocking(b, 1.0)
    a.close()
    b.close()


def test_a_receiver_looks_at_descriptors_above_1023(pair: tuple[socket.socket, socket.socket]) -> None:
    """select would raise ValueError: a trainer with many open files died at its first all-reduce."""
    with raised(pair[0]) as high:
        lane = ReceiveLane(high, 0, 8, 1, InlineCodec())
        assert not lane.ready()
        pair[1].send(b"x")
        assert lane.ready()


def sender(sock: socket.socket, slots: int = 8, codec: InlineCodec | None = None) -> StreamSender:
    return StreamSender([sock], slots, 3, codec or InlineCodec(), "tx-test")


@pytest.mark.timeout(30)
def test_the_engine_never_waits_for_the_kernel(pair: tuple[socket.socket, socket.socket]) -> None:
    """Small frames leave on its own thread; if all members waited there, nobody would receive."""
    mine, theirs = blocking(pair[0], 0), pair[1]  # no deadline helps
    mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    payload = torch.arange(60_000, dtype=torch.int32)[:16_000]
    end = sender(mine)
    end.begin(lambda error: pytest.fail(str(error)))
    for k in range(8):
        end.send(bytes([k]) * 10, payload, small=True)
    with ThreadPoolExecutor(1) as pool:
        flushed = pool.submit(end.flush)
        for k in range(8):
            assert theirs.recv(10, socket.MSG_WAITALL) == bytes([k]) * 10
            assert theirs.recv(64_000, socket.MSG_WAITALL) == payload.numpy().tobytes()
        assert not flushed.done(), "the neighbour is not done with it"
        theirs.send(bytes([8]))
        assert flushed.result(20) == 8 * 64_010
    end.close()
    end.dispose()


def test_large_payloads_inline_on_a_local_socket() -> None:
    """Each chunk is larger than what the kernel takes, and all members send first."""
    flavour = next(f for f in FLAVOURS if f.name == "shm-inline")
    n = 3 * 2 * 131_072
    with rig(flavour, 3, Shape(512 * 1024, 2)) as ring:
        outs = [torch.empty(n) for _ in range(3)]
        works = [
            ring.submit(i, AllReduceOrder(KEY, torch.ones(n), out, entry(5 + i))) for i, out in enumerate(outs)
        ]
        ring.wait(works)
        assert all(same(out, torch.full((n,), 3.0)) for out in outs)


def test_what_fails_in_the_sending_thread_is_heard(pair: tuple[socket.socket, socket.socket]) -> None:
    class Broken(InlineCodec):
        def pack(self, payload: Tensor | None) -> EncodedPayload:
            raise RuntimeError("a bug")

    heard: list[FTARError] = []
    end = sender(pair[0], codec=Broken())
    end.begin(heard.append)
    end.send(b"head", torch.ones(3), small=False)
    with pytest.raises(LocalSystemError, match="a bug"):
        end.flush()
    assert [type(e) for e in heard] == [LocalSystemError]
    end.close()
    end.dispose()


def test_closing_a_sender_ends_a_flush(pair: tuple[socket.socket, socket.socket]) -> None:
    end = sender(blocking(pair[0], 60), slots=1)
    end.begin(lambda error: None)
    for _ in range(3):
        end.send(b"h", None, small=False)
    with ThreadPoolExecutor(1) as pool:
        flushed = pool.submit(end.flush)
        end.close()
        assert isinstance(flushed.exception(20), PeerDead)
    end.dispose()
    end.dispose()


def test_each_connection_has_a_chunk_on_its_way() -> None:
    with pytest.raises(InvalidArgument, match="connections: got 3; allowed: at most chunks"):
        Settings(chunks=2, connections=3)


class Memory:
    """The two ends of one edge, without an edge."""

    def __init__(self) -> None:
        self.arena = Arena()
        self.ours = ReferenceEncoder(self.arena, direct=True)
        self.theirs = ReferenceDecoder(os.getpid())
        self.frame = framing_of_four()

    def carry(self, payload: Tensor) -> Tensor:
        parcel = self.ours.pack(payload)
        sending, receiving = socket.socketpair()

        def read(view: memoryview) -> None:
            assert not len(view) or self.theirs.receive(receiving, view) == len(view)

        with sending, receiving:
            receiving.settimeout(10)
            socket.send_fds(sending, [b"head", *parcel.buffers], list(parcel.descriptors))
            read(memoryview(bytearray(4)))
            return self.theirs.unpack(parcel.label, read, self.frame, Place())


def mapped() -> int:
    """How many segments this process has mapped."""
    return sum("memfd:ftar" in line for line in Path("/proc/self/maps").read_text().splitlines())


class Place:
    """Where a chunk of four numbers lands."""

    dtype = torch.float32

    def buffer_for(self, frame: Frame) -> Tensor:
        return torch.full((4,), -1.0)


def framing_of_four() -> Frame:
    with rig(FLAVOURS[-1], 2) as ring:
        how = framing(ring, 1, 8)
        return framing(ring, 0, 8).check(how.header(how.operations[0], 0, False))


def test_segments_that_the_sender_has_let_go_of_are_let_go_of_here() -> None:
    memory = Memory()
    keep, before = memory.arena.empty(4).fill_(7), mapped()
    for k in range(6):
        large = memory.arena.empty(SEGMENT // 4)
        large[:4] = float(k)
        assert same(memory.carry(large[:4]), torch.full((4,), float(k)))
        assert same(memory.carry(large[:4]), torch.full((4,), float(k)))
        assert same(memory.carry(keep), torch.full((4,), 7.0))
        assert mapped() <= before + 4  # the large one and the small one at the reader, and the last ones
        del large
    memory.theirs.close()


def referred(
    pair: tuple[socket.socket, socket.socket],
    label: bytes,
    descriptors: list[int],
    within: contextlib.AbstractContextManager[object] | None = None,
) -> tuple[type[BaseException], str]:
    """What a receiver makes of a frame with this label."""
    ours, theirs = pair
    receiver = StreamReceiver([theirs], 4, 6, ReferenceDecoder(os.getpid()), "rx-test")
    with rig(FLAVOURS[-1], 2) as ring:
        how, mine = framing(ring, 1, 8), framing(ring, 0, 8)
        head = label + how.header(how.operations[1], 0, False) + bytes(4)
        socket.send_fds(ours, [head], descriptors)
        receiver.begin(Transfer(mine, Place(), 2, True))
        with pytest.raises(FTARError) as failed, within or contextlib.nullcontext():
            receiver.next(block=True)
    receiver.close()
    receiver.dispose()
    return failed.type, str(failed.value)


@pytest.mark.parametrize("sealed", [False, True])
def test_a_segment_that_is_not_sealed_is_refused(pair: tuple[socket.socket, socket.socket], sealed: bool) -> None:
    """So is one that is too small; its descriptor is closed, once."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    fd = os.memfd_create("ftar-test", os.MFD_ALLOW_SEALING)
    if sealed:
        os.ftruncate(fd, 8)

        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    kind, text = referred(pair, shm.REFERENCE.pack(shm.GIVEN, 1, 0), [fd])
    assert kind is ProtocolViolation
    assert ("segment 1" if sealed else "not sealed") in text
    os.close(fd)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before - 1, "the receiver's socket, and nothing else, is closed"


@pytest.mark.parametrize("way", [shm.MAPPED, shm.GIVEN, shm.NOTHING, 77])
def test_a_reference_to_nothing_is_refused(pair: tuple[socket.socket, socket.socket], way: int) -> None:
    kind, _ = referred(pair, shm.REFERENCE.pack(way, 9, 0), [])
    assert kind is ProtocolViolation


def test_a_reference_to_memory_that_is_not_there(pair: tuple[socket.socket, socket.socket]) -> None:
    kind, text = referred(pair, shm.REFERENCE.pack(shm.REMOTE, 0, 8), [])
    assert kind is PeerDead
    assert "left neighbour" in text


@contextlib.contextmanager
def no_descriptor() -> Iterator[None]:
    """The next descriptor of this process would be one too many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_no_descriptor_left_for_a_segment(pair: tuple[socket.socket, socket.socket]) -> None:
    """That is this machine's fault, not the neighbour's."""
    fd = os.memfd_create("ftar-test", os.MFD_ALLOW_SEALING)
    kind, _ = referred(pair, shm.REFERENCE.pack(shm.GIVEN, 1, 0), [fd], no_descriptor())
    os.close(fd)
    assert kind is LocalResourceError
