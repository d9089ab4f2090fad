"""Door: where the ranks of a replica connect to the state agent of their host and prove that they know the token.

Whoever does not in time is hung up on. A rank has one connection: a newer one supersedes the older. Losing one
loses nothing that is complete.

RankSession: one rank's connection to the state agent, order by order.

``python -m ft_hsdp.state.agent.server --replica R --host H``: the state agent of one replica on this host.

It owns the memory that the replica's ranks write their snapshots into, gives it to the ranks that come after them
and serves it to other replicas (FT-HSDP §4.4). The death of the trainers does not touch it. It prints a JSON line
{"pid", "address"} once it listens. The job's token is taken from FT_HSDP_TOKEN.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from ft_hsdp import handshake, protocol, record_layer
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import EXIT_OK, ConfigError, FtHsdpError, LocalResourceError, ProtocolViolation, Retryable
from ft_hsdp.handshake import Admitted, CallerGate, Purpose
from ft_hsdp.state.agent import messages
from ft_hsdp.state.agent.launcher import TOKEN_VARIABLE
from ft_hsdp.state.agent.messages import (
    MAX_HEADER,
    MAX_MESSAGE,
    ORDERS,
    Absent,
    Busy,
    Done,
    Forget,
    Hello,
    OrderRefused,
    Pin,
    Recall,
    Recalled,
    Settle,
    SlotGranted,
    Stage,
    Staged,
    Take,
    Taken,
    Unpin,
    Welcome,
)
from ft_hsdp.state.agent.store import Owner, SnapshotStore
from ft_hsdp.state.transfer.server import StateServer

MAX_HELLO = 1024

_log = logging.getLogger(__name__)


def listen(token: str, replica: int, generation: int = 0) -> socket.socket:
    """A socket at the agent's name; the name is free again as soon as its owner is gone.

    Raises:
        Retryable: another agent has it.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(messages.agent_name(token, replica, generation))
        sock.listen(handshake.BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise Retryable(f"replica {replica} has a state agent on this host already") from None
        raise
    return sock


class AgentListener:
    """Lets ranks in at ``sock``; ``address`` is where the agent serves over HTTP."""

    def __init__(self, sock: socket.socket, token: str, holdings: SnapshotStore, address: str) -> None:
        self._sock = sock
        self._token = token
        self._holdings = holdings
        self._address = address
        self._tasks: set[asyncio.Task[None]] = set()
        self._ranks: dict[int, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    async def serve(self) -> None:
        """Let ranks in until cancelled."""
        gate = CallerGate(self._token, (Purpose.AGENT,), self._admitted, self._failed)
        gate.watch(self._sock)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            gate.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _failed(self, error: LocalResourceError) -> None:
        _log.warning("cannot let anybody in: %s", error)

    def _admitted(self, proved: Admitted, sock: socket.socket) -> None:
        task = asyncio.get_running_loop().create_task(self._connection(sock))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def deserted(self, seconds: float) -> None:
        """Return once no rank was connected for ``seconds``."""
        while True:
            self._changed.clear()
            try:
                async with asyncio.timeout(None if self._ranks else seconds):
                    await self._changed.wait()
            except TimeoutError:
                return

    async def _connection(self, sock: socket.socket) -> None:
        with sock:
            try:
                line = AgentConnection(sock)
                async with asyncio.timeout(handshake.hello_s()):
                    hello: Hello = messages.decode(await line.read(MAX_HELLO), Hello)
                await self._rank(line, hello)
            except ProtocolViolation as error:
                _log.warning("hung up: %s", error)
            except OSError as error:
                _log.debug("gone: %s", error)

    async def _rank(self, line: AgentConnection, hello: Hello) -> None:
        rank = hello.rank
        while (older := self._ranks.get(rank)) is not None:
            _log.info("rank %d: a newer connection supersedes the older", rank)
            older.cancel()
            await asyncio.wait([older])
        task = asyncio.current_task()
        assert task is not None
        self._ranks[rank] = task
        self._changed.set()
        dead = False
        try:
            self._holdings.admit(Owner(rank, hello.ranks, hello.nbytes))
            await line.send(messages.frame(Welcome(self._address)))
            await RankSession(line, rank, self._holdings).run()
        except OSError:
            dead = True
            raise
        finally:
            self._holdings.left(rank, dead=dead)
            del self._ranks[rank]
            self._changed.set()


class AgentConnection:
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
        prefix = await self._exactly(protocol.LENGTH.size)
        return await self._exactly(protocol.frame_length(prefix, most))

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


class RankSession:
    """A rank that has proved the token."""

    def __init__(self, line: AgentConnection, rank: int, holdings: SnapshotStore) -> None:
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
                self._holdings.mark_settled(self._rank, state, everywhere)
            case Pin(state, seconds):
                self._holdings.pin(self._rank, state, seconds)
            case Unpin():
                self._holdings.unpin(self._rank)
            case Forget():
                self._holdings.forget(self._rank)
            case Recall():
                return Recalled(self._holdings.list(self._rank))
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
        await self._answer(SlotGranted(number, new, tuple(fds)), fds=[fds[number]] if new else [])

    async def _staged(self, state: StateId, header: bytes) -> None:
        try:
            self._holdings.staged(self._rank, state, header)
        except ValueError as error:
            await self._answer(OrderRefused(str(error)))
        else:
            await self._answer(Done(self._holdings.damaged(self._rank)))

    async def _take(self, state: StateId) -> None:
        taken = await asyncio.to_thread(self._holdings.acquire, self._rank, state)
        if taken is None:
            await self._answer(Absent(self._holdings.damaged(self._rank)))
            return
        fd, header = taken
        await self._answer(Taken(), protocol.framed(header), fds=[fd])

    async def _answer(self, message: object, more: bytes = b"", fds: Sequence[int] = ()) -> None:
        await self._line.send(messages.frame(message) + more, fds)


LINGER_S = 60.0


@contextlib.contextmanager
def watching(guard: int | None, ended: Callable[[], object]) -> Iterator[None]:
    """Call ``ended`` on the running loop when the process ``guard`` has ended."""
    if guard is None:
        yield
        return
    try:
        process = os.pidfd_open(guard)
    except ProcessLookupError:
        ended()
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_reader(process, ended)
    try:
        yield
    finally:
        loop.remove_reader(process)
        os.close(process)


async def serve(door: AgentListener, linger_s: float, guard: int | None, ready: dict[str, object]) -> None:
    """Say on stdout that it is ready, and serve until SIGTERM, the end of the process ``guard``, or until no rank
    was here for ``linger_s``."""
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    with watching(guard, told.set):
        await _serve(door, linger_s, told, ready)


async def _serve(door: AgentListener, linger_s: float, told: asyncio.Event, ready: dict[str, object]) -> None:
    serving = asyncio.create_task(door.serve())
    ends = {asyncio.create_task(told.wait()), asyncio.create_task(door.deserted(linger_s))}
    sys.stdout.write(json.dumps(ready) + "\n")
    sys.stdout.flush()
    done, _ = await asyncio.wait({serving, *ends}, return_when=asyncio.FIRST_COMPLETED)
    if serving not in done:
        _log.info("ends: %s", "told to" if told.is_set() else f"no rank was here for {linger_s:g} s")
        for task in (serving, *ends):
            task.cancel()
        await asyncio.wait({serving, *ends})
    if not serving.cancelled():
        serving.result()


def run(
    token: str, replica: int, host: str, port: int, linger_s: float, guard: int | None, generation: int = 0
) -> None:
    """Be the agent.

    Raises:
        ConfigError: ``host`` or ``port`` cannot be used.
        Retryable: there is another agent of that replica here.
    """
    with listen(token, replica, generation) as sock:
        holdings = SnapshotStore()
        try:
            server = StateServer(host, port, holdings, token)
        except OSError as error:
            raise ConfigError(
                "--host, --port", f"{host}:{port}", f"a free address here ({error.strerror})"
            ) from None
        try:
            door = AgentListener(sock, token, holdings, server.address)
            ready = {"pid": os.getpid(), "address": server.address}
            asyncio.run(serve(door, linger_s, guard, ready))
        finally:
            server.close()
            holdings.close()


class _Arguments(argparse.ArgumentParser):
    """A parser whose errors are one line with exit code 64."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError instead of printing the usage."""
        allowed = f"--replica R --host H [--port P] [--linger SECONDS] [--guard PID] ({message})"
        raise ConfigError("arguments", " ".join(sys.argv[1:]), allowed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments and serve; the exit code. What goes wrong is one line on stderr."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    parser = _Arguments(prog="python -m ft_hsdp.state.agent.server", description=__doc__)
    parser.add_argument("--replica", type=int, required=True, help="whose ranks' snapshots it keeps")
    parser.add_argument("--host", required=True, help="address to serve snapshots at")
    parser.add_argument("--port", type=int, default=0, help="port to serve snapshots at; 0: any")
    parser.add_argument("--linger", type=float, default=LINGER_S, help="end when no rank was here for so many s")
    generations = range(messages.GENERATIONS)
    parser.add_argument("--generation", type=int, default=0, choices=generations, help="the number of its name")
    parser.add_argument("--tls", choices=("auto", "on", "off"), default="auto", help="as network.tls")
    parser.add_argument("--hello", type=float, default=handshake.HELLO_S, help="as timeouts.hello_s")
    parser.add_argument("--guard", type=int, help="end when the process with this id does")
    try:
        chosen = parser.parse_args(arguments)
        token = os.environ.pop(TOKEN_VARIABLE, "").strip()
        if not token:
            raise ConfigError(TOKEN_VARIABLE, token, "the job's token")
        if chosen.replica < 0:
            raise ConfigError("--replica", chosen.replica, "0 or more")
        if not 0 <= chosen.port <= 65535:
            raise ConfigError("--port", chosen.port, "0 to 65535")
        if not 0 < chosen.linger < float("inf"):
            raise ConfigError("--linger", chosen.linger, "seconds, above 0")
        if not 0 < chosen.hello < float("inf"):
            raise ConfigError("--hello", chosen.hello, "seconds, above 0")
        record_layer.use(chosen.tls)
        handshake.use(chosen.hello)
        run(token, chosen.replica, chosen.host, chosen.port, chosen.linger, chosen.guard, chosen.generation)
    except FtHsdpError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
