"""Kernels that wait for nothing: one for each command, and one for whole buffers.

The interpreter runs one kernel at a time in a process, so one that waits for its engine would hold up all others.
A ring of threads needs a `SteppedPlane` there: each command is launched by itself, once it is posted.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftar_kernels.flags import FIELDS, LINE, Command
from ftar_kernels.persistent import execute
from ftar_kernels.plane import StagedJob, StagedPlane
from ftar_kernels.reduce_copy import OPTIONS, PROGRAMS, chunk, shape

_FIELDS = tl.constexpr(FIELDS)


@triton.jit(do_not_specialize=["index"])
def command_kernel(
    local: tl.tensor,
    out: tl.tensor,
    send: tl.tensor,
    recv: tl.tensor,
    words: tl.tensor,
    commands: tl.tensor,
    index: tl.int32,
    DEPTH: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    EDGE: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Execute command `index` alone. Do nothing if the abort word is set."""
    if tl.load(words, volatile=True) == 0:
        execute(local, out, send, recv, commands + _FIELDS * (index % DEPTH), VECTOR, BLOCK, EDGE, STAGES)


class SteppedJob(StagedJob):
    def begin(self) -> None:
        """Do nothing: each command begins when it is posted."""

    def post(self, command: Command) -> None:
        super().post(command)
        self._stream.launch(partial(self._step, self._page.posted))

    def _step(self, number: int) -> None:
        command_kernel[(self._plane.programs,)](*self._pointers(), number - 1, **self._shape())
        self._page.words[LINE * self._page.done_line(0)] = number

    @property
    def ended(self) -> bool:
        return self._page.done() >= self._page.posted


class SteppedPlane(StagedPlane):
    def make_job(self, local: Tensor | None, out: Tensor, count: int, wire: torch.dtype | None) -> StagedJob:
        return SteppedJob(self, local, out, count, wire)


def kind_of(device: torch.device) -> type[StagedPlane]:
    """Return the kind of the planes of a ring of threads."""
    return StagedPlane if device.type == "cuda" else SteppedPlane


@triton.jit(do_not_specialize=["size"])
def kernel(
    a: tl.tensor,
    b: tl.tensor,
    dst1: tl.tensor,
    dst2: tl.tensor,
    size: tl.int32,
    REDUCES: tl.constexpr,
    TWO: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    EDGE: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Process whole buffers of `size` elements, shared by all programs."""
    chunk(a, b, dst1, dst2, dst1, True, 0, size, REDUCES, TWO, VECTOR, BLOCK, EDGE, STAGES)


def reduce_copy(
    a: Tensor,
    b: Tensor | None,
    dst1: Tensor,
    dst2: Tensor | None = None,
    *,
    programs: int = PROGRAMS,
    stages: int = 1,
) -> None:
    """Write a, or a + b if there is one, to one or two destinations; queued on the current stream.

    All tensors are flat, of one type and size, and aligned to 16 bytes.
    """
    second, other = dst1 if dst2 is None else dst2, a if b is None else b
    kernel[(programs,)](
        a, other, dst1, second, a.numel(), REDUCES=b is not None, TWO=dst2 is not None, STAGES=stages, **OPTIONS,
        **shape(a.dtype),
    )  # fmt: skip
