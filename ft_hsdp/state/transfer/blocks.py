"""Slices of a block store, and how a rank reads parts of them from the agents that hold them (ReStore §IV-A).

A slice is a part of static data in the memory of an agent, and does not change once it is complete. Its
`SliceManifest` has a checksum for each piece, so that any part of it can be read and verified alone. Readers know
the digest of the manifest before they ask, so a holder cannot serve anything else.

`read_slices` reads parts of many slices from many holders at once, one slice of each holder after the other, by
`fetch`. What a holder does not deliver, because it is slow, wrong or gone, is returned to the caller, who asks
another one.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from ft_hsdp.errors import DataCorruption
from ft_hsdp.memory.shape import Extent
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.fetch import Donor, FetchRequest, NotFetched, fetch
from ft_hsdp.state.transfer.parts import Scattered
from ft_hsdp.state.transfer.shard_manifest import SliceManifest, SliceName

SILENT_S = 5.0  # of a holder, which has failed then

Known = dict[str, tuple[SliceManifest, bytes]]
"""Manifests by digest, each with its encoded form."""


@dataclass(frozen=True, slots=True)
class SliceRead:
    """Parts of one slice that are read from one holder."""

    about: SliceName
    digest: str  # of its manifest
    address: str  # "host:port" of the holder's state server
    spans: tuple[tuple[int, int, int], ...]  # (first byte in the slice, bytes, first byte in the target)


@dataclass(slots=True)
class SlicesRead:
    """What came of it."""

    failed: list[tuple[SliceRead, str]] = field(default_factory=list)  # what was not read, and why
    nbytes: int = 0  # that were received and verified, with those around what was wanted


def request(about: SliceName, digest: str, into: Scattered, known: Known) -> FetchRequest[SliceManifest]:
    """Return a request for parts of the slice ``about``, whose manifest has this ``digest``.

    They go ``into`` memory. The manifest is added to what is ``known``.
    """

    def opened(encoded: bytes) -> SliceManifest:
        if digest not in known:
            manifest = shard_manifest.decode(encoded, SliceManifest)
            if shard_manifest.digest(encoded) != digest or manifest.about != about:
                raise DataCorruption(f"has another slice {about.slice} than the one that is wanted")
            known[digest] = manifest, encoded
        return known[digest][0]

    return FetchRequest(
        f"/v1/blocks/{about.store}/{about.slice}/{{}}",
        opened,
        lambda _: into,
        awaited=False,
        answer_s=SILENT_S,
        known=known[digest][1] if digest in known else b"",
    )


def read_slices(
    reads: Sequence[SliceRead],
    into: memoryview,
    token: str,
    deadline_s: float,
    known: Known,
) -> SlicesRead:
    """Read and verify parts of slices. Blocks; when it returns, no thread writes into the memory any more.

    A read that fails may have left bytes in ``into``, also wrong ones: all of it has to be read again.

    Args:
        reads: What is read from whom.
        into: Writable memory that ``spans`` refer to.
        token: The job's token, which the holders check.
        deadline_s: Seconds from the call until it gives up.
        known: Manifests by digest, each with its encoded form; what is asked for is added.
    """
    until, never, outcome = time.monotonic() + deadline_s, threading.Event(), SlicesRead()
    by_holder: dict[str, list[SliceRead]] = defaultdict(list)
    for read in reads:
        by_holder[read.address].append(read)

    def take(holder: Donor, mine: Sequence[SliceRead]) -> int:
        gone, nbytes = "", 0
        for read in mine:
            told: list[str] = []

            def rejected(_: Donor, why: str, told: list[str] = told) -> None:
                told.append(why)

            extents = (Extent(begin, target, nbytes) for begin, nbytes, target in read.spans)
            wanted = request(read.about, read.digest, Scattered(into, extents), known)
            try:
                if not gone:
                    left_s = until - time.monotonic()
                    got = fetch([holder], wanted, token, left_s, never, rejected)
                    nbytes += sum(got.given.values())
                    continue
            except NotFetched as error:
                told.append(str(error))
                if not error.wrong:  # else its other slices may be right
                    gone = told[0]
            outcome.failed.append((read, gone or told[0]))
        return nbytes

    with ThreadPoolExecutor(max(1, len(by_holder)), "blocks") as threads:
        each = [threads.submit(take, Donor(0, address), mine) for address, mine in by_holder.items()]
    outcome.nbytes = sum(done.result() for done in each)
    return outcome
