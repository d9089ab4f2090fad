"""The engine's thread: takes queued all-reduces in order, waits for the ring of their epoch, and runs them.

When an all-reduce fails, the works behind it with the same epoch are skipped (FT-HSDP §4.2, "Timeout and error
handling"). A ring that is over is disposed of on this thread, before the next ring is used: until then its
transport threads may still write into an output tensor.
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
    """A future of an `AllReduceResult`.

    A RETRYABLE or SKIPPED work has left its input as it was, unless the input is also the output. The caller may
    queue it again in a later epoch (FT-HSDP §4.2).
    """

    @property
    def status(self) -> Status:
        """Current status: pending, done, or failed in one of three ways. Does not block."""
        if not self.done():
            return "PENDING"
        error = self.exception()
        if error is None:
            return "SUCCESS"
        if isinstance(error, Skipped):
            return "SKIPPED"
        return "RETRYABLE" if isinstance(error, RecoverableError) else "FATAL"

    def wait(self, timeout_s: float | None = None) -> Tensor:
        """Block until the all-reduce is done, and return the sum.

        Args:
            timeout_s: how long to wait; None: until the work is done.

        Returns:
            The output tensor, which holds the sum.

        Raises:
            FTARError: the all-reduce failed. A RecoverableError can be repeated in a later epoch.
            TimeoutError: the work is not done after `timeout_s`; it continues.
        """
        out = self.result(timeout_s).out
        assert isinstance(out, Tensor), "whoever gives pieces keeps them"
        return out


DECIDED_S = 0.2  # how long a failed work waits for the group to name the cause


class Executor:
    """Runs the works of one group on a thread of its own.

    Args:
        patience_s: how long a work waits for its ring to be formed.
        failed: called with (epoch, error) when a ring failed during an all-reduce.
        ran: called with (epoch, True) when an all-reduce begins, with (epoch, False) when it ends.
        crashed: called with (message, error) when this program is at fault, and not the ring.

    The three callbacks run on the engine's thread.
    """

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
        self._epoch = 0  # the newest epoch that the group has announced
        self._ring: Ring | None = None  # its ring, once formed
        self._error: FTARError | None = None  # why its ring is over
        self._ended: list[Ring] = []  # rings that are over and still have threads
        self._failed_epoch = 0  # the epoch in which an all-reduce failed: the works behind it are skipped
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="ftar", daemon=True)
        self._thread.start()

    # Called on the control loop.

    def expect(self, epoch: int) -> None:
        """Let works of `epoch` wait: its ring is being formed.

        Works of other epochs fail. Called on the control loop.
        """
        with self._changed:
            self._epoch, self._ring, self._error = epoch, None, None
            self._changed.notify_all()

    def run_on(self, ring: Ring) -> None:
        """Run the works of `ring.epoch` on `ring`, unless that epoch is over. Called on the control loop."""
        with self._changed:
            if self._epoch == ring.epoch and self._error is None:
                self._ring = ring
                self._changed.notify_all()

    def over(self, epoch: int, error: FTARError) -> None:
        """Fail all works of `epoch` with `error`, and dispose of its ring. Called on the control loop."""
        with self._changed:
            if self._epoch == epoch:
                self._error = error
                if self._ring is not None:
                    self._ended.append(self._ring)
                    self._orders.put(self._ring)
                self._ring = None
                self._changed.notify_all()

    def close(self) -> None:
        """End the thread; block until it has ended.

        The caller ends the current ring first, so that no work waits.
        """
        with self._changed:
            self._closed = True
            self._orders.put(None)
        self._thread.join()

    # Called on any thread.

    def queue(self, order: AllReduceOrder) -> Work:
        """Queue an all-reduce behind all others and return its future. Any thread; does not block."""
        work = Work()
        with self._changed:
            if not self._closed:
                self._orders.put((order, work))
                return work
        work.set_exception(StaleEpoch(f"epoch {order.key.epoch} is over"))
        return work

    # Runs on the engine's thread.

    def _run(self) -> None:
        while (item := self._orders.get()) is not None:
            if isinstance(item, Ring):
                item.dispose()
                continue
            order, work = item
            epoch = order.key.epoch
            try:
                result = self._reduce(order)
            except FTARError as error:
                work.set_exception(error)
            except Exception as error:  # an error of this program, not of the ring
                self._crashed(f"an all-reduce of epoch {epoch} failed", error)
                work.set_exception(error)
            else:
                work.set_result(result)
        self._dispose_ended()

    def _reduce(self, order: AllReduceOrder) -> AllReduceResult:
        epoch = order.key.epoch
        ring = self._wait(epoch)
        self._ran(epoch, True)
        try:
            return ring.all_reduce(order)
        except FTARError as error:
            self._failed_epoch = epoch
            self._failed(epoch, error)
            raise self._decided(epoch, error) from error
        finally:
            self._ran(epoch, False)

    def _wait(self, epoch: int) -> Ring:
        """Return the ring of `epoch` once it is formed; before that, dispose of all older rings."""
        with self._changed:
            known = self._changed.wait_for(
                lambda: self._epoch != epoch or self._ring is not None or self._error is not None, self._patience_s
            )
            ring, error = self._ring, self._error
            current = self._epoch == epoch
        self._dispose_ended()
        if not current:
            raise StaleEpoch(f"epoch {epoch} is over")
        if ring is not None:
            return ring
        if not known or error is None:
            raise PeerDead(f"the ring of epoch {epoch} was not formed in time")
        if self._failed_epoch == epoch:
            raise Skipped(f"an all-reduce before it failed: {error}", suspect=error.suspect) from error
        self._failed_epoch = epoch
        raise error

    def _dispose_ended(self) -> None:
        with self._changed:
            ended, self._ended = self._ended, []
        for ring in ended:
            ring.dispose()

    def _decided(self, epoch: int, error: FTARError) -> FTARError:
        """Return the error that the group decided on, if it comes in time: a peer may have told the cause."""
        with self._changed:
            self._changed.wait_for(lambda: self._epoch != epoch or self._error is not None, DECIDED_S)
            return self._error if self._epoch == epoch and self._error is not None else error
