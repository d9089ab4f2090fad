"""Outlet over stream sockets: frames go round-robin over its lanes, each with a window and a sending thread.

The other end answers on the same connection with one byte for a number of chunks that it is done with. A lane has
never more than its slots of chunks unanswered. Small frames leave on the caller's thread if the lane is idle.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from torch import Tensor

from ft_hsdp import fault_injection
from ft_hsdp.errors import FTARError, LocalSystemError, PeerDead, PeerTimeout, exhausted
from ft_hsdp.ftar.transport.kind import Carrier
from ft_hsdp.record_layer import Sealed

Buffers = list[bytes | memoryview]


@dataclass(frozen=True, slots=True)
class Rest:
    """What is left of a frame that the kernel did not take at once."""

    buffers: Buffers
    descriptors: tuple[int, ...]


_Item = tuple[bytes, Tensor | None] | Rest | Future[None] | None


class SendLane:
    """One connection to the right neighbour; blocking, with kernel deadlines set on ``sock``."""

    def __init__(self, sock: socket.socket, slots: int, member: int, carrier: Carrier, name: str) -> None:
        self._sock = sock
        self._sealed = isinstance(sock, Sealed)  # it can only send whole records, and waits for that
        self._slots = slots
        self._member = member
        self._carrier = carrier
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._queued = 0
        self._taken = 0
        self._unanswered: deque[int] = deque()
        self._under_way = 0
        self._error: FTARError | None = None
        self.failed: Callable[[FTARError], None] = lambda error: None
        self.sent = 0
        self.high_water = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def send(self, head: bytes, payload: Tensor | None, small: bool) -> None:
        """Queue a frame, or send it at once if it is small (or a reference) and nothing is before it.

        The caller never waits for the kernel: it is the one who receives, and its neighbours may do the same.
        """
        inline = not self._sealed and (small or self._carrier.by_reference)
        if inline and self._queued == self._taken and self._error is None:
            if 2 * len(self._unanswered) >= self._slots:
                self._answers(block=False)
            if len(self._unanswered) < self._slots:
                rest = self._transmit(head, payload, wait=False)
                if rest is not None:
                    self._put(rest)
                return
        self._put((head, payload))

    def _put(self, item: _Item) -> None:
        self._queued += 1
        self._queue.put(item)

    def flush(self) -> None:
        """Wait until the neighbour is done with all that was sent.

        Then nothing of it is lost if this process ends at once: a connection that is closed with answers unread is
        reset, and takes with it what has not arrived.
        """
        if self._queued == self._taken:
            self._settle()
            return
        done: Future[None] = Future()
        self._queue.put(done)
        done.result()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                if isinstance(item, Future):
                    self._settle()
                    item.set_result(None)
                elif self._error is not None:
                    continue
                elif isinstance(item, Rest):
                    self._deliver(item, wait=True)
                else:
                    while len(self._unanswered) >= self._slots:
                        self._answers(block=True)
                    self._transmit(*item, wait=True)
            except Exception as error:  # whatever it is, the engine has to know
                other = exhausted(error) or LocalSystemError(f"sending: {error!r}")
                cause = error if isinstance(error, FTARError) else other
                self._fail(cause)
                if isinstance(item, Future):
                    item.set_exception(cause)
            finally:
                self._taken += not isinstance(item, Future)
                item = None  # or its payload would be held until the next one comes

    def _settle(self) -> None:
        while self._unanswered and self._error is None:
            self._answers(block=True)
        if self._error is not None:
            raise self._error

    def _fail(self, error: FTARError) -> None:
        if self._error is None:
            self._error = error
            self.failed(error)

    def _answers(self, block: bool) -> None:
        """Take what the neighbour says it is done with."""
        try:
            data = self._sock.recv(256, 0 if block else socket.MSG_DONTWAIT)
        except BlockingIOError:
            if not block:
                return
            raise PeerTimeout("the right neighbour takes no chunks", suspect=self._member) from None
        except OSError as error:
            raise PeerDead(f"right neighbour: {error}", suspect=self._member) from error
        if not data:
            raise PeerDead("right neighbour closed its connection", suspect=self._member)
        for _ in range(min(sum(data), len(self._unanswered))):
            self._under_way -= self._unanswered.popleft()

    def _transmit(self, head: bytes, payload: Tensor | None, wait: bool) -> Rest | None:
        """Hand one frame to the kernel; what it does not take without waiting."""
        nbytes = payload.nbytes if payload is not None else 0
        self._unanswered.append(nbytes)
        self._under_way += nbytes
        self.high_water = max(self.high_water, self._under_way)
        parcel = self._carrier.pack(payload)
        self.sent += len(head) + nbytes
        return self._deliver(Rest([parcel.label + head, *parcel.buffers], parcel.descriptors), wait)

    def _deliver(self, frame: Rest, wait: bool) -> Rest | None:
        try:
            return self._hand(frame, wait)
        except BlockingIOError:
            if not wait:
                return frame
            raise PeerTimeout("the right neighbour takes no bytes", suspect=self._member) from None
        except OSError as error:
            raise exhausted(error) or PeerDead(f"right neighbour: {error}", suspect=self._member) from error

    def _hand(self, frame: Rest, wait: bool) -> Rest | None:
        if fault_injection.cut(self._member):
            if not wait:
                raise BlockingIOError
            fault_injection.hold(self._member, lambda: self._error is not None)
        flags = 0 if wait else socket.MSG_DONTWAIT
        if frame.descriptors:
            went = socket.send_fds(self._sock, frame.buffers, list(frame.descriptors), flags)
        else:
            went = self._sock.sendmsg(frame.buffers, (), flags)
        rest: Buffers = []
        for buffer in frame.buffers:
            if went < len(buffer):
                rest.append(memoryview(buffer)[went:])
            went = max(0, went - len(buffer))
        if not rest or not wait:
            return Rest(rest, ()) if rest else None
        for buffer in rest:
            self._sock.sendall(buffer)
        return None

    def close(self) -> None:
        """Wake the thread; nothing more is read from memory once this has returned."""
        self._error = self._error or PeerDead("the ring was closed")
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def dispose(self) -> None:
        """End the thread, close the connection."""
        self._queue.put(None)
        self._thread.join()
        self._sock.close()


class StreamSender:
    """The outlet of one edge: ``socks`` connections that share ``slots`` chunks."""

    def __init__(
        self, socks: Sequence[socket.socket], slots: int, member: int, carrier: Carrier, name: str
    ) -> None:
        each = max(1, slots // len(socks))
        self._lanes = [SendLane(s, each, member, carrier, f"{name}-{i}") for i, s in enumerate(socks)]
        self._carrier = carrier
        self._turn = 0
        self.frames = 0

    def begin(self, failed: Callable[[FTARError], None]) -> None:
        """Count the bytes from 0."""
        self._turn = 0
        for lane in self._lanes:
            lane.sent = 0
            lane.failed = failed

    def send(self, head: bytes, payload: Tensor | None, small: bool) -> None:
        """The next frame on the next lane."""
        self._lanes[self._turn % len(self._lanes)].send(head, payload, small)
        self._turn += 1
        self.frames += 1

    def flush(self) -> int:
        """Wait for all lanes; the bytes that they sent."""
        for lane in self._lanes:
            lane.flush()
        return sum(lane.sent for lane in self._lanes)

    @property
    def high_water(self) -> int:
        """Most bytes that were ever on their way at once."""
        return sum(lane.high_water for lane in self._lanes)

    def close(self) -> None:
        """Wake the lanes."""
        for lane in self._lanes:
            lane.close()

    def dispose(self) -> None:
        """End the lanes."""
        for lane in self._lanes:
            lane.dispose()
        self._carrier.close()
