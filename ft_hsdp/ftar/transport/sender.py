"""The sending end of an edge over stream sockets; frames leave round-robin over its lanes.

Each lane has a window and a sending thread. The receiver answers on the same connection with one byte that says
how many more chunks it has finished with; a lane never has more unanswered chunks than slots. Small frames leave
on the caller's thread if the lane is idle.
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
from ft_hsdp.ftar.transport.base import InlineCodec, WaitClock
from ft_hsdp.record_layer import Sealed

Buffers = list[bytes | memoryview]


@dataclass(frozen=True, slots=True)
class Remainder:
    """The part of a frame that the kernel has not taken yet."""

    buffers: Buffers
    descriptors: tuple[int, ...]


_Item = tuple[bytes, Tensor | None] | Remainder | Future[None] | None


class SendLane:
    """One connection to the right neighbour. `sock` is blocking, with the kernel's deadlines set."""

    def __init__(
        self, sock: socket.socket, slots: int, member: int, codec: InlineCodec, name: str, threaded: bool = True
    ) -> None:
        self._sock = sock
        self._threaded = threaded
        # An encrypted connection sends whole records only, and blocks until it can.
        self._sealed = isinstance(sock, Sealed)
        self._slots = slots
        self._member = member
        self._codec = codec
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._queued = 0  # items put into the queue
        self._taken = 0  # items that the thread has finished
        self._unanswered: deque[int] = deque()  # payload bytes of each chunk in flight
        self._under_way = 0  # their sum
        self._error: FTARError | None = None
        self._failed: Callable[[FTARError], None] | None = None
        self.sent = 0
        self.high_water = 0
        self.blocked = WaitClock()  # until the neighbour took what was sent
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def begin(self, failed: Callable[[FTARError], None]) -> None:
        """Begin an all-reduce: count its bytes from 0, and report a failure of the thread to `failed`."""
        self.sent = 0
        self._failed = failed

    def send(self, head: bytes, payload: Tensor | None, small: bool) -> None:
        """Queue a frame, or send it at once if a thread does not pay for it and no other is queued.

        Never waits for the kernel: the caller also receives, and two neighbours that both waited for each other
        would block.
        """
        inline = not self._sealed and (small or self._codec.by_reference or not self._threaded)
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
        """Block until the neighbour has finished with all that was sent.

        After that no data is lost if this process ends at once. A connection that is closed with unread answers is
        reset, and data that has not arrived is lost with it.
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
                elif isinstance(item, Remainder):
                    self._deliver(item, wait=True)
                else:
                    self._settle(self._slots - 1)
                    self._transmit(*item, wait=True)
            except Exception as error:  # the engine must learn of every error
                other = exhausted(error) or LocalSystemError(f"sending: {error!r}")
                cause = error if isinstance(error, FTARError) else other
                self._fail(cause)
                if isinstance(item, Future):
                    item.set_exception(cause)
            finally:
                self._taken += not isinstance(item, Future)
                item = None  # do not keep its payload alive until the next item comes

    def _settle(self, left: int = 0) -> None:
        """Block until the neighbour has finished with all chunks in flight, but for the newest `left` ones."""
        with self.blocked:
            while len(self._unanswered) > left and self._error is None:
                self._answers(block=True)
        if self._error is not None:
            raise self._error

    def _fail(self, error: FTARError) -> None:
        if self._error is None:
            self._error = error
            if self._failed is not None:
                self._failed(error)

    def _answers(self, block: bool) -> None:
        """Read which chunks the neighbour has finished with."""
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

    def _transmit(self, head: bytes, payload: Tensor | None, wait: bool) -> Remainder | None:
        """Pass one frame to the kernel; return what the kernel does not take without waiting."""
        nbytes = payload.nbytes if payload is not None else 0
        self._unanswered.append(nbytes)
        self._under_way += nbytes
        self.high_water = max(self.high_water, self._under_way)
        encoded = self._codec.pack(payload)
        self.sent += len(head) + nbytes
        return self._deliver(Remainder([encoded.label + head, *encoded.buffers], encoded.descriptors), wait)

    def _deliver(self, frame: Remainder, wait: bool) -> Remainder | None:
        try:
            if not wait:
                return self._hand(frame, wait)
            with self.blocked:
                return self._hand(frame, wait)
        except BlockingIOError:
            if not wait:
                return frame
            raise PeerTimeout("the right neighbour takes no bytes", suspect=self._member) from None
        except OSError as error:
            raise exhausted(error) or PeerDead(f"right neighbour: {error}", suspect=self._member) from error

    def _hand(self, frame: Remainder, wait: bool) -> Remainder | None:
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
            return Remainder(rest, ()) if rest else None
        for buffer in rest:
            self._sock.sendall(buffer)
        return None

    def close(self) -> None:
        """Wake the sending thread. No payload is read after this has returned."""
        self._error = self._error or PeerDead("the ring was closed")
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def dispose(self) -> None:
        """End the thread and close the connection; blocks until the thread has ended."""
        self._queue.put(None)
        self._thread.join()
        self._sock.close()


class StreamSender:
    """The sending end of one edge: chunks to the right neighbour.

    The engine's thread calls `begin`, `send` and `flush`; any thread `close`, any number of times.

    Args:
        socks: the connections; they share the slots.
        slots: chunks in flight over all connections.
        member: replica at the other end, which errors name as the suspect.
        name: prefix of the names of the threads.
        threaded: send large chunks on threads, one for each connection; else only what the kernel does not take
            at once.

    Attributes:
        frames: number of frames sent, or queued to be sent, since the connection was made.
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
        self._lanes = [SendLane(s, each, member, codec, f"{name}-{i}", threaded) for i, s in enumerate(socks)]
        self._codec = codec
        self._turn = 0
        self.frames = 0

    def begin(self, failed: Callable[[FTARError], None]) -> None:
        """Begin an all-reduce: count its bytes from 0, and report failures of the threads to `failed`."""
        self._turn = 0
        for lane in self._lanes:
            lane.begin(failed)

    def send(self, head: bytes, payload: Tensor | None, small: bool) -> None:
        """Queue the next frame on the next connection. Does not block.

        Args:
            head: the frame's header and its entries.
            payload: flat CPU tensor that must not change until `flush` returns; None: an empty chunk.
            small: send it on the calling thread if possible.
        """
        self._lanes[self._turn % len(self._lanes)].send(head, payload, small)
        self._turn += 1
        self.frames += 1

    def flush(self) -> int:
        """Block until the neighbour has finished with all frames; return the bytes sent, with headers.

        Raises:
            PeerDead: the connection broke.
            PeerTimeout: the neighbour did not take the data before the deadline.
        """
        for lane in self._lanes:
            lane.flush()
        return sum(lane.sent for lane in self._lanes)

    @property
    def high_water(self) -> int:
        """The largest number of payload bytes that were in flight at once."""
        return sum(lane.high_water for lane in self._lanes)

    @property
    def blocked_s(self) -> float:
        """Seconds since the connection was made in which this end waited until the neighbour took what was sent.

        Of several connections it is the longest time. A thread may wait while the engine goes on.
        """
        return max(lane.blocked.seconds for lane in self._lanes)

    def close(self) -> None:
        """Wake all sending threads; no payload is read after this has returned."""
        for lane in self._lanes:
            lane.close()

    def dispose(self) -> None:
        """End the threads and close the connections, after `close`."""
        for lane in self._lanes:
            lane.dispose()
        self._codec.close()
