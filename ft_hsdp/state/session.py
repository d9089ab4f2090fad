"""Session: one rank's connection to the state agent, order by order."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

from ft_hsdp.core.state_id import StateId
from ft_hsdp.state import messages
from ft_hsdp.state.holdings import Holdings
from ft_hsdp.state.messages import (
    MAX_HEADER,
    MAX_MESSAGE,
    ORDERS,
    Absent,
    Busy,
    Done,
    Forget,
    Pin,
    Recall,
    Recalled,
    Refused,
    Settle,
    Slot,
    Stage,
    Staged,
    Take,
    Taken,
    Unpin,
)


class Line:
    """Frames on a connected, non-blocking Unix socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()

    async def read(self, most: int) -> bytes:
        """The next frame.

        Raises:
            ConnectionError: the other end hung up.
            ProtocolViolation: the frame is longer than ``most`` bytes.
        """
        prefix = await self._exactly(messages.LENGTH.size)
        return await self._exactly(messages.length(prefix, most))

    async def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send frames; descriptors go with the first byte.

        Raises:
            OSError: the other end hung up, or takes nothing.
        """
        if fds:
            sent = socket.send_fds(self._sock, [data], fds)
            data = data[sent:]
        await self._loop.sock_sendall(self._sock, data)

    async def _exactly(self, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        view = memoryview(data)
        while view:
            got = await self._loop.sock_recv_into(self._sock, view)
            if not got:
                raise ConnectionResetError("hung up")
            view = view[got:]
        return bytes(data)


class Session:
    """A rank that has proved the token."""

    def __init__(self, line: Line, rank: int, holdings: Holdings) -> None:
        self._line = line
        self._rank = rank
        self._holdings = holdings
        self._given: set[int] = set()  # slots whose descriptors this connection has

    async def run(self) -> None:
        """Carry out orders, for ever.

        Raises:
            OSError: the rank hung up.
            ProtocolViolation: it talks nonsense.
        """
        preparing = asyncio.create_task(asyncio.to_thread(self._holdings.prepare, self._rank))
        try:
            while True:
                order = messages.decode(await self._line.read(MAX_MESSAGE), *ORDERS)
                if isinstance(order, Stage):
                    await preparing
                    await self._stage(order.state)
                elif isinstance(order, Take):
                    await self._take(order.state)
                elif isinstance(order, Staged):
                    await self._staged(order.state, await self._line.read(MAX_HEADER))
                else:
                    await self._answer(self._simple(order))
        finally:
            preparing.cancel()

    def _simple(self, order: object) -> object:
        """Orders that need no bytes and no descriptor."""
        match order:
            case Settle(state, everywhere):
                self._holdings.settle(self._rank, state, everywhere)
            case Pin(state, seconds):
                self._holdings.pin(self._rank, state, seconds)
            case Unpin():
                self._holdings.unpin(self._rank)
            case Forget():
                self._holdings.forget(self._rank)
            case Recall():
                return Recalled(self._holdings.recall(self._rank))
        return Done(self._holdings.damaged(self._rank))

    async def _stage(self, state: StateId) -> None:
        number = self._holdings.stage(self._rank, state)
        if number is None and await asyncio.to_thread(self._holdings.grow, self._rank):
            number = self._holdings.stage(self._rank, state)
        if number is None:
            await self._answer(Busy(self._holdings.why_not(self._rank)))
            return
        fds = self._holdings.slots(self._rank)
        new = number not in self._given
        self._given = self._given & fds.keys() | {number}
        await self._answer(Slot(number, new, tuple(fds)), fds=[fds[number]] if new else [])

    async def _staged(self, state: StateId, header: bytes) -> None:
        try:
            self._holdings.staged(self._rank, state, header)
        except ValueError as error:
            await self._answer(Refused(str(error)))
        else:
            await self._answer(Done(self._holdings.damaged(self._rank)))

    async def _take(self, state: StateId) -> None:
        taken = await asyncio.to_thread(self._holdings.take, self._rank, state)
        if taken is None:
            await self._answer(Absent(self._holdings.damaged(self._rank)))
            return
        fd, header = taken
        await self._answer(Taken(), messages.framed(header), fds=[fd])

    async def _answer(self, message: object, more: bytes = b"", fds: Sequence[int] = ()) -> None:
        await self._line.send(messages.frame(message) + more, fds)
