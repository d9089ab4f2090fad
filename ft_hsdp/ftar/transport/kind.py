"""What a transport provides: `TransportKind` makes its edges, two codecs move payloads beside their headers.

Every transport sends headers over stream sockets. They differ in how a payload travels: as bytes on the stream, as
a reference to the sender's memory, or through a library.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ft_hsdp.ftar.connections import Call, Listener
from ft_hsdp.ftar.frame import Frame
from ft_hsdp.ftar.settings import Settings
from ft_hsdp.ftar.transport.arena import Arena
from ft_hsdp.ftar.transport.base import BufferProvider, Receiver, Sender

Read = Callable[[memoryview], object]


@dataclass(frozen=True, slots=True)
class EncodedPayload:
    """What a sender puts on the stream for one payload."""

    label: bytes = b""  # before the header
    buffers: tuple[bytes | memoryview, ...] = ()  # after the header
    descriptors: tuple[int, ...] = ()  # files that are passed with the first bytes


class PayloadCodec(Protocol):
    """What both ends of an edge know of how payloads travel.

    Attributes:
        label: number of bytes that precede the header of each frame.
    """

    label: int

    @property
    def by_reference(self) -> bool:
        """Whether the receiver reads the sender's own memory.

        Then it must acknowledge every chunk before the sender goes on.
        """
        ...

    def close(self) -> None:
        """Release mappings and descriptors."""
        ...


class PayloadEncoder(PayloadCodec, Protocol):
    """The sender's end: packs payloads."""

    def pack(self, payload: Tensor | None) -> EncodedPayload:
        """Return what to send for `payload`; None or an empty tensor: nothing follows the header."""
        ...


class PayloadDecoder(PayloadCodec, Protocol):
    """The receiver's end: unpacks payloads."""

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
        ...

    def receive(self, sock: socket.socket, view: memoryview) -> int:
        """Read a part of `view` from `sock`, and the descriptors that come with it.

        Returns:
            The number of bytes; 0 at the end of the stream.
        """
        ...


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a flat contiguous CPU tensor, without a copy."""
    array: Any = tensor.detach().view(torch.uint8).numpy()
    return memoryview(array)


class InlineCodec:
    """Sends the payload as bytes behind its header."""

    label = 0
    by_reference = False

    def pack(self, payload: Tensor | None) -> EncodedPayload:
        """Return the bytes of the payload, without a copy."""
        return EncodedPayload(b"", (bytes_of(payload),) if payload is not None else ())

    def unpack(self, label: bytes, read: Read, frame: Frame, buffers: BufferProvider) -> Tensor:
        """Read the payload directly into the data plane's buffer."""
        place = buffers.buffer_for(frame)
        read(bytes_of(place))
        return place

    def receive(self, sock: socket.socket, view: memoryview) -> int:
        """Read as many bytes as the view has, unless the stream ends."""
        return sock.recv_into(view, 0, socket.MSG_WAITALL)

    def close(self) -> None:
        """Do nothing: this codec holds no resources."""


@dataclass(frozen=True, slots=True)
class Edge:
    """What is known of an edge that is being made."""

    epoch: int
    member: int  # replica at the other end
    settings: Settings
    token: str  # secret of the job
    address: str = ""  # "host:port" of the callee
    offered: str = ""  # what `TransportKind.offer` returned at the callee
    ticket: str = ""  # proves that a data connection belongs to this edge


class TransportKind(Protocol):
    """A transport: makes the two ends of an edge."""

    def offer(self, listener: Listener, host: str) -> str:
        """Return what the caller must know, besides the ticket, to connect; it travels in WELCOME."""
        ...

    async def dial(self, edge: Edge, arena: Arena) -> Sender:
        """Connect to the right neighbour. The caller cancels this at its deadline.

        Raises:
            OSError: the connection failed.
            ProtocolViolation: the neighbour did not follow the protocol.
        """
        ...

    async def accept(self, edge: Edge, calls: asyncio.Queue[Call]) -> Receiver:
        """Accept the left neighbour's connections from `calls`. The caller cancels this at its deadline.

        Raises:
            OSError: the connection failed.
            ProtocolViolation: the neighbour did not follow the protocol.
        """
        ...
