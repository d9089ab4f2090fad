"""Reads the batches of a loader ahead, with torch's own DataLoader and its workers.

A DataLoader takes from its sampler what it is to read next. Here the sampler is a list of what is expected next,
which may change: `_Pipeline` gives the DataLoader numbers of batches, in the order in which they will probably be
asked for, and passes over those that turn out to be wrong.

A DataLoader with workers lives on a thread of its own. On the main thread torch would raise the death of a worker
wherever that thread is, also while it commits a step; here it is raised where the next batch is asked for. The
workers are forked by the thread that opens the reader, which is the main one: a fork ends all other threads in the
child. What torch's DTensor caches for the main thread may be the last that holds a process group, whose end in a
child is a crash. Without workers the main thread reads: datasets draw from the generators of the process.
"""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from dataclasses import dataclass, field
from itertools import chain, islice
from multiprocessing import active_children, get_context
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader

from ft_hsdp.errors import ConfigError, Retryable
from ft_hsdp.lifetime import die_with, outlive_notices, stop_signals
from ft_hsdp.mounts import SOCKETS_IN, too_long_for_sockets
from ft_hsdp.train.data.prefetch import CLOSE_S, Reader
from ft_hsdp.train.data.samples import FailedRead, JobShape, SampleReader
from ft_hsdp.train.data.step_plan import MicroBatch

Batch = TypeVar("Batch")

GONE_S = 0.5  # for the end of a worker to show, after what it has sent could not be read
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - torch's workers hand over their tensors there
WORKER_BYTES = 4 << 20  # of it for a worker, at least; how large a batch is shows later
LOOK_S = 0.1  # between two looks at the workers while a batch is waited for


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How batches are read; the names are those of torch's DataLoader."""

    num_workers: int = 0
    prefetch_factor: int = 2
    pin_memory: bool = False
    timeout: float = 0
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: Any = None


def check_rooms(options: ReadOptions) -> None:
    """Refuse workers whose sockets or batches have no room: torch would wait for ever, or die without a reason.

    Raises:
        ConfigError: On TMPDIR: its name is too long for a socket in it. On num_workers: /dev/shm is too small.
    """
    if not options.num_workers:
        return
    if folder := too_long_for_sockets():
        allowed = f"a folder whose name has at most {SOCKETS_IN} bytes: the sockets of data workers lie in it"
        raise ConfigError("TMPDIR", folder, allowed)
    room = shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else 0
    if room < options.num_workers * WORKER_BYTES:
        why = f"{SHARED_MEMORY}, through which their batches come, has {room >> 20} MiB (docker run --shm-size=1g)"
        raise ConfigError("job.loader(num_workers)", options.num_workers, f"at most {room // WORKER_BYTES}: {why}")


@dataclass(slots=True)
class _Numbers:
    wanted: Sequence[int] = ()  # in the order in which they will be asked for
    ordered: deque[int | None] = field(default_factory=deque)  # given to the DataLoader and not returned by it yet

    def __iter__(self) -> Iterator[int | None]:
        """Give out the next number that is wanted; None, which costs no read, if all of them are ordered."""
        while True:
            number = next((n for n in self.wanted if n not in self.ordered), None)
            self.ordered.append(number)
            yield number


