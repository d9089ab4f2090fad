"""Neighbour: one edge of a ring as it stands: the control connection, and the data connection beside it.

An edge outlives its epoch if the next ring has the same two members side by side and no all-reduce broke on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from typing import Any

from ft_hsdp import fault_injection
from ft_hsdp.core.commit import CommitToken
from ft_hsdp.core.grant import Member
from ft_hsdp.errors import ProtocolViolation
from ft_hsdp.ftar import wire
from ft_hsdp.ftar.transport.base import Receiver, Sender
from ft_hsdp.protocol import RingAbort, RingBarrier, RingBeat, RingHello, RingWelcome
from ft_hsdp.record_layer import within_host

_MESSAGES = (CommitToken, RingAbort, RingHello, RingWelcome, RingBarrier, RingBeat)
Heard = Callable[["Peer", object], None]


class Peer:
    """The member at the other end of ``sock``. ``heard`` gets its messages, and at the end an OSError that says
    how the connection ended. On the control loop.

    heard_at: when its last bytes came (monotonic seconds); newest: its newest beat, in whatever epoch.
    """

    def __init__(self, sock: socket.socket, heard: Heard) -> None:
        self._sock = sock
        self._heard = heard
        self.member: Member | None = None
        self.receiver: Receiver | None = None
        self.sender: Sender | None = None
        self.transport = ""
        self.gone = False
        self.leaving = False
        self.heard_at = time.monotonic()
        self.newest = RingBeat(0, 0, 0)
        self.same_host = within_host(sock)  # then the neighbour's process can be looked at here
        self._closed = False
        self._reading: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()

    @property
    def _replica(self) -> int | None:
        return None if self.member is None else self.member.replica

    def listen(self) -> None:
        """Begin to read, unless it is being read, or all is over."""
        if self._reading is None and not self.gone:
            self._reading = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        end: Exception = ConnectionResetError("closed its connection")
        try:
            while (message := await wire.receive(self._sock, *_MESSAGES, heard=self._lives)) is not None:
                if isinstance(message, RingBeat):
                    self.newest = message
                else:
                    self._heard(self, message)
        except OSError as error:
            end = ConnectionResetError(str(error))
        except ProtocolViolation as error:
            end = error
        self.gone = True
        self._heard(self, end)

    def _lives(self) -> None:
        self.heard_at = time.monotonic()

    def send_heartbeat(self, frame: bytes) -> None:
        """Send a sign of life, unless something else is being sent, which is one too. If only a part of it can be
        sent, the neighbour has not read for long, and the connection is of no more use."""
        if self.gone or self._writing.locked() or fault_injection.cut(self._replica):
            return
        with contextlib.suppress(OSError):
            if self._sock.send(frame, socket.MSG_DONTWAIT) < len(frame):
                self._sock.shutdown(socket.SHUT_RDWR)

    def say(self, message: object) -> None:
        """Send a small message now; a neighbour that is gone, or does not read, shows by its end."""
        if not self.gone and not self._writing.locked() and not fault_injection.cut(self._replica):
            wire.say(self._sock, message)

    async def send(self, message: object) -> None:
        """Send a message of any size.

        Raises:
            OSError: the neighbour is gone.
        """
        async with self._writing:
            if self._replica is not None:
                await fault_injection.passes(self._replica, given_up=lambda: self.gone)
            if self.gone:
                raise ConnectionResetError("closed its connection")
            await wire.send(self._sock, message)

    def cut(self) -> None:
        """Say nothing more, and stop the data connection; whoever uses it gets an error."""
        self.gone = True
        for end in (self.receiver, self.sender):
            if end is not None:
                end.close()

    def release(self) -> None:
        """The data connection is the ring's: its engine uses it, and lets it go."""
        self.receiver = self.sender = None

    async def close(self) -> None:
        """Hang up, once; let go of a data connection that no ring has."""
        if self._closed:
            return
        self._closed = self.gone = True
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        ends: list[Any] = [e for e in (self.receiver, self.sender) if e is not None]
        self.receiver = self.sender = None
        for end in ends:
            end.close()
            await asyncio.to_thread(end.dispose)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
        async with self._writing:  # who still sends gets an error first: the loop must not watch a closed socket
            await wire.hang_up(self._sock)
