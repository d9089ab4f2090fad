"""What the data of a block store are, the source that has all of them, and the answer of a load.

The description of the data says how they are cut into slices, alike on all ranks, and what a slice is called where
hosts and ranks talk about it. The source is a file or a function of the user. It is read at the first submission,
and later only for blocks that no host has any more.
"""

from __future__ import annotations

import hashlib
import operator
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ft_hsdp.errors import ConfigError, Retryable
from ft_hsdp.memory.blocks import BlockLayout, Span
from ft_hsdp.state.transfer.shard_manifest import MAX_SLICES, SliceName

PIECE_BYTES = 16 << 10  # that have a checksum of their own: what is loaded is rounded up to them
MOST_PIECES = 32 << 20  # of a store: a manifest of one of its slices has to be shorter than a message may be
RANGE_BYTES = 256 << 10  # of a permutation range (ReStore §VI-B)
LEAST_RANGES = 64  # small data have smaller ranges
SLICE_BYTES = 256 << 20  # of a slice: what a rank reads or copies before it hears from the others again
MAX_PARTS = 64  # slices of the share of one host; the slices of larger data are larger
MAX_BLOCKS = 1 << 48
MAX_BLOCK_BYTES = 1 << 30
MAX_COPIES = 16
SHOWN_SPANS = 4  # that a message names

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")

Bytes: TypeAlias = npt.NDArray[np.uint8]
BlockSource: TypeAlias = "str | Path | Callable[[int, int], Any]"


