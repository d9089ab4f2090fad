"""Where batches come from, and how they are read before they are asked for.

Which batch comes next is known for certain only when its step begins; before that it is a guess. A wrong guess
costs a read and nothing else.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from ft_hsdp.train.data.step_plan import MicroBatch

Out = TypeVar("Out", covariant=True)
Batch = TypeVar("Batch")

CLOSE_S = 1.0


class Source(Protocol[Out]):
    """Data whose batches are a pure function of their place: any rank may be asked for any of them, and again."""

    def batch(self, shard: int, index: int, rank: int, micro: int = 0) -> Out:
        """Return micro-batch ``micro`` of rank ``rank`` in batch ``index`` of data shard ``shard``."""


class Reader(Protocol[Out]):
    """Reads the batches of one rank, the next ones before they are asked for. For the main thread."""

    def guess(self, ahead: Iterable[MicroBatch]) -> None:
        """Begin to read micro-batches that will probably be asked for, in this order."""

    def batch(self, at: MicroBatch, ahead: Iterable[MicroBatch]) -> Out:
        """Return a micro-batch; blocks while it is read. ``ahead``, which may be endless, will probably follow."""

    def trained(self, first: MicroBatch) -> None:
        """Note that all micro-batches before ``first`` are trained: they will not be asked for again."""

    def close(self) -> None:
        """End what reads; waits for a read that hangs for a second only."""


class Prefetcher(Generic[Batch]):
    """Reads one rank's part of the data, one micro-batch ahead, on a thread of its own.

    Only that thread calls the source. An error of the source is raised where the batch is asked for; one in the
    read of a wrong guess is forgotten.
    """

    def __init__(self, source: Source[Batch], pinned: bool = False) -> None:
        """Begin to read; with ``pinned`` into pinned memory, from which a device copies by itself."""
        self._source = source
        self._change = Tensor.pin_memory if pinned else None
        self._orders: SimpleQueue[tuple[MicroBatch, Future[Batch]] | None] = SimpleQueue()
        self._ahead: tuple[MicroBatch, Future[Batch]] | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._read, name="prefetch", daemon=True)
        self._thread.start()

    def guess(self, ahead: Iterable[MicroBatch]) -> None:
        self._order(next(iter(ahead)))

    def batch(self, at: MicroBatch, ahead: Iterable[MicroBatch]) -> Batch:
        batch = self._order(at).result()
        self.guess(ahead)
        return batch

    def read(self, at: MicroBatch, wait_s: float) -> Batch:
        """Read a micro-batch, and read it again the next time. Blocks for ``wait_s`` at most.

        Raises:
            TimeoutError: It is not read by then.
        """
        self._ahead = None
        return self._order(at).result(wait_s)

    def trained(self, first: MicroBatch) -> None:
        """Do nothing: a source can be asked for any place."""

    def close(self) -> None:
        self._closed = True
        if self._ahead is not None:
            self._ahead[1].cancel()
        self._orders.put(None)
        self._thread.join(CLOSE_S)

    def _order(self, at: MicroBatch) -> Future[Batch]:
        """Return the read of a micro-batch: the one that is ahead, or one begun now, in place of another one."""
        if self._closed:
            raise RuntimeError("the prefetcher is closed")
        if self._ahead is not None:
            if self._ahead[0] == at:
                return self._ahead[1]
            self._ahead[1].cancel()
        future: Future[Batch] = Future()
        self._ahead = (at, future)
        self._orders.put(self._ahead)
        return future

    def _read(self) -> None:
        while (order := self._orders.get()) is not None:
            at, future = order
            if not future.set_running_or_notify_cancel():
                continue
            try:
                batch = self._source.batch(at.shard, at.index, at.rank, at.micro)
                future.set_result(batch if self._change is None else _mapped(self._change, batch))
            except BaseException as error:
                future.set_exception(error)


def move(batch: Any, device: torch.device) -> Any:
    """Return ``batch`` with its tensors on ``device``: a tensor, or tuples, lists and mappings of them."""
    if device.type == "cpu":
        return batch
    return _mapped(lambda tensor: tensor.to(device, non_blocking=tensor.is_pinned()), batch)


def _mapped(change: Callable[[Tensor], Tensor], batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        moved = {key: _mapped(change, value) for key, value in batch.items()}
        if not isinstance(batch, MutableMapping):
            return moved
        same = copy.copy(batch)  # of the same class, with its other attributes
        same.update(moved)
        return same
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_mapped(change, item) for item in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(_mapped(change, item) for item in batch)
    return batch


def count_tokens(batch: Any) -> int:
    """Return the number of tokens in one rank's micro-batch, for the metrics.

    They are the elements of ``input_ids`` of a mapping, and else of the first tensor that is found.
    """
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    first = next(_tensors([ids, batch]), None)
    return 0 if first is None else first.numel()


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, tuple | list):
        for item in batch:
            yield from _tensors(item)
