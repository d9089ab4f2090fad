"""The state agent of one replica on this host: ``python -m ft_hsdp.state.agent.server --replica R --host H``.

The agent owns the memory that the replica's ranks write their snapshots into, so the death of the trainers does
not touch it. It gives the snapshots to the ranks that come after them, and serves them to other replicas over HTTP
(FT-HSDP §4.4). The job's token is read from FT_HSDP_TOKEN. Once it listens, it prints the JSON line {"pid",
"address"}.

Ranks connect to a Unix socket and prove that they know the token; a caller that does not prove it in time is
disconnected. A rank has one connection: a newer one supersedes the older. A complete snapshot outlives its
connection.

`AgentListener` accepts the ranks, and `run` ties it to the HTTP server and to the process's end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from ft_hsdp import caller_gate, record_layer
from ft_hsdp.caller_gate import CallerGate
from ft_hsdp.errors import EXIT_OK, ConfigError, FtHsdpError, LocalResourceError, ProtocolViolation, Retryable
from ft_hsdp.handshake import Admitted, Purpose
from ft_hsdp.lifetime import outlive_notices, stop_signals
from ft_hsdp.secret import TOKEN_VARIABLE
from ft_hsdp.state.agent import messages
from ft_hsdp.state.agent.copies import CopyFetcher
from ft_hsdp.state.agent.session import AgentConnection, Session
from ft_hsdp.state.agent.store import SnapshotStore
from ft_hsdp.state.pacing import Pacer
from ft_hsdp.state.transfer.http import StateServer

MAX_HELLO = 1024  # bytes
LINGER_S = 60.0  # without a rank, until the agent ends

_log = logging.getLogger(__name__)


def listen(token: str, replica: int, generation: int = 0, name: str = "") -> socket.socket:
    """Return a listening socket at the agent's name. The name is free again as soon as its owner is gone.

    Args:
        generation: As in `messages.agent_name`.
        name: The host's, as ``host`` there.

    Raises:
        Retryable: another agent has the name.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(messages.agent_name(token, replica, generation, name))
        sock.listen(caller_gate.BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise Retryable(f"replica {replica} has a state agent on {name or 'this host'} already") from None
        raise
    return sock


class AgentListener:
    """Accepts the ranks that call at ``sock``, on the running loop.

    Args:
        sock: Bound and listening, from `listen`.
        copies: What fetches copies of other hosts' shards into it.
        address: "host:port" at which the agent serves over HTTP; told to each rank.
    """

    def __init__(
        self,
        sock: socket.socket,
        token: str,
        store: SnapshotStore,
        copies: CopyFetcher,
        address: str,
        pacer: Pacer | None = None,
    ) -> None:
        self._sock = sock
        self._token = token
        self._store = store
        self._copies = copies
        self._address = address
        self._pacer = pacer or Pacer()
        self._tasks: set[asyncio.Task[None]] = set()
        # The connections of each rank, by what they are for.
        self._lines: dict[tuple[messages.Line, int], asyncio.Task[None]] = {}
        self._changed = asyncio.Event()  # which of them there are

    async def serve(self) -> None:
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
        _log.warning("cannot accept connections: %s", error)

    def _admitted(self, proved: Admitted, sock: socket.socket) -> None:
        task = asyncio.get_running_loop().create_task(self._connection(sock))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def wait_until_idle(self, seconds: float) -> None:
        while True:
            self._changed.clear()
            busy = any(line != "copies" for line, _ in self._lines)
            try:
                async with asyncio.timeout(None if busy else seconds):
                    await self._changed.wait()
            except TimeoutError:
                return

    async def _connection(self, sock: socket.socket) -> None:
        with sock:
            try:
                connection = AgentConnection(sock)
                async with asyncio.timeout(caller_gate.hello_s()):
                    first = await connection.read(MAX_HELLO)
                    hello = messages.decode(first, messages.Hello)
                await self._serve(connection, hello)
            except ProtocolViolation as error:
                _log.warning("hung up: %s", error)
            except OSError as error:
                _log.debug("a caller is gone: %s", error)

    async def _serve(self, connection: AgentConnection, hello: messages.Hello) -> None:
        """Serve a connection, in place of an older one of that rank for the same."""
        line = hello.line, hello.rank
        while (older := self._lines.get(line)) is not None:
            _log.info("rank %d: a newer connection supersedes the older", hello.rank)
            older.cancel()
            await asyncio.wait([older])
        task = asyncio.current_task()
        assert task is not None
        self._lines[line] = task
        self._changed.set()
        try:
            await Session(connection, hello, self._store, self._copies, self._pacer).run(self._address)
        finally:
            del self._lines[line]
            self._changed.set()


@contextlib.contextmanager
def watching(guard: int | None, ended: Callable[[], object]) -> Iterator[None]:
    """Call ``ended`` on the running loop once the process with id ``guard`` has ended. None: never."""
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


async def serve(listener: AgentListener, linger_s: float, guard: int | None, ready: dict[str, object]) -> None:
    """Print ``ready`` as a JSON line, and serve until the agent is to end.

    It ends on SIGTERM, SIGINT or SIGHUP, when the process ``guard`` ends, or when for ``linger_s`` seconds no rank
    was connected, and no launcher has visited it (`starter.visit`). With a ``guard`` it ignores these signals:
    whoever stops all processes of a job at once signals it, too, and its ranks leave with a last state. It ignores
    `lifetime.NOTICES` in any case.
    """
    stopped = asyncio.Event()
    outlive_notices()
    for number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(number, stopped.set if guard is None else _note_signal)
    with watching(guard, stopped.set):
        await _serve(listener, linger_s, stopped, ready)


def _note_signal() -> None:
    _log.info("told to end: it ends with the process that started its rank")


async def _serve(
    listener: AgentListener, linger_s: float, stopped: asyncio.Event, ready: dict[str, object]
) -> None:
    serving = asyncio.create_task(listener.serve())
    ends = {asyncio.create_task(stopped.wait()), asyncio.create_task(listener.wait_until_idle(linger_s))}
    sys.stdout.write(json.dumps(ready) + "\n")
    sys.stdout.flush()
    done, _ = await asyncio.wait({serving, *ends}, return_when=asyncio.FIRST_COMPLETED)
    if serving not in done:
        _log.info("ends: %s", "by request" if stopped.is_set() else f"no rank connected for {linger_s:g} s")
        for task in (serving, *ends):
            task.cancel()
        await asyncio.wait({serving, *ends})
    if not serving.cancelled():
        serving.result()


def run(
    token: str,
    replica: int,
    host: str,
    port: int,
    linger_s: float,
    guard: int | None,
    generation: int = 0,
    name: str = "",
) -> None:
    """Run the state agent until it is told to stop. Blocks.

    Args:
        host: Where it serves over HTTP.
        linger_s: It ends when no rank was connected for so long.
        guard: It ends with the process of this id; None for no process.
        generation: The number in its name; see `messages.agent_name`.
        name: That of its host, if the machine has several.

    Raises:
        ConfigError: ``host`` or ``port`` cannot be used.
        Retryable: Another agent of that replica runs on this host.
    """
    with listen(token, replica, generation, name) as sock:
        store = SnapshotStore(replica, name or socket.gethostname())
        copies, pacer = CopyFetcher(store, token), Pacer()
        try:
            server = StateServer(host, port, store, token, pacer)
        except OSError as error:
            raise ConfigError(
                "--host, --port", f"{host}:{port}", f"a free address here ({error.strerror})"
            ) from None
        try:
            listener = AgentListener(sock, token, store, copies, server.address, pacer)
            ready = {"pid": os.getpid(), "address": server.address}
            asyncio.run(serve(listener, linger_s, guard, ready))
        finally:
            server.close()
            copies.close()
            store.close()


class _Arguments(argparse.ArgumentParser):
    """A parser that reports an error as one line, with exit code 64."""

    def error(self, message: str) -> NoReturn:
        allowed = f"--replica R --host H [--name N] [--port P] [--linger SECONDS] [--guard PID] ({message})"
        raise ConfigError("arguments", " ".join(sys.argv[1:]), allowed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments, run the agent and return the exit code. An error is one line on stderr."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,  # it may be a fork of a rank
    )
    parser = _Arguments(prog="python -m ft_hsdp.state.agent.server", description=__doc__)
    parser.add_argument("--replica", type=int, required=True, help="whose ranks' snapshots it keeps")
    parser.add_argument("--host", required=True, help="address to serve snapshots at")
    parser.add_argument("--name", default="", help="the host's name, if this machine has several hosts")
    parser.add_argument("--port", type=int, default=0, help="port to serve snapshots at; 0: any")
    parser.add_argument("--linger", type=float, default=LINGER_S, help="end when no rank was here for so many s")
    generations = range(messages.GENERATIONS)
    parser.add_argument("--generation", type=int, default=0, choices=generations, help="the number of its name")
    parser.add_argument("--tls", choices=("auto", "on", "off"), default="auto", help="as network.tls")
    parser.add_argument("--hello", type=float, default=caller_gate.HELLO_S, help="as timeouts.hello_s")
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
        caller_gate.use(chosen.hello)
        run(
            token,
            chosen.replica,
            chosen.host,
            chosen.port,
            chosen.linger,
            chosen.guard,
            chosen.generation,
            chosen.name,
        )
    except FtHsdpError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
