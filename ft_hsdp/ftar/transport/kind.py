"""Carrier: how the payload of a frame travels beside its header on a stream: as bytes, or as a reference to it.

Kind: what a transport does to make one edge: its caller gets the outlet, whoever is called the inlet.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ft_hsdp.ftar.frame import Frame
from ft_hsdp.ftar.listener import Call, Listener
from ft_hsdp.ftar.memory import Arena, bytes_of
from ft_hsdp.ftar.settings import Settings
from ft_hsdp.ftar.transport.base import BufferProvider, Receiver, Sender

Read = Callable[[memoryview], None]


@dataclass(frozen=True, slots=True)
class Parcel:
    """What goes on the stream: ``label`` before the header, ``buffers`` after it, descriptors with the first."""

    label: bytes = b""
    buffers: tuple[bytes | memoryview, ...] = ()
    descriptors: tuple[int, ...] = ()


class Carrier(Protocol):
    """One end of one edge: the outlet packs, the inlet unpacks. ``label`` bytes precede each frame's header."""

    label: int

    @property
    def by_reference(self) -> bool:
        """Whether the receiver reads the sender's own memory: it must say so of every chunk before it goes on."""
        ...

    def pack(self, payload: Tensor | None) -> Parcel:
        """What to send for a payload; None, or nothing in it: none follows."""
        ...

    def unpack(self, label: bytes, read: Read, frame: Frame, buffers: BufferProvider) -> Tensor:
        """The payload of ``frame``, read from the stream or from where its label says."""
        ...

    def receive(self, sock: socket.socket, view: memoryview) -> int:
        """Read a part of ``view`` from ``sock``, with what else comes along; 0 at the end of the stream."""
        ...

    def close(self) -> None:
        """Let go of what it holds."""
        ...


class Bytes:
    """The payload follows its header."""

    label = 0
    by_reference = False

    def pack(self, payload: Tensor | None) -> Parcel:
        """The bytes themselves."""
        return Parcel(b"", (bytes_of(payload),) if payload is not None else ())

    def unpack(self, label: bytes, read: Read, frame: Frame, buffers: BufferProvider) -> Tensor:
        """Straight to where the data plane wants it."""
        place = buffers.buffer_for(frame)
        read(bytes_of(place))
        return place

    def receive(self, sock: socket.socket, view: memoryview) -> int:
        """As much as has been asked for, if the stream does not end."""
        return sock.recv_into(view, 0, socket.MSG_WAITALL)

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True, slots=True)
class Edge:
    """What is known of an edge that is being made: the ``member`` at the other end, and the way there.

    ``address`` is the callee's "host:port"; ``door`` is what its side of the transport offered.
    """

    epoch: int
    member: int
    settings: Settings
    token: str
    address: str = ""
    offered: str = ""
    ticket: str = ""


class TransportKind(Protocol):
    """A transport."""

    def offer(self, listener: Listener, host: str) -> str:
        """What the caller must know, besides the ticket, to connect."""
        ...

    async def dial(self, edge: Edge, arena: Arena) -> Sender:
        """Connect to the right neighbour; cancelled at the deadline.

        Raises:
            OSError, ProtocolViolation: it does not work.
        """
        ...

    async def accept(self, edge: Edge, calls: asyncio.Queue[Call]) -> Receiver:
        """Take the left neighbour's connections; cancelled at the deadline.

        Raises:
            OSError, ProtocolViolation: it does not work.
        """
        ...
