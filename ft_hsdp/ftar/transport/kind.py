"""What a transport provides: `TransportKind` makes the two ends of an `Edge`.

Every transport sends headers over stream sockets. They differ in how a payload travels (`base.InlineCodec`).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from ft_hsdp.ftar.connections import Call, Listener
from ft_hsdp.ftar.settings import Settings
from ft_hsdp.ftar.transport.arena import Arena
from ft_hsdp.ftar.transport.receiver import StreamReceiver
from ft_hsdp.ftar.transport.sender import StreamSender


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

    async def dial(self, edge: Edge, arena: Arena) -> StreamSender:
        """Connect to the right neighbour. The caller cancels this at its deadline.

        Raises:
            OSError: the connection failed.
            ProtocolViolation: the neighbour did not follow the protocol.
        """
        ...

    async def accept(self, edge: Edge, calls: asyncio.Queue[Call]) -> StreamReceiver:
        """Accept the left neighbour's connections from `calls`. The caller cancels this at its deadline.

        Raises:
            OSError: the connection failed.
            ProtocolViolation: the neighbour did not follow the protocol.
        """
        ...
