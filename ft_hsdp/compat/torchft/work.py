"""Bundle: the tensors of one call as flat buffers, each of which is one ring operation.

How a list is cut depends on sizes and types alone, which are the same on all ranks; what a rank copies depends on
its own tensors: one that is contiguous, on the CPU and alone in its bundle is summed where it is.

Work: what a collective of the group returns, as torch.distributed expects it.
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

ALONE = 2**20  # bytes up to which a copy costs less than an operation of its own, as measured


@dataclass(frozen=True, slots=True)
class TensorBundle:
    """``tensors`` of one type, and the contiguous CPU tensor that holds all of their elements in order."""

    tensors: tuple[Tensor, ...]
    flat: Tensor

    def settle(self, divisor: int) -> None:
        """Divide the sum by ``divisor``, and bring it to where the tensors are."""
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
    """``tensors`` as bundles: large ones alone, small ones of one type together, in the order of the list."""
    groups: dict[object, list[Tensor]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault(i if tensor.nbytes >= ALONE else tensor.dtype, []).append(tensor)
    return [TensorBundle(tuple(group), _flat(group)) for group in groups.values()]


def _flat(tensors: list[Tensor]) -> Tensor:
    first = tensors[0]
    if len(tensors) == 1 and first.device.type == "cpu" and first.is_contiguous():
        return first
    return torch.cat([t.detach().reshape(-1).to("cpu") for t in tensors])


Failed = Callable[[BaseException], RuntimeError]


class SumWork(Work):
    """The sums of ``bundles``, one ring operation each, in order; ``divisor`` is 1 or the number of ranks.

    ``failed`` is told of an error, once, and says what to raise. The last copy and the division are done on the
    ring's thread, and so is what a user chains to the future: it must not wait for another sum.
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
        # Only an error that is raised in a continuation is one for C++ too, where DDP's reducer waits.
        self._future = begin.then(self._settle)
        works[-1].add_done_callback(lambda _: begin.set_result(None))

    def _settle(self, _: Future[None]) -> list[Tensor]:
        error = next((e for work in self._works if (e := work.exception()) is not None), None)
        if error is not None:
            self._error = self._failed(error)
            raise self._error
        for bundle in self._bundles:
            bundle.settle(self._divisor)
        return self._tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        """True when the tensors hold the sums.

        Raises:
            RuntimeError: there are none, and will not be; after ``timeout`` the group is given up.
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
        """Whether it ended, well or not."""
        return self._future.done()

    def get_future(self) -> Future[Any]:
        """The tensors, or the error."""
        return self._future

    def synchronize(self) -> None:
        """The same as `wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """The same as `wait`: the sum comes over the host."""
        self.wait()


class PlainWork(Work):
    """A collective of the plain backend, whose error counts as one of the group."""

    def __init__(self, work: Work, failed: Failed) -> None:
        super().__init__()
        self._work = work
        self._failed = failed

    def wait(self, timeout: timedelta | None = None) -> bool:
        """True when it is done.

        Raises:
            RuntimeError: it failed.
        """
        try:
            return self._work.wait(timeout) if timeout else self._work.wait()
        except RuntimeError as error:
            raise self._failed(error) from error

    def is_completed(self) -> bool:
        """Whether it ended, well or not."""
        return self._work.is_completed()

    def get_future(self) -> Future[Any]:
        """Gloo's own future; where it has none (point to point, reduce-scatter), one that was waited for."""
        try:
            future: Future[Any] = self._work.get_future()
        except RuntimeError:
            self.wait()
            future = Future()
            future.set_result(None)
        else:
            future.add_done_callback(self._look)
        return future

    def _look(self, future: Future[Any]) -> None:
        try:
            future.wait()
        except RuntimeError as error:
            self._failed(error)

    def synchronize(self) -> None:
        """The same as `wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """The same as `wait`: gloo works on the host."""
        self.wait()
