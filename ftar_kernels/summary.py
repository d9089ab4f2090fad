"""The digest of a tensor on the device, and sums of squares: what a rank votes on, without a copy to the host.

The digest is a sum modulo 2^64, so the order in which blocks are added does not matter: of each 4-byte word two
hashes of 32 bits, which depend on its place, too. Each is murmur3's finalizer, a bijection, so one changed word
always changes the digest. Squares are added in fp64. Each program adds those of a fixed block, and one program
adds the blocks in order; so the bits depend on the values and on the spans alone.

`reference` computes the same with torch, for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftar_kernels.handshake import INTERPRETED
from ftar_kernels.streams import HostStream

PART = 2048  # elements that a program loads at once
PARTS = 32
BLOCK = PART * PARTS  # elements of a program
FOLD = 1024  # blocks that are added at once
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}  # of each launch: the bits must not depend on a default
MASK = 0xFFFFFFFF
PLACE, PLACE2 = 0x9E3779B1, 0x7FEB352D  # odd: what a word's place is multiplied by
MIX1, MIX2 = 0x85EBCA6B, 0xC2B2AE35  # murmur3's
SIZES = {"PART": PART, "PARTS": PARTS, "PLACE": PLACE, "PLACE2": PLACE2, "MIX1": MIX1, "MIX2": MIX2}


@triton.jit
def _mixed(h: tl.tensor, MIX1: tl.constexpr, MIX2: tl.constexpr) -> tl.tensor:
    h ^= h >> 16
    h *= MIX1
    h ^= h >> 13
    h *= MIX2
    h ^= h >> 16
    return h


@triton.jit(do_not_specialize=["start", "stop"])
def block_kernel(
    words: tl.tensor,
    digests: tl.tensor,
    squares: tl.tensor,
    start: tl.int64,
    stop: tl.int64,
    DIGEST: tl.constexpr,
    SQUARE: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    PLACE: tl.constexpr,
    PLACE2: tl.constexpr,
    MIX1: tl.constexpr,
    MIX2: tl.constexpr,
) -> None:
    """Look at block `program_id` of the int32 words [start, stop); a digest is that of all words from 0 on.

    Blocks that are whole are loaded 16 bytes at a time, where the compiler knows that they begin so.
    """
    first = tl.program_id(0).to(tl.int64) * PARTS * PART
    if not DIGEST:
        first += start
    lanes = tl.arange(0, PART)
    digest = tl.zeros((PART,), dtype=tl.int64)
    square = tl.zeros((PART,), dtype=tl.float64)
    for part in range(PARTS):
        at = first + part * PART + lanes
        inside = at < stop
        if first + PARTS * PART <= stop:
            word = tl.load(words + at)
        else:
            word = tl.load(words + at, mask=inside, other=0)
        if DIGEST:
            place = (at + 1).to(tl.uint32)
            high = _mixed(word.to(tl.uint32, bitcast=True) ^ (place * PLACE), MIX1, MIX2)
            low = _mixed(word.to(tl.uint32, bitcast=True) + place * PLACE2, MIX1, MIX2)
            both = (high.to(tl.int64) << 32) | low.to(tl.int64)
            digest += tl.where(inside, both, 0)
        if SQUARE:
            value = word.to(tl.float32, bitcast=True).to(tl.float64)
            square += value * value
    if DIGEST:
        tl.store(digests + tl.program_id(0), tl.sum(digest))
    if SQUARE:
        tl.store(squares + tl.program_id(0), tl.sum(square))


@triton.jit(do_not_specialize=["place", "blocks"])
def fold_kernel(parts: tl.tensor, out: tl.tensor, place: tl.int32, blocks: tl.int32, FOLD: tl.constexpr) -> None:
    """Add what the blocks have found, in one program, into element `place` of `out`."""
    lanes = tl.arange(0, FOLD)
    total = tl.load(parts + lanes, mask=lanes < blocks, other=0)
    for first in range(FOLD, blocks, FOLD):
        total += tl.load(parts + first + lanes, mask=first + lanes < blocks, other=0)
    tl.store(out + place, tl.sum(total))


def summarize(values: Tensor, spans: Sequence[tuple[int, int]]) -> Callable[[], tuple[str, list[float]]]:
    """Begin to look at `values` on the current stream. Does not wait for the device.

    Args:
        values: flat and contiguous, of whole words of 4 bytes, on a CUDA device; or on a CPU where triton
            interprets.
        spans: (begin, end) of words, of which the squares are added, as fp32.

    Returns:
        What waits for the device, and returns the digest of all of `values`, 16 hex digits, and the sum of squares
        of each span. `values` must not change until it has returned.
    """
    words = values.view(torch.int32)
    size = words.numel()
    whole = [(0, size)] == [tuple(span) for span in spans]
    found = torch.zeros(1 + len(spans), dtype=torch.int64, device=values.device)
    _look(words, (0, size), found, 0, 1 if whole else None)
    for number, span in enumerate(() if whole else spans, 1):
        _look(words, span, found, None, number)
    if not values.is_cuda:
        return lambda: _told(found)
    host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True).copy_(found, non_blocking=True)
    after = torch.cuda.current_stream(values.device).record_event()

    def wait() -> tuple[str, list[float]]:
        after.synchronize()
        return _told(host)

    return wait


def warm_up(device: torch.device) -> None:
    """Compile and load all kernels of `summarize`. Blocks: the driver loads one when the device is idle."""
    for spans in ((0, 2),), ((0, 1),):  # all at once, and each span apart
        summarize(torch.zeros(2, device=device), spans)()


def _told(found: Tensor) -> tuple[str, list[float]]:
    return f"{int(found[0]) & (2**64 - 1):016x}", found.view(torch.float64)[1:].tolist()


def _look(words: Tensor, span: tuple[int, int], found: Tensor, digest: int | None, square: int | None) -> None:
    """Enqueue the kernels for `span`; `digest` and `square` are the places of what they find in `found`."""
    start, stop = span
    blocks = -(-(stop - start) // BLOCK)
    if not blocks:
        return
    digests = torch.empty(blocks, dtype=torch.int64, device=words.device)
    squares = torch.empty(blocks, dtype=torch.float64, device=words.device)
    chosen = {"DIGEST": digest is not None, "SQUARE": square is not None}

    def launch() -> None:
        block_kernel[(blocks,)](words, digests, squares, start, stop, **chosen, **SIZES, **OPTIONS)
        for parts, into, place in ((digests, found, digest), (squares, found.view(torch.float64), square)):
            if place is not None:
                fold_kernel[(1,)](parts, into, place, blocks, FOLD=FOLD, **OPTIONS)

    if INTERPRETED:
        HostStream.alone(launch)
    else:
        launch()


def reference(values: Tensor, spans: Sequence[tuple[int, int]]) -> tuple[str, list[float]]:
    """Return what `summarize` finds, computed by torch; the squares may differ in their last bits."""
    words = values.view(torch.int32).to(torch.int64) & MASK
    place = torch.arange(1, 1 + words.numel(), device=values.device) & MASK

    def mixed(h: Tensor) -> Tensor:
        h = h & MASK
        h = (h ^ (h >> 16)) * MIX1 & MASK
        h = (h ^ (h >> 13)) * MIX2 & MASK
        return h ^ (h >> 16)

    both = (mixed(words ^ (place * PLACE & MASK)) << 32) | mixed(words + place * PLACE2)
    squares = [float((values[a:b].view(torch.float32).double() ** 2).sum()) for a, b in spans]
    return f"{int(both.sum()) & (2**64 - 1):016x}", squares
