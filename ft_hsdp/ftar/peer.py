"""One edge of a ring: the control connection to a neighbour, and the data connection beside it.

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
    """The member at the other end of the control connection `sock`. Runs on the control loop.

    Args:
        sock: the connection, non-blocking and past the handshake.
        heard: called with (peer, message) for each message except heartbeats, and at the end with (peer, error),
            an OSError or ProtocolViolation that tells how the connection ended.
    """

    def __init__(self, sock: socket.socket, heard: Heard) -> None:
        self._sock = sock
        self._heard = heard
        self.member: Member | None = None  # known once HELLO was said or heard
        self.receiver: Receiver | None = None  # of the left neighbour
        self.sender: Sender | None = None  # of the right neighbour
        self.transport = ""  # of the data connection
        self.gone = False  # the connection has ended, or is not used any more
        self.leaving = False  # it has said that it leaves the ring: the end of its connection is no failure
        self.heard_at = time.monotonic()  # when its last bytes came, monotonic seconds
        self.newest = RingBeat(0, 0, 0)  # its last heartbeat, of any epoch
        self.same_host = within_host(sock)  # then its process can be inspected in /proc
        self._closed = False
        self._reading: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()

    @property
    def _replica(self) -> int | None:
        return None if self.member is None else self.member.replica

    def listen(self) -> None:
        """Begin to read messages, unless that was done before or the connection has ended."""
        if self._reading is None and not self.gone:
            self._reading = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        end: Exception = ConnectionResetError("closed its connection")
        try:
            while (message := await wire.receive(self._sock, *_MESSAGES, heard=self._note_life)) is not None:
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

    def _note_life(self) -> None:
        self.heard_at = time.monotonic()

    def send_heartbeat(self, frame: bytes) -> None:
        """Send an encoded heartbeat without waiting.

        It is left out while another message is being sent, since any bytes are a sign of life. If the kernel takes
        only a part of it, the peer has not read for a long time, and the connection is shut down.
        """
        if self.gone or self._writing.locked() or fault_injection.cut(self._replica):
            return
        with contextlib.suppress(OSError):
            if self._sock.send(frame, socket.MSG_DONTWAIT) < len(frame):
                self._sock.shutdown(socket.SHUT_RDWR)

    def say(self, message: object) -> None:
        """Send a small message now or not at all.

        A peer that is gone or does not read shows by the end of its connection.
        """
        if not self.gone and not self._writing.locked() and not fault_injection.cut(self._replica):
            wire.say(self._sock, message)

    async def send(self, message: object) -> None:
        """Send a message of any size; wait until the kernel has taken it.

        Raises:
            OSError: the connection has ended.
        """
        async with self._writing:
            if self._replica is not None:
                await fault_injection.passes(self._replica, given_up=lambda: self.gone)
            if self.gone:
                raise ConnectionResetError("closed its connection")
            await wire.send(self._sock, message)

    def cut(self) -> None:
        """Send no more messages, and close the data connection; its users get an error."""
        self.gone = True
        for end in (self.receiver, self.sender):
            if end is not None:
                end.close()

    def release(self) -> None:
        """Give the data connection to the ring alone, which disposes of it."""
        self.receiver = self.sender = None

    async def close(self) -> None:
        """Close the connection, and a data connection that no ring owns; wait until its threads have ended."""
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
        async with self._writing:  # a pending send gets its error first: the loop must not watch a closed socket
            await wire.hang_up(self._sock)
