"""Reduce-copy: one pass over a chunk from one or two sources to one or two destinations (FT-HSDP §4.2).

The storing reduction writes the sum to the send buffer and to the output while it is still in registers.
Accesses are of 16 bytes wherever both ends begin alike; the few elements before the first and behind the last
such block go one by one. Every buffer is a direct argument: the compiler only vectorizes pointers whose
alignment it knows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 16  # 512 threads a program (FT-HSDP §4.2)
PROGRAMS = 2
EDGE = 512
BLOCK_BYTES = 32768  # of each source at once: 4 loads of 16 bytes for each thread
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64)


def vector(dtype: torch.dtype) -> int:
    """Elements of one 16-byte access."""
    return 16 // dtype.itemsize


def shape(dtype: torch.dtype) -> dict[str, int]:
    """The compile-time sizes of the kernels for ``dtype``."""
    return {"VECTOR": vector(dtype), "BLOCK": BLOCK_BYTES // dtype.itemsize, "EDGE": EDGE}


@triton.jit
def add(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """a + b, in float32 for the half-sized types."""
    if (a.dtype == tl.bfloat16) | (a.dtype == tl.float16):
        total = (a.to(tl.float32) + b.to(tl.float32)).to(a.dtype)
    else:
        total = a + b
    return total


@triton.jit
def chunk(
    a: tl.tensor,
    b: tl.tensor,
    dst1: tl.tensor,
    dst2: tl.tensor,
    some: tl.tensor,
    shift: tl.tensor,
    end: tl.tensor,
    REDUCES: tl.constexpr,
    TWO: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    EDGE: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """This program's part of elements [shift, end): a (+ b) to dst1 (and dst2); zeros instead of a if not
    ``some``.

    All pointers are aligned to 16 bytes. ``a`` may be written by others while the kernel lives, so it is read
    past L1.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    head = tl.minimum((shift + VECTOR - 1) // VECTOR * VECTOR, end)
    blocks = (end - head) // BLOCK
    lanes = tl.arange(0, BLOCK)
    for block in tl.range(program, blocks, programs, num_stages=STAGES):
        at = (head + VECTOR - 1) // VECTOR * VECTOR + block * BLOCK + lanes
        x = tl.load(a + at, mask=some, other=0, cache_modifier=".cg")
        if REDUCES:
            x = add(x, tl.load(b + at))
        tl.store(dst1 + at, x)
        if TWO:
            tl.store(dst2 + at, x)
    before = head - shift
    behind = head + blocks * BLOCK
    count = before + end - behind
    lane = tl.arange(0, EDGE)
    for first in tl.range(program * EDGE, count, programs * EDGE, num_stages=1):
        index = first + lane
        at = index + tl.where(index < before, shift, behind - before)
        inside = index < count
        x = tl.load(a + at, mask=inside & some, other=0, cache_modifier=".cg")
        if REDUCES:
            x = add(x, tl.load(b + at, mask=inside, other=0))
        tl.store(dst1 + at, x, mask=inside)
        if TWO:
            tl.store(dst2 + at, x, mask=inside)


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
    """Whole buffers of ``size`` elements, shared by all programs."""
    chunk(a, b, dst1, dst2, True, 0, size, REDUCES, TWO, VECTOR, BLOCK, EDGE, STAGES)


def reduce_copy(
    a: Tensor, b: Tensor, dst1: Tensor, dst2: Tensor | None = None, *, programs: int = PROGRAMS, stages: int = 1
) -> None:
    """a + b into one or two destinations; flat tensors of one type and size, aligned to 16 bytes.

    Raises:
        ValueError: the tensors do not fit each other.
    """
    _launch(a, b, dst1, dst2, programs, stages, reduces=True)


def copy(
    src: Tensor, dst1: Tensor, dst2: Tensor | None = None, *, programs: int = PROGRAMS, stages: int = 1
) -> None:
    """``src`` into one or two destinations; flat tensors of one type and size, aligned to 16 bytes.

    Raises:
        ValueError: the tensors do not fit each other.
    """
    _launch(src, src, dst1, dst2, programs, stages, reduces=False)


def _launch(
    a: Tensor, b: Tensor, dst1: Tensor, dst2: Tensor | None, programs: int, stages: int, *, reduces: bool
) -> None:
    second = dst1 if dst2 is None else dst2
    for tensor in (a, b, dst1, second):
        check(tensor, a.dtype)
        if tensor.numel() != a.numel():
            raise ValueError(f"buffers of {a.numel()} and {tensor.numel()} elements")
    kernel[(programs,)](
        a, b, dst1, second, a.numel(), REDUCES=reduces, TWO=dst2 is not None, STAGES=stages, num_warps=WARPS,
        **shape(a.dtype),
    )  # fmt: skip


def check(tensor: Tensor, dtype: torch.dtype) -> None:
    """Whether the kernels take ``tensor``.

    Raises:
        ValueError: it is not flat and contiguous, of another or an unknown type, or not aligned to 16 bytes.
    """
    if dtype not in DTYPES or tensor.dtype != dtype:
        raise ValueError(f"a buffer of {tensor.dtype} where {dtype} is expected; known are {DTYPES}")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError("a buffer is not flat and contiguous")
    if tensor.data_ptr() % 16:
        raise ValueError("a buffer does not begin at a multiple of 16 bytes")
