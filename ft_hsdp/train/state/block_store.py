"""Static data of a user's job in the memory of several hosts (ReStore §IV): `BlockStore`.

A rank reads its part of static data, such as points or features, once from a file. When the rank or its host is
lost, its successor, or the ranks that are left, load that part from the memory of the other hosts, which is faster
than the file. Only what no host has any more is read from the file again, and that is said.

The state agents of the replica's hosts hold the data; they outlive the ranks. Nothing new listens on a network:
holders copy from each other, and ranks load, through the agents' state servers. Where everything lies is computed
by `ft_hsdp.memory.blocks`, alike on all ranks.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ft_hsdp.errors import ConfigError, Retryable
from ft_hsdp.memory.blocks import (
    BlockLayout,
    BlockRead,
    SliceRun,
    Span,
    SubmissionPlan,
    merged,
    plan_load,
    plan_submission,
    share,
)
from ft_hsdp.state.agent.blocks import BlockAgent
from ft_hsdp.state.agent.messages import CopySlice
from ft_hsdp.state.replica_group import Failed, ReplicaGroup
from ft_hsdp.state.transfer import blocks as slices_of
from ft_hsdp.state.transfer.blocks import SliceManifest, SliceName, SliceRead

if TYPE_CHECKING:
    from ft_hsdp.train.job import Job

PIECE_BYTES = 16 << 10  # that have a checksum of their own: what is loaded is rounded up to them
RANGE_BYTES = 256 << 10  # of a permutation range (ReStore §VI-B)
LEAST_RANGES = 64  # small data have smaller ranges
COPY_S = 5.0  # to copy a slice, and
COPY_BYTES_PER_S = 50e6  # the time that it may take longer
MAX_BLOCKS = 1 << 48
MAX_BLOCK_BYTES = 1 << 30
MAX_COPIES = 16
MAX_ROUNDS = 64  # of a submission; each but the last one gets on, or finds a host that has no room
SHOWN_SPANS = 4  # that a message names

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")

Bytes: TypeAlias = npt.NDArray[np.uint8]
BlockSource: TypeAlias = "str | Path | Callable[[int, int], Any]"


@dataclass(frozen=True, slots=True)
class SubmittedBlocks:
    """What `BlockStore.submit` found and did, the same on all ranks. Blocks of all hosts are added up."""

    copies: int  # hosts that each block is on at least
    read: int  # blocks that were read from the source
    copied: int  # blocks that went from one host to another
    kept: int  # copies of blocks that were in place already


@dataclass(slots=True)
class BlockCounts:
    """What this rank has loaded since the store was made."""

    loaded: int = 0  # blocks
    received_bytes: int = 0  # from state agents, with those that had to be fetched to verify others
    requests: int = 0  # for ranges of bytes
    read: int = 0  # blocks that no host had, so that they were read from the source
    rejected: int = 0  # holders that were given up during a load


class BlockStore:
    """Blocks of static data in the memory of a replica's hosts (ReStore §IV).

    Each replica has blocks of its own: replicas share nothing but their ring. `submit` is a collective of the
    ranks of a replica; `load` is not. Both are for one thread at a time.
    """

    def __init__(
        self,
        job: Job,
        name: str,
        blocks: int,
        block_bytes: int,
        *,
        copies: int = 2,
        permute: bool = True,
    ) -> None:
        """Describe the data. Does not block.

        Args:
            job: What `ft_hsdp.join` returned. name: 1 to 64 letters, digits and ``. _ -``. A store with the same
            name and another description replaces
                the one before.
            blocks: The number of blocks.
            block_bytes: Bytes of each.
            copies: The number of hosts that each block is on; all of them if there are fewer.
            permute: Whether neighbouring ranges of blocks are spread over all hosts (ReStore §IV-B). It makes the
                loading of a part by many ranks faster, and that of all data slower.

        Raises:
            ConfigError: An argument cannot be used.
        """
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError("BlockStore(name)", name, "1 to 64 letters, digits and . _ -")
        limits = {"blocks": MAX_BLOCKS, "block_bytes": MAX_BLOCK_BYTES, "copies": MAX_COPIES}
        given = {"blocks": blocks, "block_bytes": block_bytes, "copies": copies}
        for key, most in limits.items():
            if isinstance(given[key], bool) or not isinstance(given[key], int) or not 1 <= given[key] <= most:
                raise ConfigError(f"BlockStore({key})", given[key], f"an integer from 1 to {most}")
        self.name = name
        self.blocks = blocks
        self.block_bytes = block_bytes
        self.copies = copies
        self.counts = BlockCounts()
        self._job = job
        self._seed = 0 if permute else None
        few = -(-blocks // LEAST_RANGES)
        # Ranks should ask for multiples of so many blocks, because checksums are of so many.
        self.align = max(1, min(PIECE_BYTES // block_bytes, few))
        self._range_blocks = max(1, min(RANGE_BYTES // block_bytes, few) // self.align) * self.align
        about = (name, blocks, block_bytes, self.align, self._range_blocks, self._seed)
        self._store = hashlib.blake2b(repr(about).encode(), digest_size=16).hexdigest()
        self._token = ""
        self._read: Callable[[int, int], Any] | None = None
        self._origin = ""  # the source in words
        self._agent: BlockAgent | None = None
        self._group: ReplicaGroup | None = None
        self._layout = self._cut(1)
        self._hosts: list[str] = []  # addresses of their agents, by host
        self._host_of: list[int] = []  # by rank
        self._names: list[str] = []  # of the hosts, for people
        self._holders: dict[int, list[int]] = {}  # hosts, by slice
        self._digests: dict[int, str] = {}  # of manifests, by slice
        self._known: dict[str, tuple[SliceManifest, bytes]] = {}  # manifests that were read

    def submit(self, source: BlockSource) -> SubmittedBlocks:
        """Bring each block into the memory of ``copies`` hosts. Blocks; a collective of the replica's ranks.

        What is there already stays where it is; what a lost host held is copied from the hosts that have it, to
        the next host of its probing sequence (ReStore §IV-E); what no host has is read from the source. So call it
        when a rank starts, and again whenever copies may be missing. It is over within `timeouts.load_s` for each
        exchange of the ranks, if the source is.

        Before the first batch a rank of `spares` is of no replica yet: call it in the loop there.

        Args:
            source: A file that consists of the blocks, or a function that takes (first block, block after the last
                one) and returns their bytes as anything with a buffer. It is kept, to read what is lost. Different
                ranks read different blocks, each block is read once, and the same bytes must come each time.

        Returns:
            What was found and done.

        Raises:
            ConfigError: The source has another size than the blocks, or this process is a spare without a replica.
            Retryable: Some rank could not read the source, or is gone.
            AgentGone: This host has no state agent.
        """
        self._read, self._origin = self._reader(source)
        home = self._job.agent_home("BlockStore.submit")
        if home is None:
            return SubmittedBlocks(0, 0, 0, 0)  # a replay: nothing is lost there, so the source is enough
        timeouts = self._job.config.timeouts
        if self._group is None:
            self._group = ReplicaGroup(timeouts.load_s)
        if self._agent is None:
            self._agent = BlockAgent.connect(home.token, home.replica, home.rank, timeouts.agent_s, home.host)
        self._token = home.token
        refused: dict[tuple[int, int], str] = {}
        read = copied = kept = 0
        began = time.monotonic()
        lost: list[Span] | None = None  # what was in memory once, and is not
        for _ in range(MAX_ROUNDS):
            self._look(self._agent, home.host)
            hosts = len(self._hosts)
            held = {number: set(each) for number, each in self._holders.items()}
            plan = plan_submission(self._layout.slices, hosts, self.copies, held, refused.keys())
            if lost is None:
                lost = [span for number, _ in plan.written for span in self._spans(number)] if held else []
                kept = sum(len(each) * self._slice_count(number) for number, each in held.items())
            done = self._together(functools.partial(self._carry_out, plan))
            for failed in (each for rank in done for each in rank):
                refused[failed[0], failed[1]] = failed[2]
            written = [number for number, host in plan.written if (number, host) not in refused]
            read += sum(map(self._slice_count, written))
            made = () if plan.written else plan.copied  # copies follow in the next round
            copied += sum(self._slice_count(each.slice) for each in made if (each.slice, each.host) not in refused)
            if not plan.written and not plan.copied:
                break
        fewest = min((len(self._holders.get(n, ())) for n in range(self._layout.slices)), default=0)
        result = SubmittedBlocks(fewest, read, copied, kept)
        if self._group.rank == 0:
            self._tell(result, refused, lost or [], time.monotonic() - began)
        return result

    def load(
        self,
        wanted: Sequence[Span] | Mapping[int, Sequence[Span]],
        deadline_s: float | None = None,
    ) -> Bytes:
        """Return blocks, from the memory of hosts or else from the source. Blocks; no collective.

        Holders that are slow, wrong or gone are given up, and the next ones are asked. What no holder has
        delivered at the deadline is read from the source.

        Args:
            wanted: What this rank wants, as (first block, block after the last one) each: then it needs to know
                nothing of the others. Or what each rank wants, by rank, the same on all ranks: then the load of
                the holders is balanced over all of them (the two request modes of ReStore §V). Spans of one rank
                must not overlap.
            deadline_s: Seconds for the hosts; None is `timeouts.load_s`.

        Returns:
            uint8 [blocks that this rank wants, block_bytes], in the order of the spans; writable.

        Raises:
            ConfigError: `submit` was not called, or the spans cannot be used.
            Retryable: The source cannot be read.
        """
        if self._read is None:
            raise ConfigError("BlockStore.load", self.name, "a call after BlockStore.submit(source)")
        rank = self._job.rank
        requests = wanted if isinstance(wanted, Mapping) else {rank: wanted}
        requests = {each: self._checked(spans) for each, spans in requests.items()}
        mine = requests.get(rank, ())
        places, total = {}, 0  # of the spans in the answer, in blocks
        for first, end in mine:
            places[first] = total
            total += end - first
        out = np.empty((total, self.block_bytes), dtype=np.uint8)
        missing = tuple(mine)
        if self._holders:
            until_s = self._job.config.timeouts.load_s if deadline_s is None else deadline_s
            missing = self._from_hosts(requests, out, places, time.monotonic() + until_s)
        for first, end in merged(missing):
            self._fill(out, places, first, end)
        if missing and self._holders:
            count = sum(end - first for first, end in merged(missing))
            self.counts.read += count
            why = f"no host delivers {_shown(merged(missing))}"
            self._job.note_event("BlocksRead", why, store=self.name, blocks=count, origin=self._origin)
        self.counts.loaded += total
        return out

    def share(self) -> Span:
        """Return this rank's equal part of the blocks: (first block, block after the last one)."""
        return share(self.blocks, self._job.ranks, self.align)[self._job.rank]

    def close(self) -> None:
        """End this rank's connection to its agent. The blocks stay in memory; `submit` finds them."""
        if self._agent is not None:
            self._agent.close()
            self._agent = None

    # The description.

    def _cut(self, slices: int) -> BlockLayout:
        ranges = -(-self.blocks // self._range_blocks)
        return BlockLayout(self.blocks, self._range_blocks, min(slices, ranges), self._seed)

    def _about(self, number: int) -> SliceName:
        nbytes = self._layout.slice_blocks(number) * self.block_bytes
        piece = self.align * self.block_bytes
        return SliceName(self._store, self.name, number, self._layout.slices, nbytes, piece)

    def _slice_count(self, number: int) -> int:
        return sum(run.count for run in self._layout.contents(number))

    def _spans(self, number: int) -> list[Span]:
        return [(run.block, run.block + run.count) for run in self._layout.contents(number)]

    def _checked(self, spans: Sequence[Span]) -> tuple[Span, ...]:
        try:
            found = tuple((int(first), int(end)) for first, end in spans)
        except (TypeError, ValueError):
            allowed = "spans (first block, block after the last one), or a mapping from ranks to them"
            raise ConfigError("BlockStore.load(wanted)", str(spans)[:60], allowed) from None
        last = 0
        for first, end in sorted(found):
            if not last <= first <= end <= self.blocks:
                allowed = f"spans within 0 to {self.blocks} that do not overlap"
                raise ConfigError("BlockStore.load(wanted)", (first, end), allowed)
            last = end
        return tuple((first, end) for first, end in found if first < end)

    # The source.

    def _reader(self, source: BlockSource) -> tuple[Callable[[int, int], Any], str]:
        if callable(source):
            return source, getattr(source, "__qualname__", type(source).__name__)
        path, nbytes = Path(source), self.blocks * self.block_bytes
        try:
            size = path.stat().st_size
        except OSError as error:
            allowed = f"a file of the blocks, or a function ({error.strerror})"
            raise ConfigError("BlockStore.submit(source)", str(path), allowed) from None
        if size != nbytes:
            allowed = f"{nbytes} bytes: {self.blocks} blocks of {self.block_bytes}"
            raise ConfigError("BlockStore.submit(source)", f"{path} of {size} bytes", allowed)

        def read(first: int, end: int) -> bytes:
            with path.open("rb") as file:
                return os.pread(file.fileno(), (end - first) * self.block_bytes, first * self.block_bytes)

        return read, str(path)

    def _bytes(self, first: int, end: int) -> memoryview:
        """Return blocks from the source.

        Raises:
            Retryable: It cannot be read.
            ConfigError: It returned something else.
        """
        assert self._read is not None
        nbytes = (end - first) * self.block_bytes
        try:
            found = self._read(first, end)
        except OSError as error:
            raise Retryable(f"blocks {first} to {end} of {self.name} cannot be read: {error}") from error
        try:
            data = memoryview(found).cast("B")
        except TypeError:
            data = memoryview(b"")
        if len(data) != nbytes:
            allowed = f"{nbytes} bytes for blocks {first} to {end}"
            raise ConfigError("BlockStore.submit(source)", f"{len(data)} bytes of {self._origin}", allowed)
        return data

    def _fill(self, out: Bytes, places: Mapping[int, int], first: int, end: int) -> None:
        """Read blocks from the source into the answer of `load`, a permutation range at a time."""
        for start, place in places.items():
            low, high = max(first, start), min(end, start + _length(places, start, len(out)))
            while low < high:
                upto = min(high, low + self._range_blocks)
                data = np.frombuffer(self._bytes(low, upto), dtype=np.uint8)
                at = place + low - start
                out[at : at + upto - low] = data.reshape(upto - low, self.block_bytes)
                low = upto

    # Submission.

    def _together(self, work: Callable[[], Any]) -> list[Any]:
        """Do something on all ranks, and return what each of them returned. A collective.

        Raises:
            Retryable: It failed on one of them.
        """
        assert self._group is not None
        try:
            return self._group.on_all(work)
        except (Failed, RuntimeError) as error:
            raise Retryable(f"the blocks of {self.name} are not in memory: {error}") from error

    def _look(self, agent: BlockAgent, host: str) -> None:
        """Learn from all hosts what they hold, and drop what cannot be used. A collective."""
        assert self._group is not None
        rank = self._group.rank
        name = host or os.uname().nodename
        addresses = self._together(lambda: [agent.address, name])
        self._hosts = list(dict.fromkeys(address for address, _ in addresses))
        self._host_of = [self._hosts.index(address) for address, _ in addresses]
        self._names = [addresses[self._host_of.index(each)][1] for each in range(len(self._hosts))]
        speaks = self._host_of.index(self._host_of[rank]) == rank
        nbytes = self.blocks * self.block_bytes * self.copies

        def listed() -> list[list[Any]]:
            rows = agent.held(self._store, self.name, nbytes / COPY_BYTES_PER_S) if speaks else ()
            return [[row.slice, row.slices, row.digest] for row in rows]

        rows = [(self._host_of[r], *row) for r, each in enumerate(self._together(listed)) for row in each]
        cuts = Counter(slices for _, _, slices, _ in rows)
        most = max(cuts, key=lambda each: (cuts[each], -each)) if cuts else len(self._hosts)
        self._layout = self._cut(most)
        votes: dict[int, Counter[str]] = defaultdict(Counter)
        for _, number, slices, digest in rows:
            if slices == most and number < self._layout.slices:
                votes[number][digest] += 1
        self._digests = {
            number: max(found, key=lambda each: (found[each], each)) for number, found in votes.items()
        }
        self._holders = defaultdict(list)
        for at, number, slices, digest in rows:
            if slices == most and self._digests.get(number) == digest:
                self._holders[number].append(at)
        self._holders = dict(self._holders)
        if speaks:
            here = self._host_of[rank]
            wrong = [n for at, n, _, _ in rows if at == here and here not in self._holders.get(n, ())]
            agent.drop(self._store, wrong)

    def _carry_out(self, plan: SubmissionPlan) -> list[tuple[int, int, str]]:
        """Do this rank's part of a plan, and return (slice, host, why) of what was refused."""
        assert self._agent is not None
        assert self._group is not None
        here = self._host_of[self._group.rank]
        ranks = [rank for rank, host in enumerate(self._host_of) if host == here]
        turn = ranks.index(self._group.rank)
        refused = []
        if not turn:
            self._agent.drop(self._store, [number for number, host in plan.dropped if host == here])
        for number in [number for number, host in plan.written if host == here][turn :: len(ranks)]:
            if why := self._write(self._agent, number):
                refused.append((number, here, why))
        if plan.written:
            return refused  # copies are made in the next round, of what was written
        for order in [each for each in plan.copied if each.host == here][turn :: len(ranks)]:
            about, addresses = self._about(order.slice), [self._hosts[each] for each in order.sources]
            limit_s = COPY_S + about.nbytes / COPY_BYTES_PER_S
            asked = CopySlice(about, self._digests[order.slice], tuple(addresses), limit_s, self._budget)
            if why := self._agent.copy(asked):
                refused.append((order.slice, here, why))
        return refused

    @property
    def _budget(self) -> int | None:
        gigabytes = self._job.config.memory.budget_gb
        return None if gigabytes is None else int(gigabytes * 1e9)

    def _write(self, agent: BlockAgent, number: int) -> str:
        """Read a slice from the source into memory of the agent; return why there is none, or ""."""
        about = self._about(number)
        memory = agent.write(about, self._budget, about.nbytes / COPY_BYTES_PER_S)
        if isinstance(memory, str):
            return memory
        for run in self._layout.contents(number):
            begin = run.offset * self.block_bytes
            data = self._bytes(run.block, run.block + run.count)
            memory[begin : begin + len(data)] = np.frombuffer(data, dtype=np.uint8)
        sums = slices_of.sums_of(memory.data, about.piece)
        del memory
        return agent.written(SliceManifest(about, sums))

    def _tell(
        self,
        result: SubmittedBlocks,
        refused: Mapping[tuple[int, int], str],
        lost: Sequence[Span],
        seconds: float,
    ) -> None:
        """Write down what was done. On rank 0."""
        facts = {"store": self.name, "blocks": self.blocks, "seconds": seconds}
        if lost:
            count = sum(end - first for first, end in lost)
            why = f"no host has {_shown(merged(lost))} any more"
            self._job.note_event("BlocksRead", why, store=self.name, blocks=count, origin=self._origin)
        if result.read or result.copied:
            why = f"{result.read} blocks were read from {self._origin}, {result.copied} copied from host to host"
            self._job.note_event("BlocksSubmitted", why, copies=result.copies, **facts)
        if result.copies < self.copies:
            why = next(iter(refused.values()), f"there are {len(self._hosts)} hosts")
            self._job.note_event("BlocksUnprotected", why, copies=result.copies, **facts)

    # Loading.

    def _from_hosts(
        self,
        requests: Mapping[int, Sequence[Span]],
        out: Bytes,
        places: Mapping[int, int],
        until: float,
    ) -> tuple[Span, ...]:
        """Load what this rank wants, and return the blocks that no holder has delivered in time."""
        rank = self._job.rank
        near = dict(enumerate(self._host_of))
        given_up: set[int] = set()  # hosts, in this load
        missing: list[Span] = []
        while requests.get(rank):
            left_s = until - time.monotonic()
            plan = plan_load(self._layout, requests, self._holders, near)
            missing += [span for reader, span in plan.missing if reader == rank]
            reads = [read for read in plan.reads if read.reader == rank]
            if left_s <= 0:
                missing += [_span_of(read.run) for read in reads]
                break
            orders = self._orders(reads, places)
            outcome = slices_of.read_slices(
                [order for order, _ in orders], _flat(out), self._token, left_s, self._known
            )
            self.counts.received_bytes += outcome.nbytes
            self.counts.requests += outcome.requests
            why_of = {id(order): why for order, why in outcome.failed}
            again: list[Span] = []
            for order, runs in orders:
                why = why_of.get(id(order))
                if why is not None:
                    host = self._hosts.index(order.address)
                    again += [_span_of(run) for run in runs]
                    self._strike(order.about.slice, host, why, told=host in given_up)
                    given_up.add(host)
            requests = {rank: merged(again)}
        return merged(missing)

    def _orders(
        self, reads: Sequence[BlockRead], places: Mapping[int, int]
    ) -> list[tuple[SliceRead, list[SliceRun]]]:
        """Return what is asked of whom: a request for each slice and holder, with the runs in it."""
        size = self.block_bytes
        grouped: dict[tuple[int, int], list[SliceRun]] = defaultdict(list)
        for read in reads:
            grouped[read.holder, read.run.slice].append(read.run)
        starts = sorted(places)
        orders = []
        for (host, number), runs in grouped.items():
            spans = []
            for run in runs:
                start = max(each for each in starts if each <= run.block)
                target = (places[start] + run.block - start) * size
                spans.append((run.offset * size, run.count * size, target))
            about = self._about(number)
            orders.append((SliceRead(about, self._digests[number], self._hosts[host], tuple(spans)), runs))
        return orders

    def _strike(self, number: int, host: int, why: str, *, told: bool) -> None:
        """Ask a host no more for a slice, until the next `submit`."""
        self._holders[number] = [each for each in self._holders[number] if each != host]
        if not told:
            self.counts.rejected += 1
            self._job.note_event("BlocksRejected", why, store=self.name, host=self._names[host], slice=number)


def _flat(out: Bytes) -> memoryview:
    return out.reshape(-1).data


def _span_of(run: SliceRun) -> Span:
    return run.block, run.block + run.count


def _length(places: Mapping[int, int], first: int, total: int) -> int:
    """Return the blocks of the span that begins with ``first``: up to the next place in the answer."""
    later = [place for place in places.values() if place > places[first]]
    return min(later, default=total) - places[first]


def _shown(spans: Sequence[Span]) -> str:
    """Return spans in words; the first few of many."""
    named = ", ".join(f"{first} to {end - 1}" for first, end in spans[:SHOWN_SPANS])
    more = f" and {len(spans) - SHOWN_SPANS} more ranges" if len(spans) > SHOWN_SPANS else ""
    return f"blocks {named}{more}"


__all__ = ["BlockCounts", "BlockStore", "SubmittedBlocks"]
