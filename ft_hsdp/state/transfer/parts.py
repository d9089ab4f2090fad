"""Parts of packed shards: what a rank of one width has for a rank of another width, as a stream of bytes.

A *part* is a stream of its own, with a manifest of its own: the pieces of tensors one after the other, without
padding. So chunks, checksums, agreement between donors, striping and resuming are those of a whole shard. Donor
and receiver compute it with `cut`, each from its own tensors (`memory.shape`). The receiver writes into a packed
shard of its own width, by its own extents (`Scattered`).
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from weakref import WeakValueDictionary

from ft_hsdp.errors import DataCorruption
from ft_hsdp.memory import shape
from ft_hsdp.memory.shape import Extent, Tensor
from ft_hsdp.state import shared_memory
from ft_hsdp.state.shared_memory import ServedSnapshot
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.shard_manifest import CHUNK_BYTES, Layout, PackedTensor, ShardManifest

MAX_WIDTH = 4096  # ranks of a replica for which parts are made
# Bytes of an element. A type that is not here has elements that are not whole bytes.
ITEMSIZES = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}


class Uncuttable(ValueError):
    """A state cannot be cut for another number of ranks. The message names the first tensor, in one line."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank has for a rank of another width."""

    tensors: tuple[PackedTensor, ...]  # the pieces; their offsets are those in the stream
    extents: tuple[Extent, ...]  # where they lie in the two packed shards, in the order of the stream
    nbytes: int  # of the stream

    @property
    def taken(self) -> tuple[Extent, ...]:
        """Where the bytes of the stream lie in the shard that has them, by `Extent.target`."""
        return self._streamed([each.source for each in self.extents])

    @property
    def placed(self) -> tuple[Extent, ...]:
        """Where they go in the shard that they are for, by `Extent.target`."""
        return self._streamed([each.target for each in self.extents])

    def _streamed(self, places: Sequence[int]) -> tuple[Extent, ...]:
        sizes = [each.nbytes for each in self.extents]
        return tuple(map(Extent, accumulate(sizes, initial=0), places, sizes))

    @property
    def layout(self) -> str:
        """The fingerprint of the pieces."""
        return shard_manifest.fingerprint(self.tensors)


def whole(tensors: Sequence[PackedTensor]) -> tuple[Tensor, ...]:
    """Return the tensors of the whole state.

    Raises:
        Uncuttable: One of them is cut otherwise than by rows, or its elements are no whole bytes.
    """
    for tensor in tensors:
        if tensor.cut not in ("rows", "whole"):
            raise Uncuttable(f"{tensor.kind} {tensor.name[:80]} is not cut by rows over all ranks")
        if tensor.dtype not in ITEMSIZES:
            raise Uncuttable(f"{tensor.kind} {tensor.name[:80]} has elements of type {tensor.dtype}")
    return tuple(
        Tensor(t.global_shape, ITEMSIZES[t.dtype], "rows" if t.cut == "rows" else "whole") for t in tensors
    )


def layout_at(tensors: Sequence[PackedTensor], width: int, rank: int) -> Layout:
    """Return the layout of the shard of ``rank`` of ``width`` ranks, from the ``tensors`` of any shard.

    Raises:
        Uncuttable: The state cannot be cut for another width.
    """
    placed: list[PackedTensor] = []
    offset = 0
    for tensor, of_whole in zip(tensors, whole(tensors), strict=True):
        begin, end = of_whole.rows(width, rank)
        local = (end - begin, *tensor.global_shape[1:]) if tensor.global_shape else ()
        nbytes = (end - begin) * of_whole.row_bytes
        placed.append(replace(tensor, shape=local, offset=offset, nbytes=nbytes))
        offset += shape.aligned(nbytes)
    return Layout(tuple(placed), offset)


def check(tensors: Sequence[PackedTensor], width: int, rank: int) -> None:
    """Check that the ``tensors`` of ``rank`` are cut as FSDP2 cuts them over ``width`` ranks.

    Raises:
        Uncuttable: They are not: the parts would be others than their readers think.
    """
    for tensor, expected in zip(tensors, layout_at(tensors, width, rank).tensors, strict=True):
        if tensor != expected:
            raise Uncuttable(f"{tensor.kind} {tensor.name[:80]} is not cut by rows over {width} ranks")


def cut(tensors: Sequence[PackedTensor], source: tuple[int, int], target: tuple[int, int]) -> Part:
    """Return what the shard ``source`` has for the shard ``target``, each a (width, rank).

    The ``tensors`` are those of any shard of the state.

    Raises:
        Uncuttable: The state cannot be cut for another width.
    """
    made: list[PackedTensor] = []
    found = shape.pieces(whole(tensors), source, target)
    offset = 0
    for number, rows, extent in found:
        tensor = tensors[number]
        local = (rows, *tensor.global_shape[1:]) if tensor.global_shape else ()
        made.append(replace(tensor, shape=local, offset=offset, nbytes=extent.nbytes))
        offset += extent.nbytes
    return Part(tuple(made), shape.merged(piece.extent for piece in found), offset)


