"""The protocols between the engine and a transport.

A member has a `Receiver` from its left neighbour and a `Sender` to its right one. Each edge may use another
transport, so the two are independent. The sender of an edge never has more than C chunks (slots) in flight: the
receiver gives a slot back when it no longer needs the chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ft_hsdp.errors import FTARError
from ft_hsdp.ftar.frame import Entry, Frame, Framing

WAIT_S = 1.0  # the longest wait of an engine for a chunk at once


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


class Receiver(Protocol):
    """Receives chunks from the left neighbour.

    The engine's thread calls `begin`, `next`, `release` and `end`.

    Attributes:
        frames: number of frames taken by `next` since the connection was made.
    """

    frames: int

    def begin(self, transfer: Transfer) -> None:
        """Begin an all-reduce: receive its frames and no others."""
        ...

    def next(self, block: bool) -> Chunk | None:
        """Return the next chunk in the order of sending; None if there is none yet.

        Args:
            block: wait for it, but at most `WAIT_S`: the data plane wants to see that its engine lives.

        Raises:
            PeerDead: the connection broke.
            PeerTimeout: nothing came before the deadline.
            StaleEpoch: a frame belongs to another all-reduce.
            ProtocolViolation: a frame is not what the plan says.
        """
        ...

    def release(self, chunk: Chunk) -> None:
        """Give the slot of `chunk` back to the sender.

        Raises:
            PeerDead: the sender is gone, so the chunk may not have been whole when its memory was read. It must be
                discarded.
        """
        ...

    def end(self) -> None:
        """End the all-reduce: give all slots back."""
        ...

    def close(self) -> None:
        """Wake all waiting threads and receive nothing more. Any thread, any number of times."""
        ...

    def dispose(self) -> None:
        """End the threads and close the descriptors; called after `close`, when the engine has left."""
        ...


class Sender(Protocol):
    """Sends chunks to the right neighbour. The engine's thread calls `begin`, `send` and `flush`.

    Attributes:
        frames: number of frames sent, or queued to be sent, since the connection was made.
    """

    frames: int

    def begin(self, failed: Callable[[FTARError], None]) -> None:
        """Begin an all-reduce: count its bytes from 0, and call `failed` when a sending thread fails."""
        ...

    def send(self, head: bytes, payload: Tensor | None, small: bool) -> None:
        """Queue one chunk. Does not block.

        Args:
            head: the frame's header and its entries.
            payload: flat CPU tensor that must not change until `flush` returns; None: an empty chunk.
            small: send it on the calling thread if possible.
        """
        ...

    def flush(self) -> int:
        """Block until the neighbour no longer needs any payload.

        Returns:
            The bytes that this all-reduce has sent, with headers.

        Raises:
            PeerDead: the connection broke.
            PeerTimeout: the neighbour did not take the data before the deadline.
        """
        ...

    @property
    def high_water(self) -> int:
        """The largest number of payload bytes that were in flight at once."""
        ...

    def close(self) -> None:
        """Wake all waiting threads and send nothing more.

        Any thread, any number of times. No payload is read afterwards.
        """
        ...

    def dispose(self) -> None:
        """End the threads and close the descriptors; called after `close`."""
        ...
