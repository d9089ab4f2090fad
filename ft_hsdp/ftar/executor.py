"""Work: an all-reduce that was asked for: pending, done, or failed in one of three ways.

Runner: the engine's thread: takes the works in order, waits for their ring, runs them on it.

When one fails, what stands behind it for the same epoch is skipped (FT-HSDP §4.2, "Timeout and error handling").
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Literal

from torch import Tensor

from ft_hsdp.errors import FTARError, PeerDead, RecoverableError, Skipped, StaleEpoch
from ft_hsdp.ftar.allreduce import AllReduceOrder, AllReduceResult, Ring

Status = Literal["PENDING", "SUCCESS", "RETRYABLE", "FATAL", "SKIPPED"]


class Work(Future[AllReduceResult]):
    """A future of an `AllReduceResult`. RETRYABLE: the input is whole, ask in a later epoch (FT-HSDP §4.2)."""

    @property
    def status(self) -> Status:
        """How it stands."""
        if not self.done():
            return "PENDING"
        error = self.exception()
        if error is None:
            return "SUCCESS"
        if isinstance(error, Skipped):
            return "SKIPPED"
        return "RETRYABLE" if isinstance(error, RecoverableError) else "FATAL"

    def wait(self, timeout_s: float | None = None) -> Tensor:
        """The sum.

        Raises:
            FTARError: what became of it.
            TimeoutError: it is not done after ``timeout_s``; it goes on.
        """
        return self.result(timeout_s).out


DECIDED_S = 0.2


class Executor:
    """``failed`` and ``ran`` are told of rings and works on the engine's thread, ``crashed`` of our own errors."""

    def __init__(
        self,
        patience_s: float,
        failed: Callable[[int, FTARError], None],
        ran: Callable[[int, bool], None],
        crashed: Callable[[str, Exception], None],
    ) -> None:
        self._patience_s = patience_s
        self._failed = failed
        self._ran = ran
        self._crashed = crashed
        self._orders: queue.SimpleQueue[tuple[AllReduceOrder, Work] | Ring | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._epoch = 0
        self._ring: Ring | None = None
        self._error: FTARError | None = None
        self._old: list[Ring] = []
        self._broke = 0
        self._thread = threading.Thread(target=self._run, name="ftar", daemon=True)
        self._thread.start()

    # The control loop.

    def expect(self, epoch: int) -> None:
        """The ring of ``epoch`` is being formed: its works wait."""
        with self._changed:
            self._epoch, self._ring, self._error = epoch, None, None
            self._changed.notify_all()

    def run_on(self, ring: Ring) -> None:
        """The ring stands."""
        with self._changed:
            if self._epoch == ring.epoch and self._error is None:
                self._ring = ring
                self._changed.notify_all()

    def over(self, epoch: int, error: FTARError) -> None:
        """The ring of ``epoch`` is of no more use, and this is why."""
        with self._changed:
            if self._epoch == epoch:
                self._error = error
                if self._ring is not None:
                    self._old.append(self._ring)
                    self._orders.put(self._ring)
                self._ring = None
                self._changed.notify_all()

    def close(self) -> None:
        """End the thread; what is queued has failed before."""
        self._orders.put(None)
        self._thread.join()

    # Any thread.

    def queue(self, order: AllReduceOrder) -> Work:
        """Put a work at the end."""
        work = Work()
        self._orders.put((order, work))
        return work

    # The engine's thread.

    def _run(self) -> None:
        while (item := self._orders.get()) is not None:
            if isinstance(item, Ring):
                item.dispose()
                continue
            order, work = item
            epoch = order.key.epoch
            try:
                result = self._work(order)
            except FTARError as error:
                work.set_exception(error)
            except Exception as error:  # ours, not the ring's
                self._crashed(f"an all-reduce of epoch {epoch} failed", error)
                work.set_exception(error)
            else:
                work.set_result(result)
        self._forget()

    def _work(self, order: AllReduceOrder) -> AllReduceResult:
        epoch = order.key.epoch
        ring = self._wait(epoch)
        self._ran(epoch, True)
        try:
            return ring.all_reduce(order)
        except FTARError as error:
            self._broke = epoch
            self._failed(epoch, error)
            raise self._decided(epoch, error) from error
        finally:
            self._ran(epoch, False)

    def _wait(self, epoch: int) -> Ring:
        """The ring of ``epoch``, once it is formed; nobody of an older one writes into memory any more."""
        with self._changed:
            known = self._changed.wait_for(
                lambda: self._epoch != epoch or self._ring is not None or self._error is not None, self._patience_s
            )
            ring, error = self._ring, self._error
            current = self._epoch == epoch
        self._forget()
        if not current:
            raise StaleEpoch(f"epoch {epoch} is over")
        if ring is not None:
            return ring
        if not known or error is None:
            raise PeerDead(f"the ring of epoch {epoch} was not formed in time")
        if self._broke == epoch:
            raise Skipped(f"an all-reduce before it failed: {error}", suspect=error.suspect) from error
        self._broke = epoch
        raise error

    def _forget(self) -> None:
        with self._changed:
            old, self._old = self._old, []
        for ring in old:
            ring.dispose()

    def _decided(self, epoch: int, error: FTARError) -> FTARError:
        """What the group makes of a failure: a neighbour may have said why."""
        with self._changed:
            self._changed.wait_for(lambda: self._epoch != epoch or self._error is not None, DECIDED_S)
            return self._error if self._epoch == epoch and self._error is not None else error
