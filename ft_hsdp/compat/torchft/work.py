"""The result of a collective, as torch.distributed expects it, and the bundles of tensors that a sum consists of.

A list of tensors is cut into bundles, flat buffers that take one ring operation each. How it is cut depends on
sizes and types alone, which are the same on all ranks. What a rank copies depends on its own tensors: one that is
contiguous, on the CPU and alone in its bundle is summed where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work
from torch.futures import Future

from ft_hsdp.ftar import Work as RingWork

BUNDLE_BYTES = 2**20  # smaller tensors share a bundle: measured, a copy costs less than an operation of its own


@dataclass(frozen=True, slots=True)
class TensorBundle:
    """Tensors of one type that are summed in one ring operation."""

    tensors: tuple[Tensor, ...]
    flat: Tensor  # contiguous, on the CPU: the elements of all tensors in order; may be the only tensor itself

    def finish(self, divisor: int) -> None:
        """Divide the sum by ``divisor``, and copy it to the tensors. Blocks until it is there."""
        if divisor != 1:
            self.flat.div_(divisor)
        if self.tensors[0] is self.flat:
            return
        parts = self.flat.split([t.numel() for t in self.tensors])
        for tensor, part in zip(self.tensors, parts, strict=True):
            tensor.detach().copy_(part.view(tensor.shape))
        for device in {t.device for t in self.tensors if t.device.type != "cpu"}:
            torch.accelerator.synchronize(device)


def bundles(tensors: Sequence[Tensor]) -> list[TensorBundle]:
    """Cut ``tensors`` into bundles in their order: large ones alone, small ones of one type together."""
    groups: dict[object, list[Tensor]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault(i if tensor.nbytes >= BUNDLE_BYTES else tensor.dtype, []).append(tensor)
    return [TensorBundle(tuple(group), _flat(group)) for group in groups.values()]


def _flat(tensors: list[Tensor]) -> Tensor:
    first = tensors[0]
    if len(tensors) == 1 and first.device.type == "cpu" and first.is_contiguous():
        return first
    return torch.cat([t.detach().reshape(-1).to("cpu") for t in tensors])


Failed = Callable[[BaseException], RuntimeError]  # takes an error of the group, returns the one to raise


class HostWork(Work):
    """What is done on the host: a stream has to wait as long as its caller."""

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()


class SumWork(HostWork):
    """The sums of ``bundles``, one ring operation each, in order.

    The division and the copy back run on the ring's thread. So does what a user chains to the future: it must not
    wait for another sum.

    Args:
        tensors: All tensors of the bundles, in the caller's order: the result of the future.
        bundles: From `bundles`.
        works: The ring operation of each bundle.
        divisor: 1, or the number of ranks for an average.
        failed: Called with an error once.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        bundles: Sequence[TensorBundle],
        works: Sequence[RingWork],
        divisor: int,
        failed: Failed,
    ) -> None:
        super().__init__()
        self._tensors = list(tensors)
        self._bundles = bundles
        self._works = works
        self._divisor = divisor
        self._failed = failed
        self._error: RuntimeError | None = None
        begin: Future[None] = Future()
        # DDP's reducer waits in C++, which sees only errors that are raised in a continuation.
        self._future = begin.then(self._finish)
        works[-1].add_done_callback(lambda _: begin.set_result(None))

    def _finish(self, _: Future[None]) -> list[Tensor]:
        error = next((e for work in self._works if (e := work.exception()) is not None), None)
        if error is not None:
            self._error = self._failed(error)
            raise self._error
        for bundle in self._bundles:
            bundle.finish(self._divisor)
        return self._tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the tensors hold the sums, and return True.

        Raises:
            RuntimeError: The sum failed; or ``timeout`` passed, and the quorum was ended for it.
        """
        seconds = timeout.total_seconds() if timeout else None
        if futures.wait(self._works, seconds).not_done:
            raise self._failed(TimeoutError(f"timed out after {seconds} s"))
        try:
            self._future.wait()
        except RuntimeError as error:
            raise (self._error or error) from None
        return True

    def is_completed(self) -> bool:
        """Return whether the sum has ended, with or without an error."""
        return self._future.done()

    def get_future(self) -> Future[Any]:
        return self._future


class GlooWork(HostWork):
    """A collective of gloo. Its error ends the quorum, as one of a sum does."""

    def __init__(self, work: Work, failed: Failed) -> None:
        super().__init__()
        self._work = work
        self._failed = failed

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the collective is done, and return True.

        Raises:
            RuntimeError: It failed, or ``timeout`` passed.
        """
        try:
            return self._work.wait(timeout) if timeout else self._work.wait()
        except RuntimeError as error:
            raise self._failed(error) from error

    def is_completed(self) -> bool:
        """Return whether the collective has ended, with or without an error."""
        return self._work.is_completed()

    def get_future(self) -> Future[Any]:
        """Return gloo's future. Where it has none (send, recv, reduce-scatter), block and return a done one."""
        try:
            future: Future[Any] = self._work.get_future()
        except RuntimeError:
            self.wait()
            future = Future()
            future.set_result(None)
        else:
            future.add_done_callback(self._observe)
        return future

    def _observe(self, future: Future[Any]) -> None:
        try:
            future.wait()
        except RuntimeError as error:
            self._failed(error)


class DoneWork(HostWork):
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True without blocking: there is nothing to wait for."""
        return True

    def is_completed(self) -> bool:
        """Return True: it was done before anybody could ask."""
        return True

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(None)
        return future
