"""The agent's end of one connection: `Session` reads orders, carries them out, and answers each."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ft_hsdp import protocol, record_layer
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import ProtocolViolation
from ft_hsdp.state.agent import messages
from ft_hsdp.state.agent.copies import CopyFetcher
from ft_hsdp.state.agent.messages import Hello
from ft_hsdp.state.agent.shard import Owner
from ft_hsdp.state.agent.slots import Content
from ft_hsdp.state.agent.store import Key, SnapshotStore
from ft_hsdp.state.pacing import Pacer
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.shard_manifest import SliceName

LOOK_S = 0.05  # between two looks whether who waits for copies is gone


class AgentConnection:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()

    async def read(self, most: int) -> bytes:
        """Return the next frame.

        Raises:
            ConnectionError: The other end hung up.
            ProtocolViolation: The frame is longer than ``most`` bytes.
        """
        prefix = await record_layer.exactly(self._sock, protocol.LENGTH.size)
        return await record_layer.exactly(self._sock, protocol.frame_length(prefix, most))

    async def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send frames. The file descriptors in ``fds`` go with the first byte.

        Raises:
            OSError: The other end hung up.
        """
        if fds:
            sent = socket.send_fds(self._sock, [data], fds)
            data = data[sent:]
        await self._loop.sock_sendall(self._sock, data)

    @property
    def hung_up(self) -> bool:
        """Whether the other end has hung up, and nothing that it has sent is left to be read."""
        try:
            return not self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True


