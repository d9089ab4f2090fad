"""Channel: between a leader and its own ranks. Losing it ends the rank: a replica lives or dies as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ft_hsdp import protocol
from ft_hsdp.core import effects
from ft_hsdp.core.commit import Vote
from ft_hsdp.errors import LighthouseUnreachable, ProtocolViolation
from ft_hsdp.protocol import (
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
)
REPORTS = (
    *(RankBroken, RankShown, RankStopped, RankFetched, RankFetchFailed, RankLeaves),
    *(RankCheckpointed, RankCheckpointFailed, Vote, Telemetry),
)
HELLO_TIMEOUT_S = 10.0
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
        self.hellos: dict[int, RankHello] = {}

    async def listen(self, host: str) -> int:
        """Listen on a free port of ``host``; the port."""
        if not self._waiting:
            self._complete.set()
        self._server = await asyncio.start_server(self._serve, host, 0)
        return int(self._server.sockets[0].getsockname()[1])

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
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = await read(reader, RankHello)
        except TimeoutError:
            hello = None
        if (
            not isinstance(hello, RankHello)
            or hello.rank not in self._waiting
            or not protocol.genuine(self._token, hello.mac, "rank", hello.rank, hello.ring, hello.state)
        ):
            writer.close()
            return
        self._waiting.discard(hello.rank)
        self.hellos[hello.rank] = hello
        self._writers[hello.rank] = writer
        if not self._waiting:
            self._complete.set()
        while (message := await read(reader, *REPORTS)) is not None:
            self._received(message)
        self._lost(hello.rank)


class Line:
    """A rank's end: takes the leader's orders."""

    def __init__(self, ordered: Callable[[object], None], lost: Callable[[], None]) -> None:
        self._ordered = ordered
        self._lost = lost

    async def connect(self, host: str, port: int, hello: RankHello) -> None:
        """Dial the leader and say hello."""
        reader, self._writer = await asyncio.open_connection(host, port)
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
