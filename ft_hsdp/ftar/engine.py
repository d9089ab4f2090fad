"""Engine: one ring all-reduce over two sockets, out of place, chunk by chunk.

The caller's thread receives and adds while a second thread sends, so both directions of the link are busy and a
chunk is passed on as soon as it is here. The local gradient is only read: a failed step is reduced again from it.
An all-reduce is over only when its own sends have drained.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from ft_hsdp.core import partition
from ft_hsdp.core import ring as plan
from ft_hsdp.core.partition import Span
from ft_hsdp.errors import PeerDead, PeerTimeout
from ft_hsdp.ftar import frame
from ft_hsdp.ftar.frame import Entry, Key

FLOAT = 4


@dataclass(frozen=True, slots=True)
class Result:
    """What is known after an all-reduce: every member's entry by ring position, and the bytes sent."""

    entries: tuple[Entry, ...]
    bytes_sent: int


class Ring:
    """The data plane of one epoch: this member's position and its two sockets.

    ``left`` and ``right`` are blocking sockets with SO_RCVTIMEO and SO_SNDTIMEO set (None in a ring of one);
    ``left_replica`` and ``right_replica`` name who is to blame when they fail.
    """

    def __init__(
        self,
        epoch: int,
        ring: Sequence[int],
        position: int,
        left: socket.socket | None,
        right: socket.socket | None,
        chunk_bytes: int,
    ) -> None:
        self.epoch = epoch
        self.members = len(ring)
        self.position = position
        self.left_replica = ring[(position - 1) % len(ring)]
        self.right_replica = ring[(position + 1) % len(ring)]
        self._left = left
        self._right = right
        self._chunk = max(1, chunk_bytes // FLOAT)
        self._sender = _Sender(right, self.right_replica, f"ftar-tx-{epoch}") if right is not None else None

    def all_reduce(self, key: Key, local: torch.Tensor | None, out: torch.Tensor, mine: Entry) -> Result:
        """Sum ``local`` [n] fp32 of all contributors into ``out`` [n]; None relays (adds nothing).

        Raises:
            PeerDead, PeerTimeout, StaleEpoch, ProtocolViolation: the ring is of no more use.
        """
        if local is not None and (local.shape != out.shape or local.dtype != torch.float32):
            raise ValueError(f"local is {local.dtype} {tuple(local.shape)}, out {out.dtype} {tuple(out.shape)}")
        if self.members == 1:
            out.zero_() if local is None else out.copy_(local)
            return Result((mine,), 0)
        assert self._sender is not None
        self._sender.begin()
        shards = partition.shards(out.numel(), self.members)
        entries: dict[int, Entry] = {self.position: mine}
        self._start(key, shards[self.position], local, mine)
        rounds = plan.rounds(self.position, self.members)
        buffer = _bytes(out)
        for number, step in enumerate(rounds):
            onward = number + 1 < len(rounds)
            for index, span in enumerate(partition.chunks(shards[step.receive], self._chunk)):
                news = number + 1 if step.reduce and index == 0 else 0
                empty, got = self._receive(key, number, index, span, buffer, news, step.reduce)
                for k, entry in enumerate(got):
                    entries[(self.position - number - 1 + k) % self.members] = entry
                if step.reduce:
                    empty = self._add(span, local, out, empty)
                    if empty and number == self.members - 2:
                        out[span.start : span.stop].zero_()
                        empty = False
                if onward:
                    self._pass(key, number + 1, index, span, buffer, empty, got, mine)
        sent = self._sender.drain()
        return Result(tuple(entries[i] for i in range(self.members)), sent)

    def _start(self, key: Key, shard: Span, local: torch.Tensor | None, mine: Entry) -> None:
        """Round 0: the own shard goes right, straight from the local gradient."""
        assert self._sender is not None
        source = _bytes(local) if local is not None else None
        for index, span in enumerate(partition.chunks(shard, self._chunk)):
            news = (mine,) if index == 0 else ()
            self._sender.put(key, 0, index, span, source, news)

    def _pass(
        self,
        key: Key,
        number: int,
        index: int,
        span: Span,
        buffer: memoryview,
        empty: bool,
        got: tuple[Entry, ...],
        mine: Entry,
    ) -> None:
        """The chunk that was just received goes right in the next round, with what is known of the members."""
        assert self._sender is not None
        news = (*got, mine) if got and number < self.members - 1 else ()
        self._sender.put(key, number, index, span, None if empty else buffer, news)

    def _receive(
        self, key: Key, number: int, index: int, span: Span, buffer: memoryview, news: int, reduce: bool
    ) -> tuple[bool, tuple[Entry, ...]]:
        """Receive one chunk into its place in ``out``."""
        nbytes = span.size * FLOAT
        head = bytearray(frame.HEADER.size)
        self._read(memoryview(head))
        empty = frame.check(bytes(head), key, number, index, nbytes, news, may_be_empty=reduce)
        got: tuple[Entry, ...] = ()
        if news:
            body = bytearray(news * frame.ENTRY.size)
            self._read(memoryview(body))
            got = frame.unpack_entries(bytes(body))
        if not empty and nbytes:
            self._read(buffer[span.start * FLOAT : span.stop * FLOAT])
        return empty, got

    @staticmethod
    def _add(span: Span, local: torch.Tensor | None, out: torch.Tensor, empty: bool) -> bool:
        """Add the local chunk to the partial sum in ``out``; True if the sum is still empty."""
        if local is None:
            return empty
        mine, there = local[span.start : span.stop], out[span.start : span.stop]
        if empty:
            there.copy_(mine)
        else:
            there.add_(mine)
        return False

    def _read(self, view: memoryview) -> None:
        """Fill ``view`` from the left neighbour."""
        assert self._left is not None
        got = 0
        while got < len(view):
            try:
                n = self._left.recv_into(view[got:], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                raise PeerTimeout("no byte from the left neighbour in time", suspect=self.left_replica) from None
            except OSError as error:
                raise PeerDead(f"left neighbour: {error}", suspect=self.left_replica) from error
            if n == 0:
                raise PeerDead("left neighbour closed its connection", suspect=self.left_replica)
            got += n

    def close(self) -> None:
        """Release whoever waits on the sockets; any thread may call this, more than once."""
        for sock in (self._left, self._right):
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        if self._sender is not None:
            self._sender.fail()

    def release(self) -> None:
        """Close the sockets, once nobody uses them any more."""
        self.close()
        if self._sender is not None:
            self._sender.finish()
        for sock in (self._left, self._right):
            if sock is not None:
                sock.close()


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, without a copy."""
    array: Any = tensor.detach().numpy()
    return memoryview(array).cast("B")


class _Sender:
    """The sending thread of a ring: frames go out in the order in which they were put."""

    def __init__(self, sock: socket.socket, replica: int, name: str) -> None:
        self._sock = sock
        self._replica = replica
        self._queue: queue.SimpleQueue[tuple[bytes, memoryview | None] | Future[int] | None] = queue.SimpleQueue()
        self._sent = 0
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Start counting for a new all-reduce."""
        self._sent = 0

    def put(
        self,
        key: Key,
        number: int,
        index: int,
        span: Span,
        source: memoryview | None,
        news: tuple[Entry, ...],
    ) -> None:
        """Queue one chunk; None as the source sends an empty one."""
        nbytes = span.size * FLOAT if source is not None else 0
        head = frame.header(key, number, index, nbytes, len(news), source is None)
        payload = source[span.start * FLOAT : span.stop * FLOAT] if source is not None and nbytes else None
        self._queue.put((head + b"".join(e.pack() for e in news), payload))

    def drain(self) -> int:
        """Wait until all that was put has been handed to the kernel; the bytes of this all-reduce."""
        done: Future[int] = Future()
        self._queue.put(done)
        return done.result()

    def fail(self) -> None:
        """Send nothing more; whoever waits for the queue to drain gets an error."""
        if self._error is None:
            self._error = PeerDead("the ring was closed")

    def finish(self) -> None:
        """End the thread; its socket is shut down, so it cannot hang."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, Future):
                if self._error is None:
                    item.set_result(self._sent)
                else:
                    item.set_exception(self._error)
                continue
            if self._error is not None:
                continue
            try:
                for part in item:
                    if part is not None:
                        self._sock.sendall(part)
                        self._sent += len(part)
            except BlockingIOError:
                self._error = PeerTimeout("the right neighbour takes no bytes", suspect=self._replica)
            except OSError as error:
                self._error = PeerDead(f"right neighbour: {error}", suspect=self._replica)
