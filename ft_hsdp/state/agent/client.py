"""StateAgent: a rank's line to the state agent of its host, which keeps its snapshots when the rank dies.

The rank writes into the agent's memory; nothing is sent but orders. (GEMINI §5.1: checkpoints in host memory.)
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from ft_hsdp import handshake, protocol
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import FtHsdpError, ProtocolViolation
from ft_hsdp.handshake import Purpose
from ft_hsdp.state import shared_memory
from ft_hsdp.state.agent import messages
from ft_hsdp.state.agent.messages import (
    Absent,
    Busy,
    Damage,
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
from ft_hsdp.state.agent.slots import CompleteSnapshot
from ft_hsdp.state.shared_memory import Bytes

RETRY_S = 0.02
GREET_S = 1.0  # for an agent to let somebody in, the first time; twice as long each time: a newer one may be there
_ROOM = socket.CMSG_SPACE(4)  # for one descriptor


class AgentGone(FtHsdpError):
    """The state agent is not there, or not any more: connect again, to the next one."""


class StateAgent:
    """A connection of one rank; made by `connect`. Thread-safe; one snapshot is written at a time.

    ``address`` ("host:port") is where the agent serves snapshots over HTTP; ``busy`` says why the last `stage`
    got no slot; ``damaged`` are the copies that it found damaged and has dropped, until somebody clears it. Every
    call but `close` raises AgentGone where the agent is gone or does not answer within ``deadline_s``, which is
    the one of `connect` unless it is set.
    """

    def __init__(self, line: _AgentSocket, address: str, nbytes: int, deadline_s: float) -> None:
        self.address = address
        self.busy = ""
        self.damaged: list[Damage] = []
        self._nbytes = nbytes
        self.deadline_s = deadline_s
        self._lock = threading.Lock()
        self._line: _AgentSocket | None = line
        self._maps: dict[int, Bytes] = {}
        self._open: int | None = None  # the slot that may be written
        self._number = 0  # of the slot that was given last

    @staticmethod
    def connect(token: str, replica: int, rank: int, ranks: int, nbytes: int, deadline_s: float) -> StateAgent:
        """Connect as ``rank`` of ``ranks``, whose snapshots have ``nbytes`` bytes; supersedes an older connection.

        An agent that is not there yet is waited for. What the rank left behind under another ``ranks`` or
        ``nbytes`` is of no use: the agent forgets it. ``deadline_s`` holds for every later call too; the first
        `stage` may have to wait for the memory of two snapshots.

        Raises:
            AgentGone: no agent let it in within ``deadline_s`` seconds, or what listens does not know the token.
        """
        end, patience_s = time.monotonic() + deadline_s, GREET_S
        while True:
            until = min(end, time.monotonic() + patience_s)
            patience_s *= 2
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.settimeout(max(RETRY_S, until - time.monotonic()))
                newest(sock, token, replica)
                handshake.call_blocking(sock, token, Purpose.AGENT)
                line = _AgentSocket(sock, until)
                address = str(line.ask(Hello(rank, ranks, nbytes), Welcome).address)
                return StateAgent(line, address, nbytes, deadline_s)
            except ProtocolViolation as error:
                sock.close()
                raise AgentGone(f"not the state agent of replica {replica}: {error}") from error
            except OSError as error:
                sock.close()
                if time.monotonic() + RETRY_S > end:
                    why = f"no state agent of replica {replica} within {deadline_s:g} s ({error})"
                    raise AgentGone(why) from error
            time.sleep(RETRY_S)

    def stage(self, state: StateId) -> Bytes | None:
        """Where to write ``state``, uint8 [nbytes]; None: there is no slot, that snapshot is left out.

        Who stages again has stopped writing: what was not `staged` is given up.
        """
        with self._talking() as line:
            answer = line.ask(Stage(state), SlotGranted, Busy)
            if isinstance(answer, Busy):
                self.busy = answer.reason
                return None
            if answer.new:
                self._maps[answer.number] = line.mapped(self._nbytes, writable=True)
            self._maps = {number: self._maps[number] for number in answer.slots if number in self._maps}
            self._close_slot()
            shared_memory.protect(self._maps[answer.number], writable=True)
            self._open = self._number = answer.number
            return self._maps[answer.number]

    def staged(self, state: StateId, header: bytes) -> None:
        """All bytes of ``state`` are written, and can be written no more. ``header``: its manifest, kept with it.

        Raises:
            ProtocolViolation: ``state`` is not what was staged last, or was forgotten since.
        """
        with self._talking() as line:
            self._close_slot()
            answer = line.ask(Staged(state), Done, OrderRefused, more=protocol.framed(header))
        if isinstance(answer, OrderRefused):
            raise ProtocolViolation(answer.reason)
        self.damaged += answer.damaged

    def mark_settled(self, state: StateId, everywhere: bool = True) -> None:
        """All ranks of the replica have staged ``state``: older ones may go. Not ``everywhere``: some have not."""
        self._order(Settle(state, everywhere))

    def pin(self, state: StateId, seconds: float) -> None:
        """Keep ``state``, if it is here or comes, for members that fetch it; one at a time, the newest."""
        self._order(Pin(state, seconds))

    def unpin(self) -> None:
        """Keep nothing that was pinned or taken."""
        self._order(Unpin())

    def list(self) -> tuple[CompleteSnapshot, ...]:
        """The snapshots of this rank that are complete, newest first."""
        with self._talking() as line:
            held: tuple[CompleteSnapshot, ...] = line.ask(Recall(), Recalled).held
            return held

    def acquire(self, state: StateId) -> tuple[Bytes, bytes] | None:
        """(read-only uint8 [nbytes], header) of a complete snapshot; None: it is not here, or it is damaged.

        Its bytes were compared with their checksums. It does not change until `unpin`, the next `take` or `close`.
        """
        with self._talking() as line:
            answer = line.ask(Take(state), Taken, Absent)
            if isinstance(answer, Absent):
                self.damaged += answer.damaged
                return None
            header = line.read(messages.MAX_HEADER)
            return line.mapped(self._nbytes, writable=False), header

    def forget(self) -> None:
        """Drop all snapshots of this rank."""
        self._order(Forget())

    def flip(self) -> None:
        """Flip a bit of what was staged last, as broken memory would: a failpoint."""
        written = self._maps[self._number]
        shared_memory.protect(written, writable=True)
        written[len(written) // 2] ^= 1
        shared_memory.protect(written, writable=False)

    def close(self) -> None:
        """Hang up; a call that waits ends. What is complete is kept. Who writes a snapshot has to stop before."""
        line = self._line
        if line is not None:
            line.shut()
        with self._lock:
            self._hang_up()

    def _order(self, order: object) -> None:
        with self._talking() as line:
            self.damaged += line.ask(order, Done).damaged

    def _close_slot(self) -> None:
        """What was written last can be written no more, not even by mistake."""
        written = None if self._open is None else self._maps.get(self._open)
        self._open = None
        if written is not None:
            shared_memory.protect(written, writable=False)

    @contextlib.contextmanager
    def _talking(self) -> Iterator[_AgentSocket]:
        """The connection, for one order and its answer; what fails there ends it."""
        if not self._lock.acquire(timeout=self.deadline_s):
            raise AgentGone(f"the state agent did not answer another call within {self.deadline_s:g} s")
        try:
            if self._line is None:
                raise AgentGone("the connection to the state agent is closed")
            self._line.end = time.monotonic() + self.deadline_s
            yield self._line
        except (OSError, ValueError, LookupError, ProtocolViolation) as error:
            self._hang_up()
            raise AgentGone(f"the state agent is gone: {error or type(error).__name__}") from error
        finally:
            self._lock.release()

    def _hang_up(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None
        self._maps = {}
        self._open = None


def newest(sock: socket.socket, token: str, replica: int) -> int:
    """Connect to the newest agent of a replica on this host; its generation.

    Raises:
        BlockingIOError: one is there, but takes no more connections.
        OSError: none is there.
    """
    for generation in reversed(range(messages.GENERATIONS)):
        try:
            sock.connect(messages.agent_name(token, replica, generation))
        except ConnectionRefusedError:
            continue
        return generation
    raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


class _AgentSocket:
    """Frames on a connected Unix socket, blocking until ``end`` at most, on the monotonic clock."""

    def __init__(self, sock: socket.socket, end: float) -> None:
        self._sock = sock
        self.end = end
        self._fds: list[int] = []

    def ask(self, order: object, *answers: type, more: bytes = b"") -> Any:
        """Send an order and get its answer.

        Raises:
            OSError: the agent hung up or is too late.
            ProtocolViolation: it answered something else.
        """
        self._wait()
        self._sock.sendall(messages.frame(order) + more)
        return messages.decode(self.read(messages.MAX_MESSAGE), *answers)

    def read(self, most: int) -> bytes:
        """The next frame, and the descriptor that comes with it."""
        prefix = b""
        while len(prefix) < protocol.LENGTH.size:
            self._wait()
            part, ancillary, _, _ = self._sock.recvmsg(
                protocol.LENGTH.size - len(prefix), _ROOM, socket.MSG_CMSG_CLOEXEC
            )
            for level, kind, data in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    self._fds += memoryview(data).cast("i").tolist()
            if not part:
                raise ConnectionResetError("it hung up")
            prefix += part
        frame = bytearray(protocol.frame_length(prefix, most))
        view = memoryview(frame)
        while view:
            self._wait()
            got = self._sock.recv_into(view)
            if not got:
                raise ConnectionResetError("it hung up")
            view = view[got:]
        return bytes(frame)

    def mapped(self, nbytes: int, *, writable: bool) -> Bytes:
        """The segment whose descriptor came with the last answer."""
        fd = self._fds.pop()
        try:
            return shared_memory.attach(fd, nbytes, writable=writable)
        finally:
            os.close(fd)

    def shut(self) -> None:
        """Wake whoever waits."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()
        while self._fds:
            os.close(self._fds.pop())

    def _wait(self) -> None:
        left = self.end - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        self._sock.settimeout(left)