class _Pipeline:
    """A DataLoader, and what it was told to read. For one thread; its end is the end of the workers."""

    def __init__(self, samples: SampleReader, options: ReadOptions, forks: _Forks | None = None) -> None:
        self._numbers = _Numbers()
        workers = options.num_workers > 0
        context = options.multiprocessing_context if workers else None
        method = _start_method(context)
        parent = None if method == "forkserver" else os.getpid()
        if method == "fork" and forks is not None:
            context = forks.context
        loader = DataLoader(
            samples,
            batch_size=None,
            sampler=self._numbers,
            collate_fn=_unchanged,
            num_workers=options.num_workers,
            prefetch_factor=options.prefetch_factor if workers else None,
            pin_memory=options.pin_memory,
            timeout=options.timeout if workers else 0,
            worker_init_fn=_WorkerStart(parent, options.worker_init_fn),
            multiprocessing_context=context,
            generator=torch.Generator().manual_seed(0),  # or the job's own would be drawn from
        )
        before = active_children()
        self._batches: Iterator[Any] = iter(loader)
        self.workers = [child for child in active_children() if child not in before]
        # At the end of the process multiprocessing sends SIGTERM, and waits without a limit.
        Finalize(self, _kill, (self.workers,), exitpriority=0)

    def expect(self, wanted: Sequence[int]) -> None:
        """Have ``wanted`` read, and pass over what was ordered before them. Blocks while that is read."""
        self._numbers.wanted = wanted
        while self._numbers.ordered and self._numbers.ordered[0] not in wanted:
            self._take()

    def batch(self, wanted: Sequence[int]) -> Any:
        """Return the first of ``wanted``; the others are read afterwards. Blocks while it is read."""
        self._numbers.wanted = wanted
        while True:
            number, outcome = self._take()
            if number == wanted[0]:
                if isinstance(outcome, FailedRead):
                    outcome.reraise()
                return outcome

    def close(self) -> None:
        """End the workers. An error that was raised may keep torch's iterator, and so delay its destructor."""
        batches, self._batches = self._batches, iter(())
        end = getattr(batches, "_shutdown_workers", None)
        if end is not None:
            end()
        _kill(self.workers)  # one that hangs ignores the SIGTERM of torch

    def _take(self) -> tuple[int | None, Any]:
        """Return the batch that was ordered first, and its number; then one more is ordered."""
        try:
            outcome = next(self._batches)
        except Exception as error:
            # The end of a worker shows in many ways: what it has sent may be in memory that is gone with it.
            gone = wait([worker.sentinel for worker in self.workers], GONE_S)
            for worker in self.workers:
                if worker.sentinel in gone:
                    raise _ended(worker) from error
            if isinstance(error, RuntimeError) and str(error).startswith("DataLoader "):  # so torch begins
                raise _failed(str(error)) from error
            raise
        return self._numbers.ordered.popleft(), outcome


class _Forks:
    """Has a thread fork the processes that another thread starts."""

    def __init__(self, given: Any) -> None:
        self._orders: SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = SimpleQueue()
        order = self._order
        context = given if isinstance(given, BaseContext) else get_context("fork")

        class Process(context.Process):  # type: ignore[name-defined]
            def start(self) -> None:
                order(super().start)

        self.context = copy.copy(context)
        """Does what the given one does, but starts its processes on the thread that is in `serve`."""
        self.context.Process = Process  # type: ignore[attr-defined]

    def serve(self) -> None:
        while (order := self._orders.get()) is not None:
            start, done = order
            try:
                done.set_result(start())
            except BaseException as error:
                done.set_exception(error)

    def end(self) -> None:
        self._orders.put(None)

    def _order(self, start: Callable[[], None]) -> None:
        done: Future[None] = Future()
        self._orders.put((start, done))
        done.result()


class _NumberedReader(Generic[Batch]):
    def __init__(self, shape: JobShape, depth: int) -> None:
        self._shape = shape
        self._depth = depth

    def trained(self, first: MicroBatch) -> None:
        """Do nothing: each batch can be read again."""

    def _wanted(self, micro_batches: Iterable[MicroBatch]) -> list[int]:
        some = islice(micro_batches, self._depth + 1)
        return [self._shape.number(at.shard, at.index, at.rank, at.micro) for at in some]


class MainThreadReader(_NumberedReader[Batch]):
    def __init__(self, samples: SampleReader, shape: JobShape, options: ReadOptions) -> None:
        super().__init__(shape, 0)
        self._pipeline: _Pipeline | None = _Pipeline(samples, options)

    def guess(self, ahead: Iterable[MicroBatch]) -> None:
        """Do nothing: what is read now would be waited for now."""

    def batch(self, at: MicroBatch, ahead: Iterable[MicroBatch]) -> Batch:
        if self._pipeline is None:
            raise RuntimeError("the reader is closed")
        return self._pipeline.batch(self._wanted([at]))

    def close(self) -> None:
        self._pipeline = None


