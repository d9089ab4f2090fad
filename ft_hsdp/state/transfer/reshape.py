"""Fetches a rank's shard from replicas of any width: of another one its parts, from the ranks that have some.

Each part is fetched, agreed on and verified by `fetch`, as a shard of its own. The receiver computes from its own
model which parts there are, what each has and where it goes; what a donor says only has to agree with that. The
parts go straight to their places in the packed shard, so the least possible bytes move, and none is copied twice.

Example: rank 1 of 3 takes its shard from a replica of 4 ranks:

    shard = WantedShard(state, 1, 3, layout)
    donors = {rank: [Donor(0, address[rank])] for rank in sources(shard, 4)}
    got = fetch_shard(shard, 4, donors, memory, token, 30.0, threading.Event(), report)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import DataCorruption
from ft_hsdp.memory import shape
from ft_hsdp.memory.shape import Extent
from ft_hsdp.state.transfer import parts, shard_manifest
from ft_hsdp.state.transfer.fetch import Cancelled, Donor, FetchedBlob, FetchRequest, NotFetched, fetch
from ft_hsdp.state.transfer.parts import Part, Scattered
from ft_hsdp.state.transfer.shard_manifest import ExpectedShard, Layout, ShardManifest

AT_ONCE = 4  # parts that are fetched at the same time


@dataclass(frozen=True, slots=True)
class WantedShard:
    """The shard that is made: all of it is known here, from this rank's own model."""

    state: StateId
    rank: int
    ranks: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class Assembled:
    """A shard whose bytes are all verified."""

    manifest: ShardManifest
    seconds: float  # from the call to the last checksum
    given: dict[tuple[int, int], int]  # verified bytes by (rank whose shard had them, replica of the donor)


def sources(layout: Layout, width: int, rank: int, ranks: int) -> tuple[int, ...]:
    """Return the ranks of a replica of ``width`` ranks from which ``rank`` of ``ranks`` takes parts.

    The ``layout`` is that of any shard of the state.

    Raises:
        Uncuttable: The state cannot be cut for another number of ranks.
    """
    return shape.needed(parts.whole(layout.tensors), width, (ranks, rank))


def fetch_shard(
    shard: WantedShard,
    width: int,
    donors: Mapping[int, Sequence[Donor]],
    into: memoryview,
    token: str,
    deadline_s: float,
    cancel: threading.Event,
    rejected: Callable[[int, Donor, str], None],
    *,
    awaited: bool = True,
) -> Assembled:
    """Fetch and verify one shard from replicas with ``width`` ranks, if need be put together from parts. Blocks.

    ``token``, ``deadline_s``, ``cancel`` and ``awaited`` are as of `fetch`.

    Args:
        shard: What is made.
        width: Ranks of the replicas that have the state.
        donors: Who serves the shard of each rank of them; of `sources` at least.
        into: Writable memory of ``shard.layout.nbytes`` bytes, used by nothing else until this returns.
        token: The job's token.
        deadline_s: Seconds.
        cancel: Ends it early.
        rejected: Called once for each part of each donor that failed, with the reason, on any thread.
        awaited: Whether donors are asked again.

    Raises:
        Cancelled: ``cancel`` was set.
        DataCorruption: Donors differ, and there is no majority; or the parts are not of one state.
        NotFetched: The deadline passed, all donors of a part failed, or no thread was left.
        Uncuttable: The state cannot be cut for another number of ranks.
    """
    began = time.monotonic()
    if width == shard.ranks:
        expected = ExpectedShard(shard.state, shard.rank, width, shard.layout.fingerprint, shard.layout.nbytes)
        request = FetchRequest.exactly(expected, into, awaited=awaited)
        own = donors.get(shard.rank, ())
        got = fetch(own, request, token, deadline_s, cancel, lambda d, why: rejected(shard.rank, d, why))
        return Assembled(got.manifest, got.seconds, {(shard.rank, r): n for r, n in got.given.items()})
    target = shard.ranks, shard.rank
    tensors = shard.layout.tensors
    parts.check(tensors, *target)
    needed = sources(shard.layout, width, shard.rank, shard.ranks)
    wanted = {rank: parts.cut(tensors, (width, rank), target) for rank in needed}
    stop = _Stop(cancel)

    def take(rank: int, part: Part) -> FetchedBlob[ShardManifest]:
        expected = ExpectedShard(shard.state, rank, width, part.layout, part.nbytes, (shard.rank, shard.ranks))
        request = FetchRequest.exactly(expected, Scattered(into, part.placed), awaited=awaited)
        left_s = began + deadline_s - time.monotonic()
        try:
            return fetch(donors.get(rank, ()), request, token, left_s, stop, lambda d, why: rejected(rank, d, why))
        except BaseException:
            stop.set()  # without this part the others are of no use
            raise

    with ThreadPoolExecutor(AT_ONCE, "fetch-part") as threads:
        try:
            running = {rank: threads.submit(take, rank, part) for rank, part in wanted.items()}
        except RuntimeError:
            stop.set()
            raise NotFetched("no thread is left for it") from None
        errors = [error for each in running.values() if (error := each.exception()) is not None]
    for error in sorted(errors, key=stop.caused):  # first what has stopped the others
        raise error
    found = {rank: each.result() for rank, each in running.items()}
    whole = shape.giver(width, target)
    manifest = _assembled(shard, found[whole].manifest, [each.manifest for each in found.values()])
    _clear(into, [extent for part in wanted.values() for extent in part.extents])
    given = {(rank, replica): n for rank, each in found.items() for replica, n in each.given.items()}
    made = shard_manifest.seal(manifest, into)
    return Assembled(made, time.monotonic() - began, given)


class _Stop(threading.Event):
    """Is set when the caller cancels, and when a part has failed."""

    def __init__(self, cancel: threading.Event) -> None:
        super().__init__()
        self._cancel = cancel

    def is_set(self) -> bool:
        return super().is_set() or self._cancel.is_set()

    def caused(self, error: BaseException) -> bool:
        """Return whether an error came from another part's failure."""
        return isinstance(error, Cancelled) and not self._cancel.is_set()


def _assembled(shard: WantedShard, first: ShardManifest, others: Sequence[ShardManifest]) -> ShardManifest:
    """Return the manifest of the shard, without checksums.

    Raises:
        DataCorruption: The parts do not say the same about the state.
    """
    for other in others:
        for name in ("cursors", "holes", "spoilt", "hyper", "user"):
            if getattr(other, name) != getattr(first, name):
                raise DataCorruption(f"ranks {first.rank} and {other.rank} of {first.ranks} have another {name}")
    layout = shard.layout
    return replace(
        first,
        rank=shard.rank,
        ranks=shard.ranks,
        part=None,
        layout=layout.fingerprint,
        nbytes=layout.nbytes,
        tensors=layout.tensors,
        checksums=(),
    )


def _clear(into: memoryview, extents: Sequence[Extent]) -> None:
    """Fill with zeros what no part has: the padding between tensors."""
    end = 0
    for extent in (*sorted(extents, key=lambda each: each.target), Extent(0, len(into), 0)):
        into[end : extent.target] = bytes(extent.target - end)
        end = extent.target + extent.nbytes