@dataclass(frozen=True, slots=True)
class BlockData:
    """Blocks of one size, and how they are cut. Made by `described`."""

    name: str
    blocks: int
    block_bytes: int
    copies: int  # hosts that each block is to be on
    align: int  # blocks that have a checksum together, so ranks should ask for multiples of it
    range_blocks: int  # of a permutation range
    seed: int | None  # of the permutation; None: ranges keep their order
    store: str  # digest of all of this but the copies

    @staticmethod
    def described(name: str, blocks: int, block_bytes: int, copies: int, *, permute: bool) -> BlockData:
        """Return the description, with sizes of ranges and pieces that fit it. Does not block."""
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError("BlockStore(name)", name, "1 to 64 letters, digits and . _ -")
        limits = {"blocks": MAX_BLOCKS, "block_bytes": MAX_BLOCK_BYTES, "copies": MAX_COPIES}
        given = {"blocks": blocks, "block_bytes": block_bytes, "copies": copies}
        for key, most in limits.items():
            if isinstance(given[key], bool) or not isinstance(given[key], int) or not 1 <= given[key] <= most:
                raise ConfigError(f"BlockStore({key})", given[key], f"an integer from 1 to {most}")
        few = -(-blocks // LEAST_RANGES)
        piece = max(PIECE_BYTES, blocks * block_bytes // MOST_PIECES)
        align = max(1, min(piece // block_bytes, few))
        range_blocks = max(1, min(RANGE_BYTES // block_bytes, few) // align) * align
        seed = 0 if permute else None
        about = (name, blocks, block_bytes, align, range_blocks, seed)
        store = hashlib.blake2b(repr(about).encode(), digest_size=16).hexdigest()
        return BlockData(name, blocks, block_bytes, copies, align, range_blocks, seed, store)

    def cut(self, hosts: int, parts: int = 1) -> BlockLayout:
        """Return where each block lies.

        Args:
            hosts: Those of the first submission; each has an equal share.
            parts: Slices of a share. There are fewer shares and slices if there are not as many ranges.
        """
        ranges = -(-self.blocks // self.range_blocks)
        hosts = min(hosts, ranges)
        parts = max(1, min(parts, ranges // hosts))
        return BlockLayout(self.blocks, self.range_blocks, hosts * parts, self.seed, parts)

    def first_cut(self, hosts: int, ranks: int) -> BlockLayout:
        share = self.blocks * self.block_bytes // hosts
        most = min(MAX_PARTS, MAX_SLICES // hosts)
        return self.cut(hosts, min(max(ranks, -(-share // SLICE_BYTES)), most))

    def slice_name(self, layout: BlockLayout, number: int) -> SliceName:
        nbytes = layout.slice_blocks(number) * self.block_bytes
        piece = self.align * self.block_bytes
        return SliceName(self.store, self.name, number, layout.slices, nbytes, piece, layout.parts)

    def checked(self, spans: Sequence[Span]) -> tuple[Span, ...]:
        """Return the spans that a user wants, without empty ones."""
        try:
            found = tuple((operator.index(first), operator.index(end)) for first, end in spans)
        except (TypeError, ValueError):
            allowed = "spans of integers (first block, block after the last one), or a mapping from ranks to them"
            raise ConfigError("BlockStore.load(wanted)", str(spans)[:60], allowed) from None
        last = 0
        for first, end in sorted(found):
            if not last <= first <= end <= self.blocks:
                allowed = f"spans within 0 to {self.blocks} that do not overlap"
                raise ConfigError("BlockStore.load(wanted)", (first, end), allowed)
            last = end
        return tuple((first, end) for first, end in found if first < end)


class LoadAnswer:
    """What a load returns, and where each block belongs in it.

    Attributes:
        out: uint8 [blocks, block_bytes], to be filled.
    """

    def __init__(self, data: BlockData, spans: Sequence[Span]) -> None:
        total = 0
        placed: list[tuple[int, int, int]] = []  # (first block, block after the last one, place)
        for first, end in spans:
            if placed and placed[-1][1] == first:
                placed[-1] = placed[-1][0], end, placed[-1][2]
            else:
                placed.append((first, end, total))
            total += end - first
        self._placed = sorted(placed)
        self._starts = [first for first, _, _ in self._placed]
        self.out: Bytes = np.empty((total, data.block_bytes), dtype=np.uint8)

    def parts(self, first: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield where wanted blocks belong, as (first block, block after the last one, place of the first one).

        Blocks that touch, but are not neighbours in the answer, are in different parts.
        """
        at = bisect_right(self._starts, first) - 1
        while first < end:
            start, after, place = self._placed[at]
            upto = min(end, after)
            yield first, upto, place + first - start
            first, at = upto, at + 1


class BlockReader:
    """Reads blocks from the user's source, and checks what comes.

    Raises:
        ConfigError: The file has another size than the blocks, or cannot be found.
    """

    def __init__(self, data: BlockData, source: BlockSource) -> None:
        self._data = data
        if callable(source):
            self._read = source
            self.origin: str = getattr(source, "__qualname__", type(source).__name__)  # the source in words
            return
        path, nbytes = Path(source), data.blocks * data.block_bytes
        try:
            size = path.stat().st_size
        except OSError as error:
            allowed = f"a file of the blocks, or a function ({error.strerror})"
            raise ConfigError("BlockStore.submit(source)", str(path), allowed) from None
        if size != nbytes:
            allowed = f"{nbytes} bytes: {data.blocks} blocks of {data.block_bytes}"
            raise ConfigError("BlockStore.submit(source)", f"{path} of {size} bytes", allowed)

        def read(first: int, end: int) -> bytes:
            with path.open("rb") as file:
                return os.pread(file.fileno(), (end - first) * data.block_bytes, first * data.block_bytes)

        self._read = read
        self.origin = str(path)

    def read(self, first: int, end: int) -> memoryview:
        """Return the bytes of the blocks from ``first`` to ``end`` - 1. Blocks."""
        nbytes = (end - first) * self._data.block_bytes
        try:
            found = self._read(first, end)
        except OSError as error:
            raise Retryable(f"blocks {first} to {end} of {self._data.name} cannot be read: {error}") from error
        try:
            view = memoryview(found).cast("B")
        except TypeError:
            view = memoryview(b"")
        if len(view) != nbytes:
            allowed = f"{nbytes} bytes for blocks {first} to {end}"
            raise ConfigError("BlockStore.submit(source)", f"{len(view)} bytes of {self.origin}", allowed)
        return view

    def fill(self, answer: LoadAnswer, first: int, end: int) -> None:
        """Read blocks into the answer of a load, a permutation range at a time. Blocks."""
        for low, high, place in answer.parts(first, end):
            for begin in range(low, high, self._data.range_blocks):
                upto = min(high, begin + self._data.range_blocks)
                data = np.frombuffer(self.read(begin, upto), dtype=np.uint8)
                at = place + begin - low
                answer.out[at : at + upto - begin] = data.reshape(upto - begin, self._data.block_bytes)


def shown_spans(spans: Sequence[Span]) -> str:
    named = ", ".join(f"{first} to {end - 1}" for first, end in spans[:SHOWN_SPANS])
    more = f" and {len(spans) - SHOWN_SPANS} more ranges" if len(spans) > SHOWN_SPANS else ""
    return f"blocks {named}{more}"
