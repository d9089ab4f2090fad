"""A rank's end of the state agent of its host, which keeps the rank's snapshots when the rank dies.

`StateAgent` is the connection to it. The rank writes into memory that the agent owns; only orders are sent
(GEMINI §5.1: checkpoints in host memory). `Starter` starts the agent of a replica in a process of its own, and
replaces one that no longer answers.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ft_hsdp import handshake, protocol
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import FtHsdpError, ProtocolViolation
from ft_hsdp.handshake import Purpose
from ft_hsdp.secret import TOKEN_VARIABLE
from ft_hsdp.state import shared_memory
from ft_hsdp.state.agent import messages
from ft_hsdp.state.agent.messages import CompleteSnapshot
from ft_hsdp.state.shared_memory import Bytes

RETRY_S = 0.02
# How long the first attempt to connect waits for an answer; each later one waits twice as long. An attempt is cut
# short because a newer agent may have come up beside a frozen one.
GREET_S = 1.0
_FD_SPACE = socket.CMSG_SPACE(4)  # bytes of one file descriptor


class AgentGone(FtHsdpError):
    """There is no state agent, or it no longer answers. Connect again: another one may take its place."""


class StateAgent:
    """A rank's connection to its state agent; made by `connect`. Thread-safe; one snapshot is written at a time.

    Every method but `close` blocks for the agent's answer, and raises AgentGone if the agent is gone or does not
    answer within ``deadline_s``. After that every call raises AgentGone at once.
    """

    def __init__(self, connection: _AgentSocket, address: str, nbytes: int, deadline_s: float) -> None:
        self.address = address  # "host:port" at which the agent serves snapshots over HTTP
        self.busy = ""  # why the last `stage` got no slot
        # Snapshots that the agent dropped as damaged; the caller clears the list.
        self.damaged: list[messages.Damage] = []
        self._nbytes = nbytes
        self.deadline_s = deadline_s  # of each call; may be changed
        self._lock = threading.Lock()  # held for one order and its answer
        self._socket: _AgentSocket | None = connection
        self._maps: dict[int, Bytes] = {}  # the mapped slots by number
        self._open: int | None = None  # the slot that may be written
        self._number = 0  # of the slot that `stage` returned last

    @staticmethod
    def connect(
        token: str, replica: int, rank: int, ranks: int, nbytes: int, deadline_s: float, name: str = ""
    ) -> StateAgent:
        """Connect to the state agent of ``replica`` on this host, instead of an older connection. Blocks.

        Waits for an agent that does not listen yet. If the agent has snapshots of this rank with another ``ranks``
        or ``nbytes``, it drops them.

        Args:
            token: The job's token.
            replica: The replica id.
            rank: This rank within its replica.
            ranks: The number of ranks of the replica.
            nbytes: The size of each snapshot in bytes.
            deadline_s: How long to wait for the agent. Later calls wait as long for their answers; the first
                `stage` may have to wait until the agent has allocated two snapshots.
            name: That of this host, if its machine has several.

        Raises:
            AgentGone: No agent answered within ``deadline_s``, or what listens does not know the token.
        """
        end, patience_s = time.monotonic() + deadline_s, GREET_S
        while True:
            until = min(end, time.monotonic() + patience_s)
            patience_s *= 2
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.settimeout(max(RETRY_S, until - time.monotonic()))
                connect_newest(sock, token, replica, name)
                handshake.call_blocking(sock, token, Purpose.AGENT)
                connection = _AgentSocket(sock, until)
                address = str(connection.ask(messages.Hello(rank, ranks, nbytes), messages.Welcome).address)
                return StateAgent(connection, address, nbytes, deadline_s)
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
        """Return memory to write ``state`` into, or None if there is no slot: then this snapshot is left out.

        The caller must have stopped writing the snapshot before: if it was not `staged`, it is abandoned.

        Returns:
            uint8 [nbytes] in the agent's memory, writable until `staged`. ``busy`` says why there is none.
        """
        with self._exchange() as connection:
            answer = connection.ask(messages.Stage(state), messages.SlotGranted, messages.Busy)
            if isinstance(answer, messages.Busy):
                self.busy = answer.reason
                return None
            if answer.new:
                self._maps[answer.number] = connection.map_segment(self._nbytes, writable=True)
            self._maps = {number: self._maps[number] for number in answer.slots if number in self._maps}
            self._close_slot()
            shared_memory.protect(self._maps[answer.number], writable=True)
            self._open = self._number = answer.number
            return self._maps[answer.number]

    def staged(self, state: StateId, header: bytes) -> None:
        """Mark ``state``, whose bytes are all written, as complete. Its memory becomes read-only.

        Args:
            state: The state of the last `stage`.
            header: Its encoded manifest, which the agent keeps with it.

        Raises:
            ProtocolViolation: ``state`` is not the one that was staged last, or was dropped by `forget` since.
        """
        with self._exchange() as connection:
            self._close_slot()
            answer = connection.ask(
                messages.Staged(state), messages.Done, messages.OrderRefused, more=protocol.framed(header)
            )
        if isinstance(answer, messages.OrderRefused):
            raise ProtocolViolation(answer.reason)
        self.damaged += answer.damaged

    def mark_settled(self, state: StateId, everywhere: bool = True) -> None:
        """Tell the agent whether all ranks of the replica have staged ``state``.

        If ``everywhere``, older snapshots may be overwritten. Otherwise some rank left it out, and the newest
        settled one stays.
        """
        self._order(messages.Settle(state, everywhere))

    def pin(self, state: StateId, seconds: float) -> None:
        """Keep ``state``, now or once it is complete, for ``seconds``. Replaces the pin before."""
        self._order(messages.Pin(state, seconds))

    def unpin(self) -> None:
        """Remove the pin, and release the snapshot that was acquired."""
        self._order(messages.Unpin())

    def list(self) -> tuple[CompleteSnapshot, ...]:
        """Return the complete snapshots of this rank, newest first."""
        with self._exchange() as connection:
            held: tuple[CompleteSnapshot, ...] = connection.ask(messages.Recall(), messages.Recalled).held
            return held

    def acquire(self, state: StateId) -> tuple[Bytes, bytes] | None:
        """Return a complete snapshot, whose bytes were compared with their checksums, or None.

        None: there is no such snapshot, or it is damaged. The memory does not change until `unpin`, the next
        `acquire` or `close`.

        Returns:
            (read-only uint8 [nbytes], encoded manifest).
        """
        with self._exchange() as connection:
            answer = connection.ask(messages.Take(state), messages.Taken, messages.Absent)
            if isinstance(answer, messages.Absent):
                self.damaged += answer.damaged
                return None
            header = connection.read(messages.MAX_HEADER)
            return connection.map_segment(self._nbytes, writable=False), header

    def forget(self) -> None:
        """Drop all snapshots of this rank."""
        self._order(messages.Forget())

    def flip(self) -> None:
        """Flip a bit of the snapshot that was staged last, as broken memory would. Only for fault injection."""
        written = self._maps[self._number]
        shared_memory.protect(written, writable=True)
        written[len(written) // 2] ^= 1
        shared_memory.protect(written, writable=False)

    def close(self) -> None:
        """Close the connection. A call that waits on another thread ends with AgentGone.

        The agent keeps what is complete. No thread may write into a snapshot any more.
        """
        connection = self._socket
        if connection is not None:
            connection.shut_down()
        with self._lock:
            self._hang_up()

    def _order(self, order: object) -> None:
        with self._exchange() as connection:
            self.damaged += connection.ask(order, messages.Done).damaged

    def _close_slot(self) -> None:
        """Make the slot that was written last read-only, so that not even a stray write changes it."""
        written = None if self._open is None else self._maps.get(self._open)
        self._open = None
        if written is not None:
            shared_memory.protect(written, writable=False)

    @contextlib.contextmanager
    def _exchange(self) -> Iterator[_AgentSocket]:
        """Lend the connection for one order and its answer. An error ends the connection and becomes AgentGone."""
        if not self._lock.acquire(timeout=self.deadline_s):
            raise AgentGone(f"the state agent did not answer another call within {self.deadline_s:g} s")
        try:
            if self._socket is None:
                raise AgentGone("the connection to the state agent is closed")
            self._socket.end = time.monotonic() + self.deadline_s
            yield self._socket
        except (OSError, ValueError, LookupError, ProtocolViolation) as error:
            self._hang_up()
            raise AgentGone(f"the state agent is gone: {error or type(error).__name__}") from error
        finally:
            self._lock.release()

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._maps = {}
        self._open = None


def connect_newest(sock: socket.socket, token: str, replica: int, name: str = "") -> int:
    """Connect ``sock`` to the newest agent of a replica on this host, and return its generation.

    Args:
        sock: A Unix socket.
        token: The job's token.
        replica: The replica id.
        name: That of this host, if its machine has several.

    Raises:
        BlockingIOError: An agent is there, but its queue of connections is full (a non-blocking ``sock``).
        OSError: No agent is there.
    """
    for generation in reversed(range(messages.GENERATIONS)):
        try:
            sock.connect(messages.agent_name(token, replica, generation, name))
        except ConnectionRefusedError:
            continue
        return generation
    raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


class _AgentSocket:
    """Reads and writes frames on a connected Unix socket. Blocks until ``end`` at most, on the monotonic clock."""

    def __init__(self, sock: socket.socket, end: float) -> None:
        self._sock = sock
        self.end = end
        self._fds: list[int] = []  # received and not yet mapped

    def ask(self, order: object, *answers: type, more: bytes = b"") -> Any:
        """Send an order and return its answer, which must be of one of the classes in ``answers``.

        Raises:
            OSError: The agent hung up, or did not answer in time.
            ProtocolViolation: The agent answered something else.
        """
        self._wait()
        self._sock.sendall(messages.frame(order) + more)
        return messages.decode(self.read(messages.MAX_MESSAGE), *answers)

    def read(self, most: int) -> bytes:
        """Return the next frame, and remember the file descriptors that come with it."""
        prefix = b""
        while len(prefix) < protocol.LENGTH.size:
            self._wait()
            part, ancillary, _, _ = self._sock.recvmsg(
                protocol.LENGTH.size - len(prefix), _FD_SPACE, socket.MSG_CMSG_CLOEXEC
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

    def map_segment(self, nbytes: int, *, writable: bool) -> Bytes:
        """Map the segment whose file descriptor came with the last answer."""
        fd = self._fds.pop()
        try:
            return shared_memory.attach(fd, nbytes, writable=writable)
        finally:
            os.close(fd)

    def shut_down(self) -> None:
        """Make every call that waits on the socket fail. Called from any thread."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection and the file descriptors that were not mapped."""
        self._sock.close()
        while self._fds:
            os.close(self._fds.pop())

    def _wait(self) -> None:
        left = self.end - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        self._sock.settimeout(left)


