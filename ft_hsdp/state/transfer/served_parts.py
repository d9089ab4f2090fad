"""Parts of the snapshots that a state server serves: each is sealed once, and then read like a snapshot.

`ServedParts` makes the manifest of a part from that of the snapshot, with checksums of the part's own stream. They
are computed from the snapshot's bytes in host memory. A source may have compared these with the snapshot's own
checksums long ago; so the chunks that the part touches are compared again, or a bit that flipped since then would
get a checksum that fits it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from ft_hsdp.errors import DataCorruption
from ft_hsdp.memory.shape import Extent
from ft_hsdp.state import shared_memory
from ft_hsdp.state.shared_memory import ServedSnapshot
from ft_hsdp.state.transfer import parts, shard_manifest
from ft_hsdp.state.transfer.shard_manifest import CHUNK_BYTES

MAX_KEPT = 64  # sealed parts
MAX_KEPT_BYTES = 64 << 20  # of their manifests


class ServedParts:
    """The parts that were asked for last. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # also held while a part is sealed: one at a time
        self._kept: OrderedDict[tuple[str, int, int], ServedSnapshot] = (
            OrderedDict()
        )  # by snapshot, rank and ranks

    def part(self, served: ServedSnapshot, rank: int, ranks: int) -> ServedSnapshot:
        """Return the part of a borrowed snapshot ``served`` for rank ``rank`` of ``ranks``.

        Blocks while the part is sealed, which reads its bytes, then the chunks of the snapshot that it touches.

        Raises:
            DataCorruption: The snapshot's bytes changed since it was written.
            Uncuttable: The snapshot cannot be cut for another number of ranks.
        """
        key = served.digest, rank, ranks
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                found = self._kept[key] = _sealed(served, rank, ranks)
                while (
                    len(self._kept) > MAX_KEPT
                    or sum(len(p.manifest) for p in self._kept.values()) > MAX_KEPT_BYTES
                ):
                    self._kept.popitem(last=False)
            else:
                self._kept.move_to_end(key)
        return replace(found, fd=served.fd)


def _sealed(served: ServedSnapshot, rank: int, ranks: int) -> ServedSnapshot:
    manifest = shard_manifest.decode(served.manifest)
    parts.check(manifest.tensors, manifest.ranks, manifest.rank)
    part = parts.cut(manifest.tensors, (manifest.ranks, manifest.rank), (ranks, rank))
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
    for chunk in parts.touched(extents, CHUNK_BYTES):
        if shard_manifest.checksums(data[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]) != (written[chunk],):
            raise DataCorruption(f"chunk {chunk} of {len(written)} changed since it was written")
    return found
