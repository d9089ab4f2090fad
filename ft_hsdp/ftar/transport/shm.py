"""The shared-memory transport, for neighbours on one host.

Headers travel over a Unix socket, payloads stay in place. The right neighbour reads the sender's own memory:
registered tensors through its own mapping of their segment, other tensors with process_vm_readv where the kernel
allows it. By answering on the socket it proves that what it has read was whole; the sender shuts the socket down
before it reuses any memory. Where neither way is open, the bytes go over the socket.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import ctypes
import hashlib
import os
import socket
import struct
from pathlib import Path

import torch
from torch import Tensor

from ft_hsdp import handshake
from ft_hsdp.errors import LocalResourceError
from ft_hsdp.ftar import connections
from ft_hsdp.ftar.connections import Call, Listener
from ft_hsdp.ftar.frame import Frame
from ft_hsdp.ftar.transport.arena import Arena, MappedSegments
from ft_hsdp.ftar.transport.base import BufferProvider, EncodedPayload, InlineCodec, Read, blocking, bytes_of
from ft_hsdp.ftar.transport.kind import Edge
from ft_hsdp.ftar.transport.receiver import StreamReceiver
from ft_hsdp.ftar.transport.sender import StreamSender
from ft_hsdp.handshake import Purpose
from ft_hsdp.protocol import RingData, RingReady

# A label: the way to a payload, the number of its segment, and its offset or address there.
REFERENCE = struct.Struct("!BIQ")
NOTHING, MAPPED, GIVEN, REMOTE, INLINE = range(5)
_NUMBER = struct.Struct("!I")
_CREDENTIALS = struct.Struct("iII")
_MOST_RIGHTS = 16
_libc = ctypes.CDLL(None, use_errno=True)


class _Range(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


def host_id() -> str:
    """Return an id that two processes share if they can meet on an abstract Unix socket.

    That takes the same kernel and the same network namespace.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    space = Path("/proc/self/ns/net").stat().st_ino
    return hashlib.sha256(f"{boot}:{space}".encode()).hexdigest()[:16]


