"""The receiving end of an edge over stream sockets.

Frames arrive round-robin over its lanes, in the order of sending. Large chunks are received by one thread for each
lane while the engine adds the chunk before. Small chunks, and references to memory of the same host, are received
by the engine itself: waking a thread would cost more than it brings.
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
from ft_hsdp.ftar.transport.base import WAIT_S, Chunk, InlineCodec, Transfer, shorten


class ReceiveLane:
    """One connection from the left neighbour. `sock` is blocking, with the kernel's deadlines set.

    The kernel's deadline for receives becomes this lane's patience: a receive waits in parts of `WAIT_S`.
    """

    def __init__(self, sock: socket.socket, number: int, slots: int, member: int, codec: InlineCodec) -> None:
        self._sock = sock
        self._poll = select.poll()  # select knows descriptors below 1024 only
        self._poll.register(sock, select.POLLIN)
        self._wait_s = WAIT_S
        self._patience_s = shorten(sock, WAIT_S)
        self._quiet_s = 0.0  # how long nothing has come
        self._number = number
        self._member = member
        self._codec = codec
        self._batch = 1 if codec.by_reference else max(1, slots // 2)
        self._due = 0  # free slots that the sender was not told about
        self._frame_order = wire.FrameOrder()

    def receive(self, transfer: Transfer) -> Chunk | None:
        """Block until the next frame is received, and return it; None if it has not begun to come within `WAIT_S`.

        Raises:
            PeerDead: the connection broke.
            PeerTimeout: no byte came before the deadline.
            StaleEpoch: the frame belongs to another all-reduce.
            ProtocolViolation: the frame is not what the plan says.
        """
        if (header := self._header(transfer)) is None:
            return None
        label, frame, entries = header
        data: Tensor | None = None
        if not frame.empty:
            try:
                data = self._codec.unpack(label, self._read, frame, transfer.buffers)
            except ValueError as error:
                raise ProtocolViolation(f"left neighbour: {error}") from error
            except OSError as error:
                if (local := exhausted(error)) is not None:
                    raise local from error
                raise PeerDead(f"left neighbour's memory: {error}", suspect=self._member) from error
        return Chunk(frame, entries, data, self._number)

    def _header(self, transfer: Transfer) -> tuple[bytes, wire.Frame, tuple[wire.Entry, ...]] | None:
        """Read a frame's label, header and entries; return None if it has not begun to come within `WAIT_S`."""
        head = bytearray(self._codec.label + wire.HEADER.size)
        if not self._read(memoryview(head), first=True):
            return None
        frame = transfer.framing.check(bytes(head[self._codec.label :]))
        self._frame_order.check(frame)
        entries: tuple[wire.Entry, ...] = ()
        if frame.entries:
            body = bytearray(frame.entries * wire.ENTRY_BYTES)
            self._read(memoryview(body))
            entries = wire.unpack_entries(bytes(body))
        return bytes(head[: self._codec.label]), frame, entries

    def begin(self, alone: bool) -> None:
        """Begin an all-reduce; `alone`: all its frames come on this lane."""
        self._frame_order = wire.FrameOrder(alone)

    def ready(self) -> bool:
        """Return whether bytes have arrived. Does not block."""
        return bool(self._poll.poll(0))

    def release(self) -> None:
        """Let the sender send one more chunk; it is told now or together with the next ones."""
        self._due += 1
        if self._due >= self._batch:
            self.answer()

    def answer(self) -> None:
        """Tell the sender about all slots that are free and not yet reported."""
        while self._due:
            count = min(self._due, 255)
            try:
                self._sock.send(bytes([count]))
            except OSError as error:
                raise PeerDead(f"left neighbour: {error}", suspect=self._member) from error
            self._due -= count

    def _read(self, view: memoryview, first: bool = False) -> bool:
        """Fill `view`. Return False if it is the `first` part of a frame and nothing has come within `WAIT_S`."""
        got = 0
        while got < len(view):
            try:
                n = self._codec.receive(self._sock, view[got:])
            except BlockingIOError:
                self._quiet_s += self._wait_s
                if self._quiet_s >= self._patience_s:
                    raise PeerTimeout("no byte from the left neighbour in time", suspect=self._member) from None
                if first and not got:
                    return False
                continue
            except OSError as error:
                raise PeerDead(f"left neighbour: {error}", suspect=self._member) from error
            if n == 0:
                raise PeerDead("left neighbour closed its connection", suspect=self._member)
            got += n
            self._quiet_s = 0.0
        return True

    def shut(self) -> None:
        """Shut the connection down, which wakes a thread that waits in it. Any thread."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()


class StreamReceiver:
    """The receiving end of one edge: chunks from the left neighbour.

    The engine's thread calls `begin`, `next`, `release` and `end`; any thread `close`, any number of times.

    Args:
        socks: the connections, in the same order as at the sender.
        slots: chunks in flight over all connections.
        member: replica at the other end, which errors name as the suspect.
        name: prefix of the names of the threads.
        threaded: receive large chunks on threads, one for each connection.

    Attributes:
        frames: number of frames taken by `next` since the connection was made.
    """

    def __init__(
        self,
        socks: Sequence[socket.socket],
        slots: int,
        member: int,
        codec: InlineCodec,
        name: str,
        threaded: bool = True,
    ) -> None:
        each = max(1, slots // len(socks))
        self._codec = codec
        self._lanes = [self._lane(sock, number, each, member) for number, sock in enumerate(socks)]
        self._name = name
        self._threaded = threaded and not codec.by_reference
        self._jobs: list[queue.SimpleQueue[Transfer | None]] = []
        self._threads: list[threading.Thread] = []
        self._inbox: queue.SimpleQueue[tuple[int, Chunk] | FTARError | Exception] = queue.SimpleQueue()
        self._early: dict[int, Chunk] = {}  # received on one lane before its turn
        self._transfer: Transfer | None = None
        self._turn = 0  # index of the frame that `next` returns
        self.frames = 0

    def _lane(self, sock: socket.socket, number: int, slots: int, member: int) -> ReceiveLane:
        return ReceiveLane(sock, number, slots, member, self._codec)

    def begin(self, transfer: Transfer) -> None:
        """Begin an all-reduce: receive its frames and no others, on threads unless the engine does it."""
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
                    while (chunk := lane.receive(transfer)) is None:
                        pass
                    self._inbox.put((index, chunk))
        except Exception as error:  # the engine must learn of every error
            self._inbox.put(error)

    def next(self, block: bool) -> Chunk | None:
        """Return the next chunk in the order of sending; None if there is none yet.

        Args:
            block: wait for it, but at most `WAIT_S`: the data plane wants to see that its engine lives.

        Raises:
            PeerDead: the connection broke.
            PeerTimeout: nothing came before the deadline.
            StaleEpoch: a frame belongs to another all-reduce.
            ProtocolViolation: a frame is not what the plan says.
        """
        assert self._transfer is not None
        chunk: Chunk | None
        if self._direct(self._transfer):
            lane = self._lanes[self._turn % len(self._lanes)]
            if not block and not lane.ready():
                return None
            if (chunk := lane.receive(self._transfer)) is None:
                return None
        else:
            while (chunk := self._early.pop(self._turn, None)) is None:
                try:
                    item = self._inbox.get(block, WAIT_S)
                except queue.Empty:
                    return None
                if isinstance(item, Exception):
                    raise item
                self._early[item[0]] = item[1]
        self._turn += 1
        self.frames += 1
        return chunk

    def release(self, chunk: Chunk) -> None:
        """Give the slot of `chunk` back on the connection that it came on.

        Raises:
            PeerDead: the sender is gone, so the chunk may not have been whole when its memory was read. It must be
                discarded.
        """
        self._lanes[chunk.lane].release()

    def end(self) -> None:
        """Tell the sender about all slots that are still free."""
        for lane in self._lanes:
            lane.answer()

    def close(self) -> None:
        """Wake the receiving threads and the engine; they raise PeerDead."""
        self._inbox.put(PeerDead("the ring was closed"))
        for lane in self._lanes:
            lane.shut()

    def dispose(self) -> None:
        """End the threads and close the connections, after `close`; blocks until the threads have ended."""
        for jobs in self._jobs:
            jobs.put(None)
        for thread in self._threads:
            thread.join()
        for lane in self._lanes:
            lane.close()
        self._early.clear()
        self._transfer = None
        self._codec.close()
