"""Slices of block stores in a state agent: memory, orders, and both ends of the connection for them.

A rank connects a second time, for blocks alone, because the orders here may take long: the agent answers when a
slice is copied. `SliceStore` keeps the slices. They outlive the ranks, as snapshots do, and are served by the same
state server. `BlockSession` carries out a rank's orders, `BlockAgent` is the rank's end.

The life of a slice: a rank writes it from its source (`write`, `written`), or the agent copies it from another
host's agent (`copy`). From then on it does not change, until it is dropped or found damaged.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ft_hsdp import protocol
from ft_hsdp.errors import DataCorruption, ProtocolViolation
from ft_hsdp.state import shared_memory
from ft_hsdp.state.agent import messages
from ft_hsdp.state.agent.client import AgentGone, AgentSocket, awaited
from ft_hsdp.state.agent.session import AgentConnection
from ft_hsdp.state.agent.shard import check_memory
from ft_hsdp.state.agent.store import SnapshotStore
from ft_hsdp.state.shared_memory import Bytes, ServedSnapshot
from ft_hsdp.state.transfer import blocks
from ft_hsdp.state.transfer.blocks import SliceManifest, SliceName, SliceRead

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class StoredSlice:
    """A slice in the memory of this host. Only `SliceStore` changes it.

    A later one may have the same store and number, so who writes a slice names the object.
    """

    about: SliceName
    fd: int  # open until it is dropped and nobody reads it; -1 from then on
    header: bytes = b""  # its encoded manifest; empty: it is being written
    readers: int = 1  # the first one is its writer
    dropped: bool = False


class SliceStore:
    """The slices on this host. Thread-safe.

    Args:
        snapshots: With which it shares the budget of the host.
    """

    def __init__(self, snapshots: SnapshotStore) -> None:
        self._snapshots = snapshots
        self._lock = threading.Lock()
        self._slices: dict[tuple[str, int], StoredSlice] = {}
        self._lent: dict[int, StoredSlice] = {}  # by descriptor: what readers have

    def allocate(self, about: SliceName, budget: int | None) -> StoredSlice:
        """Allocate memory for a slice, instead of one that was not completed. Blocks.

        Args:
            budget: Bytes for all that the host keeps for others; None: no limit.

        Returns:
            The slice. Its memory and descriptor stay until it is completed or abandoned, also if it is dropped
            meanwhile: otherwise its writer could write into what has the number of the descriptor next.

        Raises:
            ValueError: It is there already, or there is no room for it. Says which.
        """
        key = about.store, about.slice
        with self._lock:
            there = self._slices.get(key)
            if there is not None and there.header:
                raise ValueError(f"slice {about.slice} is here already")
            if there is not None:
                self._drop(key)
        self._snapshots.reserve(about.nbytes, budget)
        try:
            check_memory(about.nbytes)
            fd = shared_memory.create(about.nbytes)
        except OSError as error:
            self._snapshots.release(about.nbytes)
            raise ValueError(f"no memory for {about.nbytes} bytes: {error.strerror}") from None
        except ValueError:
            self._snapshots.release(about.nbytes)
            raise
        with self._lock:
            if key in self._slices:
                self._snapshots.release(about.nbytes)
                os.close(fd)
                raise ValueError(f"slice {about.slice} is being written by another rank")
            made = self._slices[key] = StoredSlice(about, fd)
        return made

    def complete(self, written: StoredSlice, header: bytes) -> None:
        """Mark a slice as complete.

        Raises:
            ValueError: It is complete or dropped, or the header is of another one.
        """
        try:
            about = blocks.decode(header).about
        except DataCorruption as error:
            raise ValueError(str(error)) from None
        with self._lock:
            if written.dropped or written.header or written.about != about:
                raise ValueError(f"slice {written.about.slice} is not being written")
            written.header = header
            written.readers -= 1

    def abandon(self, written: StoredSlice) -> None:
        """Free a slice that its writer does not complete. Call it once, and not after `complete` has returned."""
        with self._lock:
            if not written.dropped:
                self._drop((written.about.store, written.about.slice))
            written.readers -= 1
            self._sweep(written)

    def drop(self, store: str, numbers: Sequence[int]) -> None:
        """Free slices. The memory of one that is being read is freed when its last reader has ended."""
        with self._lock:
            for number in numbers:
                if (store, number) in self._slices:
                    self._drop((store, number))

    def held(self, store: str, name: str, first: int = 0) -> tuple[messages.HeldSlice, ...]:
        """Return complete slices of a store by number, as many as fit into a message. Blocks.

        Older stores of the same name are dropped. Every checksum is compared, and a slice that differs is
        dropped.

        Args:
            store: The digest of what the store is.
            name: That the user gave it.
            first: Slices below this number are left out.
        """
        with self._lock:
            for key, each in list(self._slices.items()):
                if each.about.name == name and key[0] != store:
                    self._drop(key)
            found = sorted(number for of, number in self._slices if of == store and number >= first)
        rows: list[messages.HeldSlice] = []
        for number in found:
            served = self.borrow(store, number)
            if served is None:
                continue
            try:
                manifest = blocks.decode(served.manifest)
                data = shared_memory.attach(served.fd, served.nbytes, writable=False)
                why = "damaged" if manifest.damaged(data.data) else ""
            except (OSError, ValueError, DataCorruption) as error:
                why = f"unreadable: {error}"
            if why:
                _log.error("slice %d of %s is %s, and dropped", number, name, why)
                self.drop(store, (number,))
            else:
                about = manifest.about
                rows.append(messages.HeldSlice(number, about.slices, about.parts, served.digest))
            self.give_back(served)
            if len(rows) == messages.MAX_HELD_SLICES:
                break
        return tuple(rows)

    def borrow(self, store: str, number: int) -> ServedSnapshot | None:
        """Return a complete slice for reading until `give_back`; None if it is not here."""
        with self._lock:
            there = self._slices.get((store, number))
            if there is None or not there.header:
                return None
            there.readers += 1
            self._lent[there.fd] = there
            return ServedSnapshot(there.fd, there.about.nbytes, there.header, blocks.digest_of(there.header))

    def give_back(self, served: ServedSnapshot) -> None:
        with self._lock:
            each = self._lent[served.fd]
            each.readers -= 1
            self._sweep(each)

    def copy(self, order: messages.CopySlice, token: str, cancel: threading.Event) -> None:
        """Copy a slice from the first of the order's sources that can serve it. Blocks.

        Raises:
            ValueError: There is no room for it, or no source has served it in time. One line.
        """
        until = time.monotonic() + order.deadline_s
        made = self.allocate(order.about, order.budget)
        try:
            into = shared_memory.attach(made.fd, made.about.nbytes, writable=True)
            self.complete(made, _copied(order, into.data, token, until, cancel))
        except BaseException as error:
            self.abandon(made)
            if isinstance(error, OSError):
                raise ValueError(f"its memory cannot be written: {error}") from None
            raise

    def _drop(self, key: tuple[str, int]) -> None:
        each = self._slices.pop(key)
        each.dropped = True
        self._sweep(each)

    def _sweep(self, each: StoredSlice) -> None:
        if each.dropped and not each.readers and each.fd >= 0:
            self._lent.pop(each.fd, None)
            os.close(each.fd)
            each.fd = -1
            self._snapshots.release(each.about.nbytes)


def _copied(
    order: messages.CopySlice, into: memoryview, token: str, until: float, cancel: threading.Event
) -> bytes:
    """Read a slice from the first source that can serve it, and return its encoded manifest. Blocks.

    Raises:
        ValueError: None could before ``until``, on the monotonic clock. One line.
    """
    why = "no source is named"
    for address in order.addresses:
        known: dict[str, tuple[SliceManifest, bytes]] = {}
        read = SliceRead(order.about, order.digest, address, ((0, order.about.nbytes, 0),))
        left_s = max(0.0, until - time.monotonic())
        try:
            failed = blocks.read_slices([read], into, token, left_s, known, cancel).failed
        except RuntimeError as error:  # no thread is left for it
            failed = [(read, str(error))]
        if not failed:
            return known[order.digest][1]
        why = failed[0][1]
        if cancel.is_set():
            break
    raise ValueError(why)


class BlockSession:
    """Carries out the orders of one rank about blocks, one at a time.

    Args:
        connection: The rank's.
    """

    def __init__(self, connection: AgentConnection, slices: SliceStore, token: str) -> None:
        self._connection = connection
        self._slices = slices
        self._token = token
        self._writing: dict[tuple[str, int], StoredSlice] = {}
        # Of its own: an order that takes long holds up no snapshot of the other ranks.
        self._thread = ThreadPoolExecutor(1, "blocks")
        self._ended = threading.Event()

    async def run(self) -> None:
        """Carry out orders until the connection ends, also while one is carried out. What is incomplete is freed.

        Raises:
            OSError: The rank hung up.
            ProtocolViolation: The rank sent something that is no valid order.
        """
        loop = asyncio.get_running_loop()
        coming = loop.create_task(self._next())
        try:
            while True:
                order, header = await coming
                coming = loop.create_task(self._next())  # notices at once that the rank is gone
                carried_out = loop.run_in_executor(self._thread, self._carry_out, order, header)
                waiting: set[asyncio.Future[Any]] = {carried_out, coming}
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if not carried_out.done() and coming.exception() is not None:
                    self._ended.set()  # a copy ends early
                answer, fds = await carried_out
                await self._connection.send(messages.frame(answer), fds)
        finally:
            self._ended.set()
            self._thread.submit(self._release)
            self._thread.shutdown(wait=False)
            coming.cancel()
            await asyncio.wait([coming])
            if not coming.cancelled():
                coming.exception()  # it is known by now

    async def _next(self) -> tuple[object, bytes]:
        """Return the next order, and the encoded manifest that comes with it or b"".

        Raises:
            OSError: The rank hung up.
            ProtocolViolation: The rank sent something that is no valid order.
        """
        order = messages.decode(await self._connection.read(messages.MAX_MESSAGE), *messages.BLOCK_ORDERS)
        if isinstance(order, messages.SliceWritten):
            return order, await self._connection.read(blocks.MAX_MANIFEST)
        return order, b""

    def _carry_out(self, order: object, header: bytes) -> tuple[object, Sequence[int]]:
        slices = self._slices
        try:
            match order:
                case messages.ListSlices(store, name, first):
                    return messages.SlicesHeld(slices.held(store, name, first)), ()
                case messages.WriteSlice(about, budget):
                    key = about.store, about.slice
                    if (older := self._writing.pop(key, None)) is not None:
                        slices.abandon(older)
                    made = self._writing[key] = slices.allocate(about, budget)
                    return messages.SliceGranted(), (made.fd,)
                case messages.SliceWritten(store, number):
                    if (store, number) not in self._writing:
                        raise ValueError(f"slice {number} is not being written")
                    slices.complete(self._writing[store, number], header)
                    del self._writing[store, number]
                case messages.CopySlice():
                    slices.copy(order, self._token, self._ended)
                case messages.DropSlices(store, numbers):
                    slices.drop(store, numbers)
        except ValueError as error:
            return messages.OrderRefused(" ".join(str(error).split())[: messages.MAX_REASON]), ()
        return messages.Done(), ()

    def _release(self) -> None:
        for written in self._writing.values():
            self._slices.abandon(written)


class BlockAgent:
    """A rank's connection to its host's agent for blocks; made by `connect`. For one thread.

    Every method blocks for the agent's answer, and raises AgentGone if the agent is gone or does not answer in
    time.
    """

    def __init__(self, connection: AgentSocket, address: str, deadline_s: float) -> None:
        self.address = address  # "host:port" at which the agent serves over HTTP
        self._socket = connection
        self._deadline_s = deadline_s

    @staticmethod
    def connect(token: str, replica: int, rank: int, deadline_s: float, name: str = "") -> BlockAgent:
        """Connect to the state agent of ``replica`` on this host; waits for one that does not listen yet. Blocks.

        Args:
            deadline_s: How long to wait for the agent. Later calls wait as long, and for what they have it do.
            name: That of this host, if its machine has several.

        Raises:
            AgentGone: No agent answered within ``deadline_s``, or what listens does not know the token.
        """
        order = messages.OpenBlocks(rank)
        connection, opened = awaited(token, replica, name, deadline_s, order, messages.BlocksOpened)
        return BlockAgent(connection, str(opened.address), deadline_s)

    def held(self, store: str, name: str, wait_s: float) -> tuple[messages.HeldSlice, ...]:
        """Return the complete slices of a store on this host, whose checksums were compared.

        Older stores of the same name are dropped.

        Args:
            store: The digest of what the store is.
            name: That the user gave it.
            wait_s: How much longer the comparison may take, in seconds.
        """
        rows: list[messages.HeldSlice] = []
        while True:
            first = rows[-1].slice + 1 if rows else 0
            found = self._ask(messages.ListSlices(store, name, first), wait_s, messages.SlicesHeld).held
            rows += found
            if len(found) < messages.MAX_HELD_SLICES:
                return tuple(rows)

    def write(self, about: SliceName, budget: int | None, wait_s: float) -> Bytes | str:
        """Return memory to write a slice into, until `written`; or one line that says why there is none.

        Args:
            budget: Bytes for all that the host keeps for others; None: no limit.
            wait_s: How much longer its allocation may take, in seconds.
        """
        order = messages.WriteSlice(about, budget)
        answer = self._ask(order, wait_s, messages.SliceGranted, messages.OrderRefused)
        if isinstance(answer, messages.OrderRefused):
            return answer.reason
        return self._socket.map_segment(about.nbytes, writable=True)

    def written(self, manifest: SliceManifest) -> str:
        """Say that a slice is written; the caller must not write into it any more.

        Returns:
            "", or one line that says why the agent refuses it.
        """
        order = messages.SliceWritten(manifest.about.store, manifest.about.slice)
        more = protocol.framed(blocks.encode(manifest))
        answer = self._ask(order, 0.0, messages.Done, messages.OrderRefused, more=more)
        return answer.reason if isinstance(answer, messages.OrderRefused) else ""

    def copy(self, order: messages.CopySlice) -> str:
        """Have the agent copy a slice from other hosts. Blocks until it is here, or cannot be.

        Returns:
            "", or one line that says why it is not here.
        """
        answer = self._ask(order, order.deadline_s, messages.Done, messages.OrderRefused)
        return answer.reason if isinstance(answer, messages.OrderRefused) else ""

    def drop(self, store: str, numbers: Sequence[int]) -> None:
        for at in range(0, len(numbers), messages.MAX_HELD_SLICES):
            part = tuple(numbers[at : at + messages.MAX_HELD_SLICES])
            self._ask(messages.DropSlices(store, part), 0.0, messages.Done)

    def close(self) -> None:
        """Close the connection. The agent keeps what is complete."""
        self._socket.close()

    def _ask(self, order: object, wait_s: float, *answers: type, more: bytes = b"") -> Any:
        self._socket.end = time.monotonic() + self._deadline_s + wait_s
        try:
            return self._socket.ask(order, *answers, more=more)
        except (OSError, ValueError, LookupError, ProtocolViolation) as error:
            self._socket.close()
            raise AgentGone(f"the state agent is gone: {error or type(error).__name__}") from error
