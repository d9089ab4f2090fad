"""Channel: between rank 0 of a replica and its other ranks.

The leader gives its orders on one; losing it ends the rank, for a replica lives or dies as a whole. The ranks'
store is at the end of another (`key_table`).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Collection

from ft_hsdp import address, handshake, protocol
from ft_hsdp.core import effects
from ft_hsdp.core.commit import Vote
from ft_hsdp.errors import LighthouseUnreachable, ProtocolViolation
from ft_hsdp.handshake import Admitted, CallerGate, Purpose
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
    Telemetry,
)

ORDERS = (
    *(
        effects.Configure,
        effects.StopRing,
        effects.Reduce,
        effects.Commit,
        effects.BufferUpdate,
        effects.DropGradient,
    ),
    *(
        effects.InstallSnapshot,
        effects.RunBatch,
        effects.Fetch,
        effects.Keep,
        effects.WriteCheckpoint,
        effects.DropSnapshots,
    ),
    *(effects.Exit, Settled, RankAlive),
)
REPORTS = (
    *(RankBroken, RankShown, RankStopped, RankFetched, RankFetchFailed, RankLeaves),
    *(RankCheckpointed, RankCheckpointFailed, Vote, Telemetry, RankAlive),
)
UNREAD = 64 << 10  # bytes that a leader may leave unread before it hears of no more telemetry


async def read(reader: asyncio.StreamReader, *expected: type) -> object | None:
    """The next message; None when the other end is gone or talks nonsense."""
    try:
        length = protocol.frame_length(await reader.readexactly(protocol.LENGTH.size))
        return protocol.decode(await reader.readexactly(length), *expected)
    except (OSError, asyncio.IncompleteReadError, ProtocolViolation):
        return None


class RankHub:
    """Rank 0's end: one line to each of the other ranks, which come for ``purpose`` and send ``types``."""

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
        self._waiting = set(range(1, ranks))
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._complete = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.hellos: dict[int, RankHello] = {}

    async def listen(self, host: str) -> int:
        """Listen on a free port of ``host``; the port."""
        return self.open(address.bound(host))

    def open(self, listener: socket.socket) -> int:
        """Listen at ``listener``, which is bound, until all ranks are here; its port."""
        port = int(listener.getsockname()[1])
        self._gate = CallerGate(self._token, (self._purpose,), self._admitted)
        if self._waiting:
            self._gate.watch(listener)
        else:
            listener.close()
            self._complete.set()
        return port

    @property
    def awaited(self) -> Collection[int]:
        """The ranks that are not here yet."""
        return self._waiting

    async def all_here(self, timeout_s: float) -> None:
        """Wait until every rank has said hello.

        Raises:
            TimeoutError: some rank did not in time.
        """
        async with asyncio.timeout(timeout_s):
            await self._complete.wait()

    def broadcast(self, order: object) -> None:
        """Give an order to all other ranks, in order."""
        data = protocol.frame(order)
        for writer in self._writers.values():
            writer.write(data)

    async def tell(self, rank: int, message: object) -> None:
        """Tell one rank something, and wait until it takes it; until cancelled.

        Raises:
            OSError: it is gone.
        """
        writer = self._writers[rank]
        writer.write(protocol.frame(message))
        await writer.drain()

    def hang_up(self, rank: int) -> None:
        """Hang up on one rank, whatever it has not taken yet."""
        self._writers[rank].transport.abort()

    def close(self) -> None:
        """Hang up."""
        for writer in self._writers.values():
            writer.close()
        self._gate.close()

    def _admitted(self, proved: Admitted, sock: socket.socket) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(proved, sock))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, proved: Admitted, sock: socket.socket) -> None:
        try:
            async with asyncio.timeout(2 * handshake.hello_s()):
                sock = await handshake.secured(sock, proved.session, self._purpose, listening=True)
                reader, writer = await asyncio.open_connection(sock=sock)
        except (OSError, TimeoutError):
            sock.close()
            return
        try:
            async with asyncio.timeout(2 * handshake.hello_s()):
                hello = await read(reader, RankHello)
        except TimeoutError:
            hello = None
        if not isinstance(hello, RankHello) or hello.rank not in self._waiting:
            writer.close()
            return
        self._waiting.discard(hello.rank)
        self.hellos[hello.rank] = hello
        self._writers[hello.rank] = writer
        if not self._waiting:
            self._gate.close()
            self._complete.set()
        while (message := await read(reader, *self._types)) is not None:
            self._received(message)
        self._lost(hello.rank)


class RankLine:
    """Another rank's end: takes what rank 0 sends, which is of ``types``."""

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
        """Dial rank 0 and say hello; until cancelled.

        Raises:
            OSError, ProtocolViolation: it is not there.
        """
        sock = await handshake.dial(address.join(host, port), self._token, self._purpose)
        reader, self._writer = await asyncio.open_connection(sock=sock)
        self.send(hello)
        self._task = asyncio.get_running_loop().create_task(self._listen(reader))

    def send(self, message: object) -> None:
        """Tell rank 0 something."""
        self._writer.write(protocol.frame(message))

    def tell(self, telemetry: Telemetry) -> None:
        """Have the leader pass telemetry on.

        Raises:
            LighthouseUnreachable: the leader reads nothing at the moment.
        """
        if self._writer.transport.get_write_buffer_size() > UNREAD:
            raise LighthouseUnreachable("the leader of this replica does not read")
        self.send(telemetry)

    def close(self) -> None:
        """Hang up."""
        self._task.cancel()
        self._writer.close()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while (order := await read(reader, *self._types)) is not None:
            self._ordered(order)
        self._lost()