class Scattered:
    """Memory for some bytes of a stream, which lie there in one place or in several.

    Args:
        memory: The packed shard, or what else is filled.
        extents: Which bytes of the stream (`Extent.source`) go where (`Extent.target`); None: all, as they come.
    """

    def __init__(self, memory: memoryview, extents: Iterable[Extent] | None = None) -> None:
        self._memory = memory
        self.extents = sorted([Extent(0, 0, len(memory))] if extents is None else extents)

    def pieces(self, begin: int, end: int) -> list[memoryview]:
        """Return memory for the bytes [begin, end) of the stream; new memory for those that nobody wants."""
        return [
            memoryview(bytearray(nbytes)) if at is None else self._memory[at : at + nbytes]
            for at, nbytes in runs(self.extents, begin, end)
        ]


def runs(extents: Sequence[Extent], begin: int, end: int) -> Iterator[tuple[int | None, int]]:
    """Yield where the bytes [begin, end) of a stream (`Extent.source`) lie: (`Extent.target`, bytes).

    None: nowhere. The ``extents`` are in the order of the stream.
    """
    number = max(0, bisect_right(extents, begin, key=lambda each: each.source) - 1)
    while begin < end:
        source, target, nbytes = extents[number] if number < len(extents) else (end, 0, 0)
        if begin < source:
            stop = min(end, source)
            yield None, stop - begin
        else:
            stop = max(begin, min(end, source + nbytes))
            number += 1
            if stop > begin:
                yield target + begin - source, stop - begin
        begin = stop


def touched(extents: Iterable[Extent], chunk: int) -> list[int]:
    """Return the numbers of the chunks of ``chunk`` bytes in which the sources of ``extents`` lie."""
    runs = ((each.source // chunk, -(-(each.source + each.nbytes) // chunk)) for each in extents if each.nbytes)
    return sorted({number for first, end in runs for number in range(first, end)})


MAX_KEPT = 64  # sealed parts
MAX_KEPT_BYTES = 64 << 20  # of their manifests


class ServedParts:
    """The parts that a state server was asked for last: each is sealed once, and then read like a snapshot.

    The checksums of a part are computed from the snapshot's bytes in host memory. A source may have compared these
    long ago; so the chunks that the part touches are compared again, or a bit that flipped since then would get a
    checksum that fits it. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By snapshot, rank and ranks. Who seals a part, or waits for it, has the lock of its key.
        self._kept: OrderedDict[tuple[str, int, int], ServedSnapshot] = OrderedDict()
        self._locks: WeakValueDictionary[tuple[str, int, int], threading.Lock] = WeakValueDictionary()

    def part(self, served: ServedSnapshot, rank: int, ranks: int) -> ServedSnapshot:
        """Return the part of a borrowed snapshot ``served`` for rank ``rank`` of ``ranks``.

        Blocks while the part is sealed, which reads its bytes, then the chunks of the snapshot that it touches.

        Raises:
            DataCorruption: The snapshot's bytes changed since it was written.
            Uncuttable: The snapshot cannot be cut for another number of ranks.
        """
        key = served.digest, rank, ranks
        with self._lock:
            sealing = self._locks.setdefault(key, threading.Lock())
        with sealing:
            found = self._kept.get(key) or _sealed(served, rank, ranks)
            with self._lock:
                self._kept[key] = found
                self._kept.move_to_end(key)
                while (
                    len(self._kept) > MAX_KEPT
                    or sum(len(p.manifest) for p in self._kept.values()) > MAX_KEPT_BYTES
                ):
                    self._kept.popitem(last=False)
        return replace(found, fd=served.fd)


def _sealed(served: ServedSnapshot, rank: int, ranks: int) -> ServedSnapshot:
    manifest: ShardManifest = shard_manifest.decode(served.manifest)
    check(manifest.tensors, manifest.ranks, manifest.rank)
    part = cut(manifest.tensors, (manifest.ranks, manifest.rank), (ranks, rank))
    made = replace(
        manifest,
        part=(rank, ranks),
        layout=part.layout,
        nbytes=part.nbytes,
        tensors=part.tensors,
        checksums=_checksums(served, part.extents, manifest.checksums),
    )
    encoded = shard_manifest.encode(made)
    return ServedSnapshot(served.fd, part.nbytes, encoded, shard_manifest.digest(encoded), part.taken)


def _checksums(served: ServedSnapshot, extents: Sequence[Extent], written: Sequence[str]) -> tuple[str, ...]:
    """Return the checksum of each chunk of the stream that ``extents`` make of a snapshot.

    Raises:
        DataCorruption: A chunk of the snapshot that is touched differs from its checksum in ``written``.
    """
    data = memoryview(shared_memory.attach(served.fd, served.nbytes, writable=False))  # type: ignore[arg-type]
    found = shard_manifest.checksums(*(data[each.source : each.source + each.nbytes] for each in extents))
    # Compared last: what flips from now on does not fit what was found.
    for chunk in touched(extents, CHUNK_BYTES):
        if shard_manifest.checksums(data[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]) != (written[chunk],):
            raise DataCorruption(f"chunk {chunk} of {len(written)} changed since it was written")
    return found
