"""The connections between rank 0 of a replica and its other ranks.

The leader gives its orders over one and hears reports; losing it ends the rank, because a replica lives or dies as
a whole. The store of torch.distributed has a connection of its own per rank (`rank_store`). Both run on one
event loop at each end.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Protocol

from ft_hsdp import address, caller_gate, handshake, protocol
from ft_hsdp.caller_gate import CallerGate
from ft_hsdp.core import effects
from ft_hsdp.core.commit import Vote
from ft_hsdp.errors import LighthouseUnreachable, ProtocolViolation
from ft_hsdp.handshake import Admitted, Purpose
from ft_hsdp.protocol import (
    RankAlive,
    RankBroken,
    RankCheckpointed,
    RankCheckpointFailed,
    RankFetched,
    RankFetchFailed,
    RankHello,
    RankLeaves,
    RankShown,
    RankStopped,
    Settled,
    ShardLeftOut,
    Telemetry,
)

ORDERS = (
    effects.Configure,
    effects.StopRing,
    effects.Reduce,
    effects.Commit,
    effects.BufferUpdate,
    effects.DropGradient,
    effects.InstallSnapshot,
    effects.RunBatch,
    effects.Fetch,
    effects.Keep,
    effects.WriteCheckpoint,
    effects.DropSnapshots,
    effects.DropCopies,
    effects.Exit,
    Settled,
    ShardLeftOut,
    RankAlive,
)
REPORTS = (
    *(RankBroken, RankShown, RankStopped, RankFetched, RankFetchFailed, RankLeaves),
    *(RankCheckpointed, RankCheckpointFailed, Vote, Telemetry, RankAlive),
)
UNREAD = 64 << 10  # bytes that a leader may leave unread before it hears of no more telemetry


class RankBus(Protocol):
    """What the leader needs of the rank it runs on: `train.runtime.RankRuntime` of rank 0."""

    def broadcast(self, order: object) -> None:
        """Give an order to all ranks of this replica, rank 0 included."""

    def end(self, reason: str, code: int) -> None:
        """End this process at once, whatever its ranks do, and with it the replica."""


async def read(reader: asyncio.StreamReader, *expected: type) -> object | None:
    """Return the next message; None when the other end is gone, or sends anything else than `expected`."""
    try:
        length = protocol.frame_length(await reader.readexactly(protocol.LENGTH.size))
        return protocol.decode(await reader.readexactly(length), *expected)
    except (OSError, asyncio.IncompleteReadError, ProtocolViolation):
        return None


class RankHub:
    """Rank 0's end: one connection to each of the other ranks.

    Args:
        received: called with each message.
        lost: called with the rank whose connection has ended.
        purpose: of the connections, for the handshake.
        types: messages that the ranks may send.
    """

    def __init__(
        self,
        ranks: int,
        token: str,
        received: Callable[[object], None],
        lost: Callable[[int], None],
        purpose: Purpose = Purpose.HUB,
        types: tuple[type, ...] = REPORTS,
    ) -> None:
        self._token = token
        self._purpose = purpose
        self._types = types
        self._received = received
        self._lost = lost
        self.awaited = set(range(1, ranks))  # ranks that have not said hello
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._complete = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.hellos: dict[int, RankHello] = {}

    async def listen(self, host: str) -> int:
        return self.open(address.bound(host))

    def open(self, listener: socket.socket) -> int:
        """Listen at a bound socket until all ranks are here, and return its port."""
        port = int(listener.getsockname()[1])
        self._gate = CallerGate(self._token, (self._purpose,), self._admitted)
        if self.awaited:
            self._gate.watch(listener)
        else:
            listener.close()
            self._complete.set()
        return port

    async def all_here(self, timeout_s: float) -> None:
        """Wait until every rank has said hello.

        Raises:
            TimeoutError: a rank did not come in time.
        """
        async with asyncio.timeout(timeout_s):
            await self._complete.wait()

    def broadcast(self, order: object) -> None:
        data = protocol.frame(order)
        for writer in self._writers.values():
            writer.write(data)

    async def tell(self, rank: int, message: object) -> None:
        """Send a message to one rank and wait until it is taken; until cancelled.

        Raises:
            OSError: its connection has ended.
        """
        writer = self._writers[rank]
        writer.write(protocol.frame(message))
        await writer.drain()

    def hang_up(self, rank: int) -> None:
        """Close the connection to one rank, whatever it has not read yet."""
        self._writers[rank].transport.abort()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._gate.close()

    def _admitted(self, proved: Admitted, sock: socket.socket) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(proved, sock))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, proved: Admitted, sock: socket.socket) -> None:
        try:
            async with asyncio.timeout(2 * caller_gate.hello_s()):
                sock = await handshake.secured(sock, proved.session, self._purpose, listening=True)
                reader, writer = await asyncio.open_connection(sock=sock)
        except (OSError, TimeoutError):
            sock.close()
            return
        try:
            async with asyncio.timeout(2 * caller_gate.hello_s()):
                hello = await read(reader, RankHello)
        except TimeoutError:
            hello = None
        if not isinstance(hello, RankHello) or hello.rank not in self.awaited:
            writer.close()
            return
        self.awaited.discard(hello.rank)
        self.hellos[hello.rank] = hello
        self._writers[hello.rank] = writer
        if not self.awaited:
            self._gate.close()
            self._complete.set()
        while (message := await read(reader, *self._types)) is not None:
            self._received(message)
        self._lost(hello.rank)


class RankLine:
    """Another rank's end of the connection to rank 0.

    Args:
        ordered: called with each message of rank 0.
        lost: called when the connection has ended.
        types: messages that rank 0 may send.
    """

    def __init__(
        self,
        token: str,
        ordered: Callable[[object], None],
        lost: Callable[[], None],
        purpose: Purpose = Purpose.HUB,
        types: tuple[type, ...] = ORDERS,
    ) -> None:
        self._token = token
        self._purpose = purpose
        self._types = types
        self._ordered = ordered
        self._lost = lost

    async def connect(self, host: str, port: int, hello: RankHello) -> None:
        """Connect to rank 0 and say hello; until cancelled.

        Args:
            hello: what this rank says about itself.

        Raises:
            OSError: rank 0 is not there.
            ProtocolViolation: what listens there does not know the token.
        """
        sock = await handshake.dial(address.join(host, port), self._token, self._purpose)
        reader, self._writer = await asyncio.open_connection(sock=sock)
        self.send(hello)
        self._task = asyncio.get_running_loop().create_task(self._listen(reader))

    def send(self, message: object) -> None:
        self._writer.write(protocol.frame(message))

    def tell(self, telemetry: Telemetry) -> None:
        """Have the leader pass telemetry on to the lighthouse.

        Raises:
            LighthouseUnreachable: the leader reads nothing at the moment.
        """
        if self._writer.transport.get_write_buffer_size() > UNREAD:
            raise LighthouseUnreachable("the leader of this replica does not read")
        self.send(telemetry)

    def close(self) -> None:
        self._task.cancel()
        self._writer.close()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while (order := await read(reader, *self._types)) is not None:
            self._ordered(order)
        self._lost()
