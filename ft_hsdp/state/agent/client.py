"""A rank's end of the state agent of its host, which keeps the rank's snapshots when the rank dies.

`StateAgent` is the connection to it. The rank writes into memory that the agent owns; only orders are sent
(GEMINI §5.1: checkpoints in host memory). The rank also orders the copies of other hosts' shards that its host
has to keep; the agent fetches them. `BlockAgent` is another connection to it, for slices of block stores.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ft_hsdp import handshake, protocol
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import FtHsdpError, ProtocolViolation
from ft_hsdp.handshake import Purpose
from ft_hsdp.state import shared_memory
from ft_hsdp.state.agent import messages
from ft_hsdp.state.agent.messages import CompleteSnapshot
from ft_hsdp.state.agent.starter import connect_newest
from ft_hsdp.state.pacing import PAGE_BYTES
from ft_hsdp.state.shared_memory import Bytes
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.shard_manifest import SliceName

RETRY_S = 0.02
# How long the first attempt to connect waits for an answer; each later one waits twice as long. An attempt is cut
# short because a newer agent may have come up beside a frozen one.
GREET_S = 1.0
_FD_SPACE = socket.CMSG_SPACE(4)  # bytes of one file descriptor


class AgentGone(FtHsdpError):
    """There is no state agent, or it no longer answers. Connect again: another one may take its place."""


class AgentLine:
    """One connection to the agent, for one order at a time. Any thread may close it."""

    def __init__(self, connection: AgentSocket, address: str, deadline_s: float) -> None:
        self.address = address  # "host:port" at which the agent serves over HTTP
        self.deadline_s = deadline_s  # of each call; may be changed
        # Snapshots that the agent dropped as damaged; the caller clears the list.
        self.damaged: list[messages.Damage] = []
        self._socket = connection
        self._lock = threading.Lock()  # held for one order and its answer

    @contextlib.contextmanager
    def exchange(self, wait_s: float = 0.0) -> Iterator[AgentSocket]:
        """Lend the connection for one order and its answer, which may take ``wait_s`` longer than others.

        An error ends it, and becomes AgentGone.
        """
        seconds = self.deadline_s + wait_s
        if not self._lock.acquire(timeout=seconds):
            raise AgentGone(f"the state agent did not answer another call within {seconds:g} s")
        try:
            self._socket.end = time.monotonic() + seconds
            yield self._socket
        except (OSError, ValueError, LookupError, ProtocolViolation) as error:
            self._socket.close()
            raise AgentGone(f"the state agent is gone: {error or type(error).__name__}") from error
        finally:
            self._lock.release()

    def ask(self, order: object, *answers: type, wait_s: float = 0.0, more: bytes = b"") -> Any:
        """Send an order, and ``more`` frames that belong to it; return its answer, of one of these classes."""
        with self.exchange(wait_s) as connection:
            return connection.ask(order, *answers, more=more)

    def refusal(self, order: object, wait_s: float = 0.0, more: bytes = b"") -> str:
        """Have an order carried out. Return "", or one line that says why the agent refuses it."""
        answer = self.ask(order, messages.Done, messages.OrderRefused, wait_s=wait_s, more=more)
        if isinstance(answer, messages.OrderRefused):
            return str(answer.reason)
        self.damaged += answer.damaged
        return ""

    def order(self, order: object) -> None:
        """Have an order carried out whose answer is Done."""
        self.damaged += self.ask(order, messages.Done).damaged

    def keep(self, order: messages.KeepCopy) -> str:
        """Have the agent keep a copy of what other hosts have. Waits for a slice, and not for a shard.

        Returns:
            "", or one line that says why it does not: its budget or memory has no room, or a slice did not come.
        """
        return self.refusal(order, order.deadline_s if order.digest else 0.0)

    def close(self) -> None:
        """Close the connection. A call that waits on another thread ends with AgentGone.

        The agent keeps what is complete. No thread may write into its memory any more.
        """
        self._socket.shut_down()
        if self._lock.acquire(blocking=False):  # else the thread that waits closes it
            self._socket.close()
            self._lock.release()


class StateAgent(AgentLine):
    """A rank's connection to its state agent; made by `connect`. Thread-safe; one snapshot is written at a time.

    Every method but `close` blocks for the agent's answer, and raises AgentGone if the agent is gone or does not
    answer within ``deadline_s``. After that every call raises AgentGone at once. `kept` has a connection of its
    own, so that its answer holds up no other order.
    """

    def __init__(
        self, connection: AgentSocket, watch: AgentSocket, address: str, nbytes: int, deadline_s: float
    ) -> None:
        super().__init__(connection, address, deadline_s)
        self.busy = ""  # why the last `stage` got no slot
        self._nbytes = nbytes
        self._watch = AgentLine(watch, address, deadline_s)
        self._maps: dict[int, Bytes] = {}  # the mapped slots by number
        self._open: int | None = None  # the slot that may be written
        self._number = 0  # of the slot that `stage` returned last

    @staticmethod
    def connect(
        token: str, replica: int, rank: int, ranks: int, nbytes: int, deadline_s: float, name: str = ""
    ) -> StateAgent:
        """Connect to the state agent of ``replica`` on this host, instead of an older connection. Blocks.

        Waits for an agent that does not listen yet. If the agent has snapshots of this rank with another
        ``ranks`` or ``nbytes``, it drops them.

        Args:
            nbytes: The size of each snapshot in bytes.
            deadline_s: How long to wait for the agent. Later calls wait as long for their answers; the first
                `stage` may have to wait until the agent has allocated two snapshots.
            name: That of this host, if its machine has several.

        Raises:
            AgentGone: No agent answered within ``deadline_s``, or what listens does not know the token.
        """

        hello = messages.Hello(rank, ranks, nbytes)
        connection, address = _connected(token, replica, name, deadline_s, hello)
        try:
            watch, _ = _connected(token, replica, name, deadline_s, replace(hello, line="copies"))
        except BaseException:
            connection.close()
            raise
        return StateAgent(connection, watch, address, nbytes, deadline_s)

    def stage(self, state: StateId) -> Bytes | None:
        """Return memory to write ``state`` into, or None if there is no slot: then this snapshot is left out.

        The caller must have stopped writing the snapshot before: if it was not `staged`, it is abandoned.

        Returns:
            uint8 [nbytes] in the agent's memory, writable until `staged`. ``busy`` says why there is none.
        """
        with self.exchange() as connection:
            answer = connection.ask(messages.Stage(state), messages.SlotGranted, messages.OrderRefused)
            if isinstance(answer, messages.OrderRefused):
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
            ProtocolViolation: ``state`` is not the one that was staged last, or was dropped since.
        """
        with self.exchange():
            self._close_slot()
        if why := self.refusal(messages.Staged(state), more=protocol.framed(header)):
            raise ProtocolViolation(why)

    def list(self) -> tuple[CompleteSnapshot, ...]:
        held: tuple[CompleteSnapshot, ...] = self.ask(messages.Recall(), messages.Recalled).held
        return held

    def acquire(self, state: StateId) -> tuple[Bytes, bytes] | None:
        """Return a complete snapshot, whose bytes were compared with their checksums, or None.

        None: there is no such snapshot, or it is damaged. The memory does not change until the order
        `Unpin`, the next `acquire` or `close`.

        Returns:
            (read-only uint8 [nbytes], encoded manifest).
        """
        with self.exchange() as connection:
            answer = connection.ask(messages.Take(state), messages.Taken, messages.Done)
            if isinstance(answer, messages.Done):
                self.damaged += answer.damaged
                return None
            header = connection.read(shard_manifest.MAX_MANIFEST)
            return connection.map_segment(self._nbytes, writable=False), header

    def open_gate(self) -> Bytes | None:
        """Return the page of this rank's gate (`pacing`), or None if there is no memory for it.

        Copies of its shard for other hosts wait for it until the order `CloseGate`, or until this connection ends.

        Returns:
            uint8 [PAGE_BYTES], writable; it stays mapped as long as it is used.
        """
        with self.exchange() as connection:
            answer = connection.ask(messages.OpenGate(), messages.GateOpened, messages.OrderRefused)
            return connection.map_segment(PAGE_BYTES, writable=True) if answer == messages.GateOpened() else None

    def kept(self, state: StateId, wait_s: float) -> messages.KeptCopies:
        """Return which copies of ``state`` that this rank has ordered are complete. Other calls go on meanwhile.

        Blocks until no fetch of that state is under way, for ``wait_s`` at most; and for ``deadline_s`` more if
        the agent does not answer.
        """
        order, self._watch.deadline_s = messages.AwaitCopies(state, wait_s), self.deadline_s
        try:
            found: messages.KeptCopies = self._watch.ask(order, messages.KeptCopies, wait_s=wait_s)
            return found
        except AgentGone:
            self.close()
            raise

    def flip(self) -> None:
        """Flip a bit of the snapshot that was staged last, as broken memory would. Only for fault injection."""
        written = self._maps[self._number]
        shared_memory.protect(written, writable=True)
        written[len(written) // 2] ^= 1
        shared_memory.protect(written, writable=False)

    def close(self) -> None:
        super().close()
        self._watch.close()

    def _close_slot(self) -> None:
        """Make the slot that was written last read-only, so that not even a stray write changes it."""
        written = None if self._open is None else self._maps.get(self._open)
        self._open = None
        if written is not None:
            shared_memory.protect(written, writable=False)

    @contextlib.contextmanager
    def exchange(self, wait_s: float = 0.0) -> Iterator[AgentSocket]:
        try:
            with super().exchange(wait_s) as connection:
                yield connection
        except AgentGone:
            self._watch.close()
            self._maps, self._open = {}, None
            raise


class BlockAgent(AgentLine):
    """A rank's connection to its host's agent for blocks; made by `connect`. For one thread.

    Every method blocks for the agent's answer, and raises AgentGone if the agent is gone or does not answer in
    time.
    """

    @staticmethod
    def connect(token: str, replica: int, rank: int, deadline_s: float, name: str = "") -> BlockAgent:
        """Connect to the state agent of ``replica`` on this host; waits for one that does not listen yet. Blocks.

        Args:
            deadline_s: How long to wait for the agent. Later calls wait as long, and for what they have it do.
            name: That of this host, if its machine has several.

        Raises:
            AgentGone: No agent answered within ``deadline_s``, or what listens does not know the token.
        """
        hello = messages.Hello(rank, rank + 1, 0, "blocks")
        return BlockAgent(*_connected(token, replica, name, deadline_s, hello), deadline_s)

    def held(self, store: str, name: str, wait_s: float) -> tuple[messages.HeldSlice, ...]:
        """Return the complete slices of a store on this host, whose checksums were compared.

        Older stores of the same name are dropped.

        Args:
            store: The digest of what the store is.
            name: That the user gave it.
            wait_s: How much longer the comparison may take, in seconds.
        """
        found: messages.SlicesHeld = self.ask(messages.ListSlices(store, name), messages.SlicesHeld, wait_s=wait_s)
        return found.held

    def write(self, about: SliceName, budget: int | None, wait_s: float) -> Bytes | str:
        """Return memory to write a slice into, until `written`; or one line that says why there is none.

        Args:
            budget: Bytes for all that the host keeps for others; None: no limit.
            wait_s: How much longer its allocation may take, in seconds.
        """
        answer = self.ask(
            messages.Stage(about, budget), messages.SlotGranted, messages.OrderRefused, wait_s=wait_s
        )
        if isinstance(answer, messages.OrderRefused):
            return answer.reason
        return self._socket.map_segment(about.nbytes, writable=True)

    def written(self, about: SliceName, encoded: bytes) -> str:
        """Say that a slice is written, with its ``encoded`` manifest; the caller must not write into it any more.

        Returns:
            "", or one line that says why the agent refuses it.
        """
        return self.refusal(messages.Staged(about), more=protocol.framed(encoded))


def _connected(
    token: str, replica: int, name: str, deadline_s: float, hello: messages.Hello
) -> tuple[AgentSocket, str]:
    """Connect to the newest agent; return the connection and the address at which the agent serves. Blocks.

    Waits for an agent that does not listen yet. Raises AgentGone if none that knows the token answers in time.
    """
    end, patience_s = time.monotonic() + deadline_s, GREET_S
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            until = min(end, time.monotonic() + patience_s)
            sock.settimeout(max(RETRY_S, until - time.monotonic()))
            connect_newest(sock, token, replica, name)
            handshake.call_blocking(sock, token, Purpose.AGENT)
            connection = AgentSocket(sock, until)
            return connection, str(connection.ask(hello, messages.Welcome).address)
        except BaseException as error:
            sock.close()
            if isinstance(error, ProtocolViolation):
                raise AgentGone(f"not the state agent of replica {replica}: {error}") from error
            if not isinstance(error, OSError):
                raise
            if time.monotonic() + RETRY_S > end:
                why = f"no state agent of replica {replica} within {deadline_s:g} s ({error})"
                raise AgentGone(why) from error
        patience_s *= 2
        time.sleep(RETRY_S)


class AgentSocket:
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
        fd = self._fds.pop()
        try:
            return shared_memory.attach(fd, nbytes, writable=writable)
        finally:
            os.close(fd)

    def shut_down(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()
        while self._fds:
            os.close(self._fds.pop())

    def _wait(self) -> None:
        left = self.end - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        self._sock.settimeout(left)
