"""Carrier: how the payload of a frame travels beside its header on a stream: as bytes, or as a reference to it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ft_hsdp.ftar.frame import Frame
from ft_hsdp.ftar.link import Landing
from ft_hsdp.ftar.memory import bytes_of

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

    def unpack(self, label: bytes, read: Read, frame: Frame, landing: Landing) -> Tensor:
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

    def unpack(self, label: bytes, read: Read, frame: Frame, landing: Landing) -> Tensor:
        """Straight to where the data plane wants it."""
        place = landing.land(frame)
        read(bytes_of(place))
        return place

    def receive(self, sock: socket.socket, view: memoryview) -> int:
        """As much as has been asked for, if the stream does not end."""
        return sock.recv_into(view, 0, socket.MSG_WAITALL)

    def close(self) -> None:
        """Nothing is held."""
