"""Inlet over stream sockets: frames come round-robin over its lanes, in the order in which they were sent.

Large chunks are received by a thread for each lane while the engine adds the chunk before; small ones, and
references to memory of the same host, by the engine itself, for waking a thread would cost more than it brings.
"""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import threading
from collections.abc import Sequence

from torch import Tensor

from ft_hsdp.errors import FTARError, PeerDead, PeerTimeout, ProtocolViolation, exhausted
from ft_hsdp.ftar import frame as wire
from ft_hsdp.ftar.transport.base import Chunk, Transfer
from ft_hsdp.ftar.transport.kind import Carrier


class ReceiveLane:
    """One connection from the left neighbour; blocking, with kernel deadlines set on ``sock``."""

    def __init__(self, sock: socket.socket, number: int, slots: int, member: int, carrier: Carrier) -> None:
        self._sock = sock
        self._poll = select.poll()  # select knows descriptors below 1024 only
        self._poll.register(sock, select.POLLIN)
        self._number = number
        self._member = member
        self._carrier = carrier
        self._batch = 1 if carrier.by_reference else max(1, slots // 2)
        self._due = 0
        self._frame_order = wire.FrameOrder()

    def receive(self, transfer: Transfer) -> Chunk:
        """Wait for the next frame."""
        label, frame, entries = self._header(transfer)
        data: Tensor | None = None
        if not frame.empty:
            try:
                data = self._carrier.unpack(label, self._read, frame, transfer.buffers)
            except ValueError as error:
                raise ProtocolViolation(f"left neighbour: {error}") from error
            except OSError as error:
                if (local := exhausted(error)) is not None:
                    raise local from error
                raise PeerDead(f"left neighbour's memory: {error}", suspect=self._member) from error
        return Chunk(frame, entries, data, self._number)

    def _header(self, transfer: Transfer) -> tuple[bytes, wire.Frame, tuple[wire.Entry, ...]]:
        head = bytearray(self._carrier.label + wire.HEADER.size)
        self._read(memoryview(head))
        frame = transfer.framing.check(bytes(head[self._carrier.label :]))
        self._frame_order.check(frame)
        entries: tuple[wire.Entry, ...] = ()
        if frame.entries:
            body = bytearray(frame.entries * wire.ENTRY.size)
            self._read(memoryview(body))
            entries = wire.unpack_entries(bytes(body))
        return bytes(head[: self._carrier.label]), frame, entries

    def begin(self, alone: bool) -> None:
        """An all-reduce begins; ``alone``: all its frames come this way."""
        self._frame_order = wire.FrameOrder(alone)

    def ready(self) -> bool:
        """Whether bytes are there."""
        return bool(self._poll.poll(0))

    def release(self) -> None:
        """The neighbour may send one chunk more; it is told now or with the next ones."""
        self._due += 1
        if self._due >= self._batch:
            self.answer()

    def answer(self) -> None:
        """Give back all slots that are due."""
        while self._due:
            count = min(self._due, 255)
            try:
                self._sock.send(bytes([count]))
            except OSError as error:
                raise PeerDead(f"left neighbour: {error}", suspect=self._member) from error
            self._due -= count

    def _read(self, view: memoryview) -> None:
        got = 0
        while got < len(view):
            try:
                n = self._carrier.receive(self._sock, view[got:])
            except BlockingIOError:
                raise PeerTimeout("no byte from the left neighbour in time", suspect=self._member) from None
            except OSError as error:
                raise PeerDead(f"left neighbour: {error}", suspect=self._member) from error
            if n == 0:
                raise PeerDead("left neighbour closed its connection", suspect=self._member)
            got += n

    def shut(self) -> None:
        """Wake whoever reads."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()


class StreamReceiver:
    """The inlet of one edge: ``socks`` in the order of the outlet's; ``threaded``: each is read by a thread."""

    def __init__(
        self,
        socks: Sequence[socket.socket],
        slots: int,
        member: int,
        carrier: Carrier,
        name: str,
        threaded: bool = True,
    ) -> None:
        each = max(1, slots // len(socks))
        self._lanes = [ReceiveLane(s, i, each, member, carrier) for i, s in enumerate(socks)]
        self._carrier = carrier
        self._name = name
        self._threaded = threaded and not carrier.by_reference
        self._jobs: list[queue.SimpleQueue[Transfer | None]] = []
        self._threads: list[threading.Thread] = []
        self._inbox: queue.SimpleQueue[tuple[int, Chunk] | FTARError | Exception] = queue.SimpleQueue()
        self._early: dict[int, Chunk] = {}
        self._transfer: Transfer | None = None
        self._turn = 0
        self.frames = 0

    def begin(self, transfer: Transfer) -> None:
        """Let the threads read this all-reduce's frames, if they are worth it."""
        self._turn = 0
        self._transfer = transfer
        for lane in self._lanes:
            lane.begin(len(self._lanes) == 1)
        if self._direct(transfer):
            return
        if not self._threads:
            self._spawn()
        for jobs in self._jobs:
            jobs.put(transfer)

    def _direct(self, transfer: Transfer) -> bool:
        return transfer.small or not self._threaded

    def _spawn(self) -> None:
        for number, lane in enumerate(self._lanes):
            jobs: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
            thread = threading.Thread(
                target=self._run, args=(lane, number, jobs), name=f"{self._name}-{number}", daemon=True
            )
            self._jobs.append(jobs)
            self._threads.append(thread)
            thread.start()

    def _run(self, lane: ReceiveLane, number: int, jobs: queue.SimpleQueue[Transfer | None]) -> None:
        try:
            while (transfer := jobs.get()) is not None:
                for index in range(number, transfer.frames, len(self._lanes)):
                    self._inbox.put((index, lane.receive(transfer)))
        except Exception as error:  # whatever it is, the engine has to know
            self._inbox.put(error)

    def next(self, block: bool) -> Chunk | None:
        """The next frame in the order of sending."""
        assert self._transfer is not None
        chunk: Chunk | None
        if self._direct(self._transfer):
            lane = self._lanes[self._turn % len(self._lanes)]
            if not block and not lane.ready():
                return None
            chunk = lane.receive(self._transfer)
        else:
            while (chunk := self._early.pop(self._turn, None)) is None:
                try:
                    item = self._inbox.get(block)
                except queue.Empty:
                    return None
                if isinstance(item, Exception):
                    raise item
                self._early[item[0]] = item[1]
        self._turn += 1
        self.frames += 1
        return chunk

    def release(self, chunk: Chunk) -> None:
        """Give the slot back on the lane that it came from."""
        self._lanes[chunk.lane].release()

    def end(self) -> None:
        """Give back what is still due."""
        for lane in self._lanes:
            lane.answer()

    def close(self) -> None:
        """Wake the threads and the engine."""
        self._inbox.put(PeerDead("the ring was closed"))
        for lane in self._lanes:
            lane.shut()

    def dispose(self) -> None:
        """End the threads, close the connections."""
        for jobs in self._jobs:
            jobs.put(None)
        for thread in self._threads:
            thread.join()
        for lane in self._lanes:
            lane.close()
        self._early.clear()
        self._transfer = None
        self._carrier.close()
