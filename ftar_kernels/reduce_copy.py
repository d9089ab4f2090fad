"""The kernel that copies or adds a chunk in one pass: one or two sources, one or two destinations (FT-HSDP §4.2).

The storing reduction writes the sum to the send buffer and to the output while it is still in registers. Accesses
are of 16 bytes where source and destination begin alike; the few elements before the first such block and behind
the last one are moved one by one. Each buffer is an argument of its own, since the compiler vectorizes only
pointers whose alignment it knows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 16  # 512 threads a program (FT-HSDP §4.2)
# Of each launch. Sums have no products to be fused with; triton wants to hear it before its default changes.
OPTIONS = {"num_warps": WARPS, "enable_fp_fusion": False}
PROGRAMS = 2
EDGE = 512
BLOCK_BYTES = 32768  # of each source at once: 4 loads of 16 bytes for each thread
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64)


def vector(dtype: torch.dtype) -> int:
    """Return the number of elements in one access of 16 bytes."""
    return 16 // dtype.itemsize


def shape(dtype: torch.dtype, wire: torch.dtype | None = None) -> dict[str, int]:
    """Return the compile-time sizes of the kernels for values of `dtype` that travel as `wire`; None: as such."""
    return {"VECTOR": vector(wire or dtype), "BLOCK": BLOCK_BYTES // dtype.itemsize, "EDGE": EDGE}


@triton.jit
def add(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Return a + b in the type of a; 16-bit types are added in float32."""
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
    like: tl.tensor,
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
    """Process this program's part of elements [shift, end): write a (+ b) to dst1 (and dst2).

    Without `some`, zeros take the place of a. What is written is rounded to the type of `like`. All pointers are
    aligned to 16 bytes. The host or another device may write `a` while the kernel runs, so it is read past the L1
    cache. Each mask compares indices, because the interpreter of triton 3.9 takes no scalar for one.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    head = tl.minimum((shift + VECTOR - 1) // VECTOR * VECTOR, end)
    blocks = (end - head) // BLOCK
    lanes = tl.arange(0, BLOCK)
    whole = lanes < tl.where(some, BLOCK, 0)
    for block in tl.range(program, blocks, programs, num_stages=STAGES):
        at = (head + VECTOR - 1) // VECTOR * VECTOR + block * BLOCK + lanes
        x = tl.load(a + at, mask=whole, other=0, cache_modifier=".cg")
        if REDUCES:
            x = add(x, tl.load(b + at))
        x = x.to(like.dtype.element_ty)
        tl.store(dst1 + at, x)
        if TWO:
            tl.store(dst2 + at, x)
    before = head - shift
    behind = head + blocks * BLOCK
    count = before + end - behind
    loaded = tl.where(some, count, 0)
    lane = tl.arange(0, EDGE)
    for first in tl.range(program * EDGE, count, programs * EDGE, num_stages=1):
        index = first + lane
        at = index + tl.where(index < before, shift, behind - before)
        inside = index < count
        x = tl.load(a + at, mask=index < loaded, other=0, cache_modifier=".cg")
        if REDUCES:
            x = add(x, tl.load(b + at, mask=inside, other=0))
        x = x.to(like.dtype.element_ty)
        tl.store(dst1 + at, x, mask=inside)
        if TWO:
            tl.store(dst2 + at, x, mask=inside)


def check(tensor: Tensor, dtype: torch.dtype) -> None:
    """Check that the kernels can take `tensor`.

    Raises:
        ValueError: it is not flat and contiguous, has another or an unknown type, or is not aligned to 16 bytes.
    """
    if dtype not in DTYPES or tensor.dtype != dtype:
        raise ValueError(f"a buffer of {tensor.dtype} where {dtype} is expected; known are {DTYPES}")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError("a buffer is not flat and contiguous")
    if tensor.data_ptr() % 16:
        raise ValueError("a buffer does not begin at a multiple of 16 bytes")