def read_remote(pid: int, address: int, view: memoryview) -> None:
    """Copy `len(view)` bytes at `address` of process `pid` into `view`.

    Raises:
        OSError: the process is gone, or the kernel does not allow it.
    """
    target = ctypes.addressof(ctypes.c_char.from_buffer(view))
    done = 0
    while done < len(view):
        mine, theirs = _Range(target + done, len(view) - done), _Range(address + done, len(view) - done)
        n = _libc.process_vm_readv(pid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
        if n <= 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        done += n


class ReferenceEncoder(InlineCodec):
    """The sender's codec: tells the receiver where a payload is, and passes each segment's descriptor once.

    Args:
        arena: this process's registered memory.
        direct: whether the receiver may read this process's memory with process_vm_readv.
    """

    label = REFERENCE.size
    by_reference = True

    def __init__(self, arena: Arena, direct: bool) -> None:
        self._arena = arena
        self._direct = direct
        self._given: set[int] = set()

    def pack(self, payload: Tensor | None) -> EncodedPayload:
        """Return a reference to the payload.

        The descriptor of its segment goes with it if the receiver does not have it yet.
        """
        if payload is None or not payload.numel():
            return EncodedPayload(REFERENCE.pack(NOTHING, 0, 0))
        found = self._arena.find(payload)
        if found is not None:
            segment, offset = found
            if segment.number in self._given:
                return EncodedPayload(REFERENCE.pack(MAPPED, segment.number, offset))
            reference = REFERENCE.pack(GIVEN, segment.number, offset)
            return EncodedPayload(reference, (self._segment_changes(segment.number),), (segment.fd,))
        if self._direct:
            return EncodedPayload(REFERENCE.pack(REMOTE, 0, payload.data_ptr()))
        return EncodedPayload(REFERENCE.pack(INLINE, 0, 0), (bytes_of(payload),))

    def _segment_changes(self, number: int) -> bytes:
        """Return which segment is new, and which ones are gone, so that the receiver unmaps them."""
        gone = self._given - self._arena.numbers
        self._given = (self._given - gone) | {number}
        return struct.pack(f"!I{len(gone)}I", len(gone), *gone)


class ReferenceDecoder(InlineCodec):
    """The receiver's codec: reads payloads where the sender says.

    Args:
        pid: the sender's process, as the kernel reports it.
    """

    label = REFERENCE.size
    by_reference = True

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._mapped = MappedSegments()
        self._fresh: list[int] = []

    def unpack(self, label: bytes, read: Read, frame: Frame, buffers: BufferProvider) -> Tensor:
        """Return a view of the sender's memory, or a copy in the data plane's buffer.

        `InlineCodec.unpack` explains the arguments and errors.
        """
        way, number, offset = REFERENCE.unpack(label)
        if way == GIVEN:
            self._learn(number, read)
        if way in (MAPPED, GIVEN) and frame.nbytes:
            return self._mapped.view(number, offset, frame.nbytes, buffers.dtype)
        place = buffers.buffer_for(frame)
        if way == REMOTE:
            read_remote(self._pid, offset, bytes_of(place))
        elif way == INLINE:
            read(bytes_of(place))
        elif frame.nbytes:
            raise ValueError(f"no such way to a payload: {way}")
        return place

    def _learn(self, number: int, read: Read) -> None:
        """Map the new segment whose descriptor has come, and unmap those that are gone."""
        (count,) = _NUMBER.unpack(_read_bytes(read, _NUMBER.size))
        if not self._fresh or count > len(self._mapped):
            raise ValueError(f"segment {number} without a descriptor, or more gone than there were")
        for (gone,) in _NUMBER.iter_unpack(_read_bytes(read, count * _NUMBER.size)):
            self._mapped.forget(gone)
        self._mapped.add(number, self._fresh.pop(0))

    def receive(self, sock: socket.socket, view: memoryview) -> int:
        """Read bytes, and keep the descriptors that come with them."""
        n, messages, flags, _ = sock.recvmsg_into([view], socket.CMSG_SPACE(_MOST_RIGHTS * 4))
        for level, kind, data in messages:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                rights = array.array("i")
                rights.frombytes(data[: len(data) - len(data) % rights.itemsize])
                self._fresh.extend(rights)
        if flags & socket.MSG_CTRUNC:
            raise LocalResourceError("no descriptor is left for a neighbour's segment (RLIMIT_NOFILE)")
        return n

    def close(self) -> None:
        """Unmap the sender's segments and close unused descriptors."""
        while self._fresh:
            os.close(self._fresh.pop())
        self._mapped.close()


def _read_bytes(read: Read, count: int) -> bytes:
    data = bytearray(count)
    read(memoryview(data))
    return bytes(data)


class Shm:
    """Makes shared-memory edges between processes that share a kernel and a network namespace."""

    def offer(self, listener: Listener, host: str) -> str:
        """Return the name of the listener's Unix socket."""
        return listener.local

    async def dial(self, edge: Edge, arena: Arena) -> StreamSender:
        """Connect, and let the neighbour try to read the ticket from this process's memory."""
        sock = await handshake.dial("\0" + edge.offered, edge.token, Purpose.DATA)
        probe = torch.frombuffer(bytearray(edge.ticket.encode()), dtype=torch.uint8)
        with connections.closed_on_error([sock]):
            answer = await connections.present(sock, RingData(edge.ticket, 0, probe.data_ptr()))
        blocking(sock, edge.settings.timeout_s)
        codec = ReferenceEncoder(arena, answer.direct)
        return StreamSender([sock], edge.settings.slots, edge.member, codec, f"ftar-tx-{edge.member}")

    async def accept(self, edge: Edge, calls: asyncio.Queue[Call]) -> StreamReceiver:
        """Accept the connection, and answer whether the neighbour's memory can be read."""
        call, sock = await calls.get()
        with connections.closed_on_error([sock]):
            if sock.family != socket.AF_UNIX:
                raise ConnectionResetError("shared memory was asked for over TCP")
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            pid, _, _ = _CREDENTIALS.unpack(credentials)
            await connections.send(sock, RingReady(_readable(pid, call.probe, edge.ticket)))
        blocking(sock, edge.settings.timeout_s)
        return StreamReceiver(
            [sock], edge.settings.slots, edge.member, ReferenceDecoder(pid), f"ftar-rx-{edge.member}"
        )


def _readable(pid: int, address: int, ticket: str) -> bool:
    """Return whether the ticket is found at `address` of process `pid`, where the caller says it is."""
    found = bytearray(len(ticket))
    with contextlib.suppress(OSError):
        read_remote(pid, address, memoryview(found))
    return bytes(found) == ticket.encode()
