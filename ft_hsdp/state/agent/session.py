"""The agent's end of one connection: it reads orders, carries them out, and answers each.

`RankSession` is for the connection through which a rank writes and reads its snapshots, `WatchSession` for the
second one, on which a rank waits for the copies that it has ordered.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

from ft_hsdp import protocol, record_layer
from ft_hsdp.core.state_id import StateId
from ft_hsdp.state.agent import messages
from ft_hsdp.state.agent.copies import CopyFetcher
from ft_hsdp.state.agent.messages import ShardIndex
from ft_hsdp.state.agent.store import SnapshotStore
from ft_hsdp.state.pacing import Pacer


class AgentConnection:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()

    async def read(self, most: int) -> bytes:
        """Return the next frame.

        Raises:
            ConnectionError: The other end hung up.
            ProtocolViolation: The frame is longer than ``most`` bytes.
        """
        prefix = await record_layer.exactly(self._sock, protocol.LENGTH.size)
        return await record_layer.exactly(self._sock, protocol.frame_length(prefix, most))

    async def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send frames. The file descriptors in ``fds`` go with the first byte.

        Raises:
            OSError: The other end hung up.
        """
        if fds:
            sent = socket.send_fds(self._sock, [data], fds)
            data = data[sent:]
        await self._loop.sock_sendall(self._sock, data)


class RankSession:
    def __init__(
        self,
        connection: AgentConnection,
        key: ShardIndex,
        store: SnapshotStore,
        copies: CopyFetcher,
        pacer: Pacer,
    ) -> None:
        self._connection = connection
        self._key = key
        self._store = store
        self._copies = copies
        self._pacer = pacer
        self._given: set[int] = set()  # slots whose file descriptors went over this connection

    async def run(self) -> None:
        """Carry out orders until the connection ends. The rank's first slots are allocated meanwhile.

        Raises:
            OSError: The rank hung up.
            ProtocolViolation: The rank sent something that is no valid order.
        """
        preparing = asyncio.create_task(asyncio.to_thread(self._store.prepare, self._key))
        try:
            while True:
                order = messages.decode(await self._connection.read(messages.MAX_MESSAGE), *messages.ORDERS)
                if isinstance(order, messages.Stage):
                    await preparing
                    await self._stage(order.state)
                elif isinstance(order, messages.Take):
                    await self._take(order.state)
                elif isinstance(order, messages.OpenGate):
                    await self._open_gate()
                elif isinstance(order, messages.Staged):
                    await self._staged(order.state, await self._connection.read(messages.MAX_HEADER))
                else:
                    await self._answer(self._simple(order))
        finally:
            preparing.cancel()

    def _simple(self, order: object) -> object:
        rank = self._key[1]
        match order:
            case messages.Settle(state, everywhere):
                self._store.mark_settled(self._key, state, everywhere)
                self._copies.settle(rank, state, everywhere)
            case messages.Pin(state, seconds):
                self._store.pin(self._key, state, seconds)
            case messages.Unpin():
                self._store.unpin(self._key)
            case messages.Forget():
                self._store.forget(self._key)
                self._copies.forget(rank)
            case messages.KeepCopy():
                try:
                    self._copies.keep(rank, order)
                except ValueError as error:
                    return messages.OrderRefused(str(error))
            case messages.OweCopies():
                self._copies.owes(rank, order)
            case messages.FreeCopies(replicas):
                self._copies.drop(rank, replicas)
            case messages.CloseGate():
                self._pacer.close(rank)
            case messages.Recall():
                return messages.Recalled(self._store.list(self._key))
        return messages.Done(self._store.damaged(self._key))

    async def _open_gate(self) -> None:
        try:
            page = self._pacer.open(self._key[1])
        except OSError as error:
            await self._answer(messages.Busy(f"no memory for a gate: {error.strerror}"))
        else:
            await self._answer(messages.GateOpened(), fds=[page])

    async def _stage(self, state: StateId) -> None:
        number = self._store.stage(self._key, state)
        if number is None and await asyncio.to_thread(self._store.grow, self._key):
            number = self._store.stage(self._key, state)
        if number is None:
            await self._answer(messages.Busy(self._store.busy_reason(self._key)))
            return
        fds = self._store.slots(self._key)
        new = number not in self._given
        self._given = self._given & fds.keys() | {number}
        await self._answer(messages.SlotGranted(number, new, tuple(fds)), fds=[fds[number]] if new else [])

    async def _staged(self, state: StateId, header: bytes) -> None:
        try:
            self._store.staged(self._key, state, header)
        except ValueError as error:
            await self._answer(messages.OrderRefused(str(error)))
        else:
            await self._answer(messages.Done(self._store.damaged(self._key)))

    async def _take(self, state: StateId) -> None:
        taken = await asyncio.to_thread(self._store.acquire, self._key, state)
        if taken is None:
            await self._answer(messages.Absent(self._store.damaged(self._key)))
            return
        fd, header = taken
        await self._answer(messages.Taken(), protocol.framed(header), fds=[fd])

    async def _answer(self, message: object, more: bytes = b"", fds: Sequence[int] = ()) -> None:
        await self._connection.send(messages.frame(message) + more, fds)


class WatchSession:
    """Answers which copies a rank has, on a connection of its own."""

    def __init__(self, connection: AgentConnection, rank: int, copies: CopyFetcher) -> None:
        self._connection = connection
        self._rank = rank
        self._copies = copies

    async def run(self) -> None:
        """Answer until the connection ends.

        Raises:
            OSError: The rank hung up.
            ProtocolViolation: The rank sent something that is no valid order.
        """
        while True:
            data = await self._connection.read(messages.MAX_MESSAGE)
            order: messages.AwaitCopies = messages.decode(data, messages.AwaitCopies)
            await self._ended(order.state, order.wait_s)
            await self._connection.send(messages.frame(self._copies.kept(self._rank, order.state)))

    async def _ended(self, state: StateId, wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_s
        while (pulls := self._copies.pending(self._rank, state)) and loop.time() < until:
            waiting = [asyncio.wrap_future(each) for each in pulls]
            try:
                await asyncio.wait(waiting, timeout=until - loop.time())
            finally:
                for each in waiting:
                    each.cancel()