class WorkersReader(_NumberedReader[Batch]):
    """Has batches read by worker processes, which live as long as the reader."""

    def __init__(self, samples: SampleReader, shape: JobShape, options: ReadOptions) -> None:
        super().__init__(shape, options.num_workers * options.prefetch_factor)
        self._orders: SimpleQueue[tuple[list[int], Future[Batch] | None] | None] = SimpleQueue()
        self._closed = False
        pins = options.pin_memory and torch.accelerator.is_available()
        device = torch.accelerator.current_device_index() if pins else None
        started: Future[list[BaseProcess]] = Future()
        forks = _Forks(options.multiprocessing_context)
        arguments = (samples, options, device, forks, started)
        self._thread = threading.Thread(target=self._run, args=arguments, name="data", daemon=True)
        self._thread.start()
        forks.serve()
        self._workers = started.result()

    def guess(self, ahead: Iterable[MicroBatch]) -> None:
        self._orders.put((self._wanted(ahead), None))

    def batch(self, at: MicroBatch, ahead: Iterable[MicroBatch]) -> Batch:
        """Return a micro-batch. Blocks while it is read.

        Raises:
            Retryable: A worker has died, or was too slow.
            RuntimeError: The reader is closed.
        """
        if self._closed:
            raise RuntimeError("the reader is closed")
        future: Future[Batch] = Future()
        self._orders.put((self._wanted(chain([at], ahead)), future))
        while True:
            for worker in self._workers:
                if not worker.is_alive():
                    raise _ended(worker)
            try:
                return future.result(LOOK_S)
            except NotDone:
                if future.done():  # now, or because the dataset has raised this
                    return future.result()

    def close(self) -> None:
        self._closed = True
        self._orders.put(None)
        self._thread.join(CLOSE_S)

    def _run(
        self,
        samples: SampleReader,
        options: ReadOptions,
        device: int | None,
        forks: _Forks,
        started: Future[list[BaseProcess]],
    ) -> None:
        try:
            if device is not None:
                torch.accelerator.set_device_index(device)
            pipeline = _Pipeline(samples, options, forks)
            started.set_result(pipeline.workers)
        except BaseException as error:
            started.set_exception(error)
            return
        finally:
            forks.end()
        failed: BaseException | None = None
        while (order := self._orders.get()) is not None:
            wanted, future = order
            try:
                if failed is not None:
                    raise failed
                if future is None:
                    pipeline.expect(wanted)
                else:
                    future.set_result(pipeline.batch(wanted))
            except BaseException as error:
                if future is None:
                    failed = error
                else:
                    future.set_exception(error)
        pipeline.close()


def open_loader(samples: SampleReader, shape: JobShape, options: ReadOptions) -> Reader[Any]:
    """Return what reads batches.

    Workers are started now, before the rank has connections to other replicas: what a worker inherits stays open
    until it ends, too.
    """
    kind = WorkersReader if options.num_workers else MainThreadReader
    return kind(samples, shape, options)


def _kill(workers: Iterable[BaseProcess]) -> None:
    for worker in workers:
        with contextlib.suppress(ValueError):  # it is closed
            worker.kill()


def _failed(why: str) -> Retryable:
    return Retryable(f"the data of this rank: {' '.join(why.split())}")


def _ended(worker: BaseProcess) -> Retryable:
    # The files of a process close before its exit code can be read; and the other thread may be reading it now.
    end = time.monotonic() + GONE_S
    while (code := worker.exitcode) is None and time.monotonic() < end:
        time.sleep(0.001)
    if code is not None and code < 0:
        return _failed(f"worker process {worker.pid} has ended with signal {-code} ({signal.Signals(-code).name})")
    return _failed(f"worker process {worker.pid} has ended with exit code {code}")


def _unchanged(batch: Any) -> Any:
    return batch


def _start_method(context: Any) -> str:
    if isinstance(context, str):
        return context
    return str((context or torch.multiprocessing).get_start_method())


@dataclass(frozen=True, slots=True)
class _WorkerStart:
    parent: int | None  # pid of the rank, if that is the worker's parent
    then: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        # torch's worker looks for its parent every 5 s only. As long as it lives, it holds what it has inherited:
        # connections by whose end other processes notice that the rank is gone.
        if self.parent is not None:
            die_with(self.parent)
            os.setsid()
        # Whoever stops all processes of a job tells the ranks to leave; until they have, their data are read. No
        # SIG_IGN, which the programs that a dataset starts would inherit.
        for number in stop_signals():
            signal.signal(number, lambda *_: None)
        outlive_notices()
        if self.then is not None:
            self.then(worker)
