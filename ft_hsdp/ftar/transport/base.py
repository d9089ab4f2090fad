"""What both ends of an edge know: of an all-reduce, of its chunks, and of how payloads travel.

A payload travels as bytes on the stream (`InlineCodec`), as a reference to the sender's memory, or through a
library. The sender of an edge never has more than C chunks (slots) in flight: the receiver gives a slot back when
it no longer needs the chunk.
"""

from __future__ import annotations

import math
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ft_hsdp.ftar.frame import Entry, Frame, Framing

WAIT_S = 1.0  # the longest wait of an engine for a chunk at once


class WaitClock:
    """Seconds spent inside its block, counted while it lasts. One thread is inside at a time; any thread reads.

    Whoever reads at the moment in which the block ends may miss what the newest stay has added.
    """

    __slots__ = ("_since", "_spent")

    def __init__(self) -> None:
        self._spent = 0.0
        self._since = 0.0  # when a thread has entered; 0: none is inside

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        since, self._since = self._since, 0.0
        self._spent += time.perf_counter() - since

    @property
    def seconds(self) -> float:
        spent, since = self._spent, self._since
        return spent + time.perf_counter() - since if since else spent


class BufferProvider(Protocol):
    """Tells a transport where to receive payloads; the data plane implements it. Called on receiving threads."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the elements."""
        ...

    def buffer_for(self, frame: Frame) -> Tensor:
        """Return a flat CPU tensor, of the size of the frame's span, for its payload."""
        ...


@dataclass(frozen=True, slots=True)
class Transfer:
    """One all-reduce as a receiver sees it."""

    framing: Framing  # how its frames look
    buffers: BufferProvider  # where their payloads go
    frames: int  # how many will come
    small: bool  # so little data that the engine's own thread receives it


@dataclass(frozen=True, slots=True)
class Chunk:
    frame: Frame
    entries: tuple[Entry, ...]
    data: Tensor | None  # flat tensor of the frame's span; None: an empty chunk
    lane: int  # the connection that it came on, for the transport's own use


Read = Callable[[memoryview], object]


@dataclass(frozen=True, slots=True)
class EncodedPayload:
    """What a sender puts on the stream for one payload."""

    label: bytes = b""  # before the header
    buffers: tuple[bytes | memoryview, ...] = ()  # after the header
    descriptors: tuple[int, ...] = ()  # files that are passed with the first bytes


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a flat contiguous CPU tensor, without a copy."""
    array: Any = tensor.detach().view(torch.uint8).numpy()
    return memoryview(array)


class InlineCodec:
    """How the payloads of an edge travel: as bytes behind their headers. The codecs of other ways inherit it.

    Attributes:
        label: number of bytes that precede the header of each frame.
        by_reference: whether the receiver reads the sender's own memory. Then it must acknowledge every chunk
            before the sender goes on.
    """

    label = 0
    by_reference = False

    def pack(self, payload: Tensor | None) -> EncodedPayload:
        """Return what to send for `payload`; None or an empty tensor: nothing follows the header."""
        return EncodedPayload(b"", (bytes_of(payload),) if payload is not None else ())

    def unpack(self, label: bytes, read: Read, frame: Frame, buffers: BufferProvider) -> Tensor:
        """Return the payload of `frame` as a flat tensor of its span.

        Args:
            label: the bytes before the frame's header.
            read: reads exactly as many bytes from the stream as the view has.
            frame: the checked header.
            buffers: provides memory for payloads that are not read in place.

        Raises:
            ValueError: the label refers to no valid memory.
            OSError: the sender's memory cannot be read.
        """
        place = buffers.buffer_for(frame)
        read(bytes_of(place))
        return place

    def receive(self, sock: socket.socket, view: memoryview) -> int:
        """Read a part of `view` from `sock`, and the descriptors that come with it.

        Returns:
            The number of bytes; 0 at the end of the stream.
        """
        return sock.recv_into(view, 0, socket.MSG_WAITALL)

    def close(self) -> None:
        """Release mappings and descriptors."""


_TIMEVAL = struct.Struct("ll")  # seconds and microseconds


def blocking(sock: socket.socket, timeout_s: float) -> socket.socket:
    """Make `sock` blocking, with `timeout_s` as the kernel's deadline for each receive and send; return it.

    Python's own timeout would make the socket non-blocking, and MSG_WAITALL would have no effect.
    """
    sock.setblocking(True)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(timeout_s), int(timeout_s % 1 * 1e6)))
    return sock


def shorten(sock: socket.socket, most_s: float) -> float:
    """Let a receive on a blocking socket wait for at most `most_s`, and return the deadline that it had before.

    The deadline is infinite if the socket had none.
    """
    seconds, micros = _TIMEVAL.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.size))
    before_s: float = seconds + micros / 1e6 or math.inf
    now_s = min(before_s, most_s)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(int(now_s), int(now_s % 1 * 1e6)))
    return before_s
