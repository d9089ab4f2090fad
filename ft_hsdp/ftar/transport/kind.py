"""Kind: what a transport does to make one edge: its caller gets the outlet, whoever is called the inlet."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from ft_hsdp.ftar.door import Call, Door
from ft_hsdp.ftar.link import Inlet, Outlet
from ft_hsdp.ftar.memory import Arena
from ft_hsdp.ftar.settings import Settings


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
    door: str = ""
    ticket: str = ""


class Kind(Protocol):
    """A transport."""

    def offer(self, door: Door, host: str) -> str:
        """What the caller must know, besides the ticket, to connect."""
        ...

    async def dial(self, edge: Edge, arena: Arena) -> Outlet:
        """Connect to the right neighbour; cancelled at the deadline.

        Raises:
            OSError, ProtocolViolation: it does not work.
        """
        ...

    async def accept(self, edge: Edge, calls: asyncio.Queue[Call]) -> Inlet:
        """Take the left neighbour's connections; cancelled at the deadline.

        Raises:
            OSError, ProtocolViolation: it does not work.
        """
        ...
