"""Prefetch: batches are read before they are asked for, on a thread of their own.

Which batch comes next is known for certain only when its step begins; before that it is a guess. A guess that was
wrong costs a read, nothing else: batches are pure functions of their place.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

Out = TypeVar("Out", covariant=True)
Batch = TypeVar("Batch")

CLOSE_S = 1.0


class Source(Protocol[Out]):
    """Data whose batches are a pure function of their place: any replica may be asked for any of them again."""

    def batch(self, shard: int, index: int, rank: int, micro: int = 0) -> Out:
        """Batch ``index`` of data shard ``shard``: the part of rank ``rank``, micro-batch ``micro``."""


@dataclass(frozen=True, slots=True)
class Place:
    """One micro-batch of this rank."""

    shard: int
    index: int
    micro: int


class Prefetcher(Generic[Batch]):
    """Reads one rank's part of ``source``, one micro-batch ahead. Only its thread calls the source.

    What the source raises is raised where the batch is asked for; a failed read of a wrong guess is forgotten.
    """

    def __init__(self, source: Source[Batch], rank: int, accumulate: int) -> None:
        self._source = source
        self._rank = rank
        self._accumulate = accumulate
        self._orders: SimpleQueue[tuple[Place, Future[Batch]] | None] = SimpleQueue()
        self._ahead: tuple[Place, Future[Batch]] | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._read, name="prefetch", daemon=True)
        self._thread.start()

    def guess(self, shard: int, index: int) -> None:
        """This batch will probably be the next one: begin to read it."""
        self._order(Place(shard, index, 0))

    def batches(self, shard: int, index: int, following: tuple[int, int]) -> Iterator[Batch]:
        """The micro-batches of a batch, in order; ``following`` (shard, index) is the guess for the one after it.

        Raises:
            RuntimeError: closed.
        """
        for micro in range(self._accumulate):
            batch = self._order(Place(shard, index, micro)).result()
            last = micro == self._accumulate - 1
            self._order(Place(*following, 0) if last else Place(shard, index, micro + 1))
            yield batch

    def close(self) -> None:
        """End the thread; a read that hangs is left alone."""
        self._closed = True
        if self._ahead is not None:
            self._ahead[1].cancel()
        self._orders.put(None)
        self._thread.join(CLOSE_S)

    def _order(self, place: Place) -> Future[Batch]:
        """The read of ``place``, begun now unless it is the one that is ahead; another one ahead is given up."""
        if self._closed:
            raise RuntimeError("the prefetcher is closed")
        if self._ahead is not None:
            if self._ahead[0] == place:
                return self._ahead[1]
            self._ahead[1].cancel()
        future: Future[Batch] = Future()
        self._ahead = (place, future)
        self._orders.put(self._ahead)
        return future

    def _read(self) -> None:
        while (order := self._orders.get()) is not None:
            place, future = order
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._source.batch(place.shard, place.index, self._rank, place.micro))
            except BaseException as error:
                future.set_exception(error)
