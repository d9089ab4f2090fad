"""Door: where the ranks of a replica connect to the state agent of their host and prove that they know the token.

Whoever does not in time is hung up on. A rank has one connection: a newer one supersedes the older. Losing one
loses nothing that is complete.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket

from ft_hsdp import handshake
from ft_hsdp.errors import LocalResourceError, ProtocolViolation, Retryable
from ft_hsdp.handshake import Admitted, Gate, Purpose
from ft_hsdp.state import messages
from ft_hsdp.state.holdings import Holdings, Owner
from ft_hsdp.state.messages import Hello, Welcome
from ft_hsdp.state.session import Line, Session

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


class Door:
    """Lets ranks in at ``sock``; ``address`` is where the agent serves over HTTP."""

    def __init__(self, sock: socket.socket, token: str, holdings: Holdings, address: str) -> None:
        self._sock = sock
        self._token = token
        self._holdings = holdings
        self._address = address
        self._tasks: set[asyncio.Task[None]] = set()
        self._ranks: dict[int, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    async def serve(self) -> None:
        """Let ranks in until cancelled."""
        gate = Gate(self._token, (Purpose.AGENT,), self._admitted, self._failed)
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
                line = Line(sock)
                async with asyncio.timeout(handshake.hello_s()):
                    hello: Hello = messages.decode(await line.read(MAX_HELLO), Hello)
                await self._rank(line, hello)
            except ProtocolViolation as error:
                _log.warning("hung up: %s", error)
            except OSError as error:
                _log.debug("gone: %s", error)

    async def _rank(self, line: Line, hello: Hello) -> None:
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
            await Session(line, rank, self._holdings).run()
        except OSError:
            dead = True
            raise
        finally:
            self._holdings.left(rank, dead=dead)
            del self._ranks[rank]
            self._changed.set()