LOAD_S = 60.0  # after which an agent that was started and does not listen is killed
KILLED_S = 5.0  # to wait for a killed agent to be gone: freeing much memory takes time
_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid


@dataclass(slots=True)
class Starter:
    """Starts the state agent of one replica on this host."""

    token: str
    replica: int
    host: str  # at which the agent serves snapshots over HTTP
    guard: int  # the agent ends with the process of this id
    log: Path
    linger_s: float  # the agent ends when no rank was connected for so long
    tls: str = "auto"  # network.tls
    name: str = ""  # of this host, if its machine has several
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)  # agents outlive this process
    began: float = 0.0  # when the last one was started

    def ensure(self, port: int = 0) -> None:
        """Start an agent on ``port`` (0: any), unless one listens or is being started. Does not wait for it."""
        if self._found() is None and not self._loading:
            self._start(port, 0)

    def renew(self, port: int = 0) -> str:
        """Kill the agent that listens but does not answer, and start another. Blocks for at most KILLED_S.

        An agent that does not die keeps its name and port; the new one gets the next name. If none listens, this
        is `ensure`.

        Returns:
            What was done, in words; "" if nothing had to be replaced.
        """
        found = self._found()
        if found is None:
            self.ensure(port)
            return ""
        generation, pid = found
        if self._kill(pid):
            self._start(port, 0)
            return f"the state agent (pid {pid}) did not answer and was killed, another one is started"
        if generation + 1 < messages.GENERATIONS:
            self._start(0, generation + 1)
            return f"the state agent (pid {pid}) neither answers nor dies, another one is started beside it"
        return ""

    @property
    def _loading(self) -> bool:
        """Whether an agent that was started here still runs, asked when none listens. Kills one after LOAD_S."""
        for process in tuple(self.started):  # in place: the writer's thread may be adding one
            if process.poll() is not None:
                with contextlib.suppress(ValueError):  # that thread has removed it
                    self.started.remove(process)
        if self.started and time.monotonic() - self.began > LOAD_S:
            self.started[-1].kill()
            return False
        return bool(self.started)

    def _start(self, port: int, generation: int) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        place = ("--replica", str(self.replica), "--host", self.host, "--port", str(port))
        name = ("--generation", str(generation), *(("--name", self.name) if self.name else ()))
        life = (
            "--guard",
            str(self.guard),
            "--linger",
            str(self.linger_s),
            "--tls",
            self.tls,
            "--hello",
            str(handshake.hello_s()),
        )
        # A forked rank has its fork server's session, which no terminal ends; its supervisor reaps all in it.
        detached = os.getsid(0) != os.getsid(os.getppid())
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "ft_hsdp.state.agent.server", *place, *name, *life],
                env={**os.environ, TOKEN_VARIABLE: self.token},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=not detached,
                process_group=0 if detached else None,
            )
        self.started.append(process)
        self.began = time.monotonic()

    def _found(self) -> tuple[int, int] | None:
        """Return (generation, pid) of the newest agent that listens, or None. Never blocks. pid 0: unknown."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            try:
                generation = connect_newest(sock, self.token, self.replica, self.name)
                pid = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[0]
            except BlockingIOError:
                return self._crowded()
            except OSError:
                return None
            return generation, int(pid)

    def _crowded(self) -> tuple[int, int]:
        """Return (generation, pid) of an agent whose queue of connections is full.

        The pid is known only if the agent was started here.
        """
        living = [process.pid for process in self.started if process.poll() is None]
        return 0, living[-1] if living else 0

    def _kill(self, pid: int) -> bool:
        """Kill the agent with this pid, and return whether no agent listens any more."""
        if pid <= 0:
            return False
        try:
            process = os.pidfd_open(pid)
        except OSError:
            return self._found() is None
        try:
            if self._found() not in [(g, pid) for g in range(messages.GENERATIONS)]:
                return self._found() is None  # that agent ended meanwhile, and its pid may be another process's
            signal.pidfd_send_signal(process, signal.SIGKILL)
            poll = select.poll()
            poll.register(process, select.POLLIN)
            poll.poll(KILLED_S * 1e3)
        except ProcessLookupError:
            pass
        finally:
            os.close(process)
        return self._found() is None