class Session:
    """Carries out the orders of one connection, one at a time.

    One that takes long does so on a thread of this connection, and holds up no other one.

    Args:
        hello: What the rank has said first.
    """

    def __init__(
        self, connection: AgentConnection, hello: Hello, store: SnapshotStore, copies: CopyFetcher, pacer: Pacer
    ) -> None:
        self._connection = connection
        self._hello = hello
        self._store = store
        self._copies = copies
        self._pacer = pacer
        self._threads = ThreadPoolExecutor(2, "orders")  # one allocates the first slots of a rank meanwhile
        self._ended = threading.Event()
        self._given: dict[Key, list[int]] = {}  # slots whose descriptors went over this connection, newest last
        self._lent: list[int] = []  # descriptors that are closed once they are sent

    async def run(self, address: str) -> None:
        """Carry out orders until the connection ends. What the rank has not completed is freed then.

        Args:
            address: At which the agent serves, for the rank.

        Raises:
            OSError: The rank hung up.
            ProtocolViolation: The rank sent something that is no valid order.
        """
        hello = self._hello
        if hello.line == "snapshots":
            self._key = self._store.admit(Owner(hello.rank, hello.ranks, hello.nbytes))
            self._preparing = self._threads.submit(self._store.prepare, self._key)
        try:
            await self._connection.send(messages.frame(messages.Welcome(address)))
            await self._serve()
        finally:
            self._threads.shutdown(wait=False)
            if hello.line == "blocks":
                for key, numbers in self._given.items():
                    self._store.abandon(key, numbers[-1])
            elif hello.line == "snapshots":
                # Else it is superseded or refused: the process may live, and write on.
                self._store.disconnect(self._key, dead=self._connection.hung_up)
                self._pacer.close(hello.rank)

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        coming = loop.create_task(self._next())
        carried_out: asyncio.Future[tuple[object, bytes, Sequence[int]]] = loop.create_future()
        carried_out.cancel()
        try:
            while True:
                order, header = await coming
                coming = loop.create_task(self._next())  # notices at once that the rank is gone
                found = self._at_once(order, header)
                if found is None:
                    carried_out = loop.run_in_executor(self._threads, self._carry_out, order, header)
                    waiting: set[asyncio.Future[Any]] = {carried_out, coming}
                    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    if not carried_out.done() and coming.exception() is not None:
                        self._ended.set()  # what takes long ends early
                    await asyncio.wait([carried_out])
                    found = carried_out.result()
                answer, more, fds = found
                await self._connection.send(messages.frame(answer) + more, fds)
                self._close_lent()
        finally:
            self._ended.set()
            coming.cancel()
            ending: set[asyncio.Future[Any]] = {coming, carried_out}
            await asyncio.wait(ending)  # a newer connection waits until nothing is changed here any more
            self._close_lent()
            if not coming.cancelled():
                coming.exception()  # it is known by now

    def _at_once(self, order: object, header: bytes) -> tuple[object, bytes, Sequence[int]] | None:
        """Carry out an order that blocks for nothing: a vote waits for its answer. None: it needs a thread."""
        if isinstance(order, messages.Stage) and isinstance(order.about, StateId) and self._preparing.done():
            number = self._store.stage(self._key, order.about)
            return None if number is None else self._granted(self._key, number)
        slow = self._hello.line == "blocks" or isinstance(order, messages.SLOW)
        return None if slow else self._carry_out(order, header)

    def _close_lent(self) -> None:
        while self._lent:
            os.close(self._lent.pop())

    async def _next(self) -> tuple[object, bytes]:
        """Return the next order, and the encoded manifest that comes with it or b"". Raises OSError at its end."""
        data = await self._connection.read(messages.MAX_MESSAGE)
        order = messages.decode(data, *messages.ORDERS[self._hello.line])
        about = getattr(order, "about", None)
        if about is not None and isinstance(about, SliceName) != (self._hello.line == "blocks"):
            raise ProtocolViolation(f"an order about {about} on a connection for {self._hello.line}")
        if isinstance(order, messages.Staged):
            return order, await self._connection.read(shard_manifest.MAX_MANIFEST)
        return order, b""

    # On the thread of this connection, if the order may take long.

    def _carry_out(self, order: object, header: bytes) -> tuple[object, bytes, Sequence[int]]:
        """Return the answer, the header that follows it, and the file descriptors that come along."""
        try:
            match order:
                case messages.Stage(SliceName() as about, budget):
                    return self._stage(self._store.admit_slice(about, budget), about.store)
                case messages.Stage(StateId() as state):
                    self._preparing.result()
                    return self._stage(self._key, state)
                case messages.Take(state):
                    if (taken := self._store.acquire(self._key, state)) is not None:
                        return messages.Taken(), protocol.framed(taken[1]), taken[:1]
                    return messages.Done(self._store.damaged(self._key)), b"", ()
                case messages.OpenGate():
                    return messages.GateOpened(), b"", [self._pacer.open(self._hello.rank)]
                case _:
                    return self._simple(order, header), b"", ()
        except (ValueError, LookupError, OSError) as error:
            return messages.OrderRefused(" ".join(str(error).split())[: messages.MAX_REASON]), b"", ()

    def _simple(self, order: object, header: bytes) -> object:
        rank, store, copies = self._hello.rank, self._store, self._copies
        match order:
            case messages.Staged(SliceName() as of):
                key = of.store, of.slice
                store.staged(key, of.store, header, self._given.get(key, [0])[-1])
            case messages.Staged(StateId() as state):
                store.staged(self._key, state, header)
            case messages.Settle(state, everywhere):
                store.mark_settled(self._key, state, everywhere)
                copies.settle(rank, state, everywhere)
            case messages.Pin(state, seconds):
                store.pin(self._key, state, seconds)
            case messages.Unpin():
                store.unpin(self._key)
            case messages.Recall():
                return messages.Recalled(store.list(self._key))
            case messages.Forget():
                store.forget(self._key)
                copies.forget(rank)
            case messages.KeepCopy():
                copies.keep(rank, order, self._ended)
            case messages.OweCopies():
                copies.owes(rank, order)
            case messages.FreeCopies(replicas):
                copies.drop(rank, replicas)
            case messages.CloseGate():
                self._pacer.close(rank)
            case messages.AwaitCopies(state, wait_s):
                until = time.monotonic() + wait_s
                while not self._ended.is_set() and (left_s := until - time.monotonic()) > 0:
                    if not concurrent.futures.wait(copies.pending(rank, state), min(LOOK_S, left_s)).not_done:
                        break
                return copies.kept(rank, state)
            case messages.ListSlices(of, name):
                return messages.SlicesHeld(store.slices(of, name))
            case messages.DropSlices(of, numbers):
                store.drop_slices(of, numbers)
        return messages.Done(store.damaged(self._key) if self._hello.line == "snapshots" else ())

    def _stage(self, key: Key, content: Content) -> tuple[object, bytes, Sequence[int]]:
        number = self._store.allocate(key, content)
        if number is None:
            raise ValueError(self._store.busy_reason(key))
        return self._granted(key, number)

    def _granted(self, key: Key, number: int) -> tuple[object, bytes, Sequence[int]]:
        slots, given = self._store.slots(key), self._given.get(key, ())
        fds = [] if number in given else [slots[number]]
        if self._hello.line == "blocks":
            # Another rank may drop the slice, and the number of its descriptor may be that of another slot then.
            fds = self._lent = [self._store.descriptor(key, number)]
        self._given[key] = [*(each for each in given if each in slots and each != number), number]
        return messages.SlotGranted(number, number not in given, tuple(slots)), b"", fds
