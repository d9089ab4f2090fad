"""Channel: between a leader and its own ranks. Losing it ends the rank: a replica lives or dies as a whole."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from ft_hsdp import address, handshake, protocol
from ft_hsdp.core import effects
from ft_hsdp.core.commit import Vote
from ft_hsdp.errors import LighthouseUnreachable, ProtocolViolation
from ft_hsdp.handshake import Admitted, Gate, Purpose
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
    Telemetry,
)

ORDERS = (
    *(effects.Configure, effects.StopRing, effects.Reduce, effects.Commit, effects.Log, effects.Discard),
    *(effects.Install, effects.Feed, effects.Fetch, effects.Checkpoint, effects.Forget, effects.Exit),
    RankAlive,
)
REPORTS = (
    *(RankBroken, RankShown, RankStopped, RankFetched, RankFetchFailed, RankLeaves),
    *(RankCheckpointed, RankCheckpointFailed, Vote, Telemetry, RankAlive),
)
UNREAD = 64 << 10  # bytes that a leader may leave unread before it hears of no more telemetry


async def read(reader: asyncio.StreamReader, *expected: type) -> object | None:
    """The next message; None when the other end is gone or talks nonsense."""
    try:
        (length,) = protocol.LENGTH.unpack(await reader.readexactly(protocol.LENGTH.size))
        if length > protocol.MAX_MESSAGE:
            return None
        return protocol.decode(await reader.readexactly(length), *expected)
    except (OSError, asyncio.IncompleteReadError, ProtocolViolation):
        return None


class Hub:
    """The leader's end: one line to each of its other ranks."""

    def __init__(
        self, ranks: int, token: str, received: Callable[[object], None], lost: Callable[[int], None]
    ) -> None:
        self._token = token
        self._received = received
        self._lost = lost
        self._waiting = set(range(1, ranks))
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._complete = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.hellos: dict[int, RankHello] = {}

    async def listen(self, host: str) -> int:
        """Listen on a free port of ``host``; the port."""
        if not self._waiting:
            self._complete.set()
        listener = address.bound(host)
        port = int(listener.getsockname()[1])
        self._gate = Gate(self._token, (Purpose.HUB,), self._admitted)
        if self._waiting:
            self._gate.watch(listener)
        else:
            listener.close()
        return port

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
                sock = await handshake.secured(sock, proved.session, Purpose.HUB, listening=True)
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
        while (message := await read(reader, *REPORTS)) is not None:
            self._received(message)
        self._lost(hello.rank)


class Line:
    """A rank's end: takes the leader's orders."""

    def __init__(self, token: str, ordered: Callable[[object], None], lost: Callable[[], None]) -> None:
        self._token = token
        self._ordered = ordered
        self._lost = lost

    async def connect(self, host: str, port: int, hello: RankHello) -> None:
        """Dial the leader and say hello.

        Raises:
            OSError, ProtocolViolation: the leader is not there.
        """
        sock = await handshake.dial(address.join(host, port), self._token, Purpose.HUB)
        reader, self._writer = await asyncio.open_connection(sock=sock)
        self.send(hello)
        self._task = asyncio.get_running_loop().create_task(self._listen(reader))

    def send(self, message: object) -> None:
        """Report to the leader."""
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
        while (order := await read(reader, *ORDERS)) is not None:
            self._ordered(order)
        self._lost()
