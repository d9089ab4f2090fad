"""Link: what the engine asks of a transport: an inlet from the left neighbour and an outlet to the right one.

Each edge may be of another kind, so the two ends of a member are independent. The sender of an edge never has more
than its slots of chunks on their way: the receiver gives a slot back when it is done with the chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ft_hsdp.errors import FTARError
from ft_hsdp.ftar.frame import Entry, Frame, Framing


class BufferProvider(Protocol):
    """Where the bytes of arriving chunks go: the data plane says so, on the thread that receives."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of the elements."""
        ...

    def buffer_for(self, frame: Frame) -> Tensor:
        """A flat tensor of the frame's span for its payload."""
        ...


@dataclass(frozen=True, slots=True)
class Transfer:
    """One all-reduce as a transport sees it: ``frames`` chunks to come, how they look, where they go.

    ``small``: so little that the engine's own thread should do all of it.
    """

    framing: Framing
    buffers: BufferProvider
    frames: int
    small: bool


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk that is here: ``data`` is a flat tensor of its span, None if empty; ``lane`` is the transport's."""

    frame: Frame
    entries: tuple[Entry, ...]
    data: Tensor | None
    lane: int


class Receiver(Protocol):
    """Chunks from the left neighbour. ``begin``, ``next``, ``release`` and ``end`` are the engine's.

    ``frames`` counts all that were taken since the connection was made.
    """

    frames: int

    def begin(self, transfer: Transfer) -> None:
        """An all-reduce begins: its frames, and no others, are to be received."""
        ...

    def next(self, block: bool) -> Chunk | None:
        """The next chunk; None if there is none yet and ``block`` is not set.

        Raises:
            PeerDead, PeerTimeout, StaleEpoch, ProtocolViolation
        """
        ...

    def release(self, chunk: Chunk) -> None:
        """The chunk was used. What it held was whole only if this does not raise: the peer is still there."""
        ...

    def end(self) -> None:
        """The all-reduce is over: all slots go back."""
        ...

    def close(self) -> None:
        """Wake whoever waits, let nothing more in; any thread, any number of times."""
        ...

    def dispose(self) -> None:
        """After ``close``, once the engine has left: end threads, close descriptors."""
        ...


class Sender(Protocol):
    """Chunks to the right neighbour. ``frames`` counts all that were sent since the connection was made."""

    frames: int

    def begin(self, failed: Callable[[FTARError], None]) -> None:
        """An all-reduce begins: count its bytes from 0, and tell ``failed`` what goes wrong on another thread."""
        ...

    def send(self, head: bytes, payload: Tensor | None, small: bool) -> None:
        """Queue one chunk: header with entries, and a flat tensor that stays as it is until ``flush`` returns."""
        ...

    def flush(self) -> int:
        """Wait until no payload is needed any more; the bytes of this all-reduce.

        Raises:
            PeerDead, PeerTimeout
        """
        ...

    @property
    def high_water(self) -> int:
        """Most bytes of payload that were ever on their way at once."""
        ...

    def close(self) -> None:
        """Wake whoever waits, send nothing more; any thread, any number of times. No payload is read after."""
        ...

    def dispose(self) -> None:
        """After ``close``: end threads, close descriptors."""
        ...
