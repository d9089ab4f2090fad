"""Brings the blocks of a store into the memory of the hosts, together with the other ranks: `BlockSubmission`.

All ranks learn what the agents of the hosts hold and compute the same plan from it. Then rounds follow: each rank
reads one slice from the source, or has its host's agent copy one, and all tell each other what they have done and
plan again. So no rank waits for another longer than one slice takes, and a replica that starts again in between
loses no slice that is complete. It is over when nothing is missing that a host has room for. What is known then,
which host has which slice, is what loads are planned from.
"""

from __future__ import annotations

import functools
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ft_hsdp.errors import Retryable
from ft_hsdp.memory.blocks import BlockLayout, SliceCopy, Span, SubmissionPlan, merged, plan_submission
from ft_hsdp.state.agent.client import BlockAgent
from ft_hsdp.state.agent.messages import DropSlices, KeepCopy
from ft_hsdp.state.replica_group import Failed, ReplicaGroup
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.shard_manifest import SliceManifest
from ft_hsdp.train.state.block_data import BlockData, BlockReader, shown_spans

if TYPE_CHECKING:
    from ft_hsdp.train.job import Job

COPY_S = 5.0  # to copy a slice, and
COPY_BYTES_PER_S = 50e6  # the time that it may take longer; what a host copies at once shares its link
SPARE_ROUNDS = 64  # of a submission, beside those in which copies are made: a host may have no room


@dataclass(frozen=True, slots=True)
class SubmittedBlocks:
    """What `BlockStore.submit` found and did, the same on all ranks. Blocks of all hosts are added up."""

    copies: int  # hosts that each block is on at least
    read: int  # blocks that were read from the source
    copied: int  # blocks that went from one host to another
    kept: int  # copies of blocks that were in place already


@dataclass(slots=True)
class BlockHolders:
    """Which host has which slices, the same on all ranks. Hosts are numbered by their first rank."""

    layout: BlockLayout
    hosts: list[str] = field(default_factory=list)  # addresses of their agents, by host
    host_of: list[int] = field(default_factory=list)  # by rank
    names: list[str] = field(default_factory=list)  # of the hosts, for people
    holders: dict[int, list[int]] = field(default_factory=dict)  # hosts, by slice
    digests: dict[int, str] = field(default_factory=dict)  # of manifests, by slice

    def take(self, rows: Sequence[tuple[int, int, int, int, str]], data: BlockData) -> None:
        """Note what the hosts hold, as far as most of them agree on the layout and on the bytes of slices.

        Args:
            rows: (host, slice, number of slices, slices of a share, digest of its manifest) of all slices.
        """
        cuts = Counter((slices, parts) for _, _, slices, parts, _ in rows)
        if cuts:
            slices, parts = max(cuts, key=lambda each: (cuts[each], each))
            self.layout = data.cut(max(1, slices // parts), parts)
        else:
            self.layout = data.first_cut(len(self.hosts), max(Counter(self.host_of).values()))
        cut = self.layout.slices, self.layout.parts
        votes: dict[int, Counter[str]] = defaultdict(Counter)
        for _, number, slices, parts, digest in rows:
            if (slices, parts) == cut and number < slices:
                votes[number][digest] += 1
        self.digests = {
            number: max(found, key=lambda each: (found[each], each)) for number, found in votes.items()
        }
        holders = defaultdict(list)
        for at, number, slices, parts, digest in rows:
            if (slices, parts) == cut and self.digests.get(number) == digest:
                holders[number].append(at)
        self.holders = dict(holders)

    def held(self) -> int:
        return sum(len(each) * self.layout.count(number) for number, each in self.holders.items())


@dataclass(eq=False)
class BlockSubmission:
    """A rank's part in one submission. For one thread; every call is a collective of the replica's ranks."""

    _data: BlockData
    _reader: BlockReader  # the source
    _job: Job
    _agent: BlockAgent
    _group: ReplicaGroup
    _known: BlockHolders  # who holds what; it is brought up to date
    _refused: dict[tuple[int, int], str] = field(default_factory=dict)  # why, by slice and host

    def run(self, host: str) -> SubmittedBlocks:
        """Do what is missing. Blocks.

        Raises:
            Retryable: Some rank could not read the source, or is gone.
        """
        data, known, refused = self._data, self._known, self._refused
        began = time.monotonic()
        self._look(host)
        layout, kept, read, copied = known.layout, known.held(), 0, 0
        plan = self._plan()
        lost = [run.span for number, _ in plan.written for run in layout.contents(number)] if kept else []
        rounds = SPARE_ROUNDS + layout.slices * data.copies
        while rounds and (plan.written or plan.copied or plan.dropped):
            rounds -= 1
            done = self._together(functools.partial(self._carry_out, plan))
            for number, at in plan.dropped:
                known.holders[number].remove(at)
            for rank, rows in enumerate(done):
                at = known.host_of[rank]
                for number, digest, why in rows:
                    if why:
                        refused[number, at] = why
                        continue
                    read += layout.count(number) if plan.written else 0
                    copied += 0 if plan.written else layout.count(number)
                    known.digests[number] = digest
                    known.holders.setdefault(number, []).append(at)
            plan = self._plan()
        fewest = min(len(known.holders.get(number, ())) for number in range(layout.slices))
        result = SubmittedBlocks(fewest, read, copied, kept)
        if self._group.rank == 0:
            self._tell(result, lost, time.monotonic() - began)
        return result

    def _plan(self) -> SubmissionPlan:
        known = self._known
        hosts, copies = len(known.hosts), self._data.copies
        return plan_submission(known.layout.slices, hosts, copies, known.holders, self._refused.keys())

    def _together(self, work: Callable[[], Any]) -> list[Any]:
        """Do something on all ranks, and return what each of them returned. A collective."""
        try:
            return self._group.on_all(work)
        except (Failed, RuntimeError) as error:
            raise Retryable(f"the blocks of {self._data.name} are not in memory: {error}") from error

    def _look(self, host: str) -> None:
        """Learn from all hosts what they hold, and drop what cannot be used. A collective."""
        data, known, agent, rank = self._data, self._known, self._agent, self._group.rank
        name = host or os.uname().nodename
        addresses = self._together(lambda: [agent.address, name])
        known.hosts = list(dict.fromkeys(address for address, _ in addresses))
        known.host_of = [known.hosts.index(address) for address, _ in addresses]
        known.names = [addresses[known.host_of.index(each)][1] for each in range(len(known.hosts))]
        here = known.host_of[rank]
        speaks = known.host_of.index(here) == rank
        nbytes = data.blocks * data.block_bytes * data.copies

        def listed() -> list[list[Any]]:
            rows = agent.held(data.store, data.name, nbytes / COPY_BYTES_PER_S) if speaks else ()
            return [[row.slice, row.slices, row.parts, row.digest] for row in rows]

        rows = [(known.host_of[r], *row) for r, each in enumerate(self._together(listed)) for row in each]
        known.take(rows, data)
        if speaks:
            wrong = [n for at, n, *_ in rows if at == here and here not in known.holders.get(n, ())]
            agent.order(DropSlices(data.store, tuple(wrong)))

    def _carry_out(self, plan: SubmissionPlan) -> list[tuple[int, str, str]]:
        """Do this rank's next part of a plan: one slice, beside those that its host has no room for.

        Returns (slice, digest of its manifest, "") or (slice, "", why it was refused) of what was tried.
        """
        known = self._known
        here = known.host_of[self._group.rank]
        ranks = [rank for rank, host in enumerate(known.host_of) if host == here]
        turn = ranks.index(self._group.rank)
        if not turn:
            dropped = tuple(number for number, host in plan.dropped if host == here)
            self._agent.order(DropSlices(self._data.store, dropped))
        work: list[tuple[int, Callable[[], tuple[str, str]]]] = []
        if plan.written:  # copies are made in a later round, of what was written
            for number in [number for number, host in plan.written if host == here]:
                work.append((number, functools.partial(self._write, number)))
        else:
            copied = [each for each in plan.copied if each.host == here]
            at_once = min(len(ranks), len(copied))
            for each in copied:
                work.append((each.slice, functools.partial(self._copy, each, at_once)))
        tried, until = [], time.monotonic() + COPY_S
        for number, do in work[turn :: len(ranks)]:
            digest, why = do()
            tried.append((number, digest, why))
            if not why or time.monotonic() > until:
                break
        return tried

    def _write(self, number: int) -> tuple[str, str]:
        """Read a slice from the source into memory of the agent; return its digest, or why there is none."""
        layout, size = self._known.layout, self._data.block_bytes
        about = self._data.slice_name(layout, number)
        memory = self._agent.write(about, self._job.config.memory.budget, about.nbytes / COPY_BYTES_PER_S)
        if isinstance(memory, str):
            return "", memory
        for run in layout.contents(number):
            begin = run.offset * size
            data = self._reader.read(*run.span)
            memory[begin : begin + len(data)] = np.frombuffer(data, dtype=np.uint8)
        sums = shard_manifest.checksums(memory.data, chunk=about.piece)
        del memory
        encoded = shard_manifest.encode(SliceManifest(about, sums))
        return shard_manifest.digest(encoded), self._agent.written(about, encoded)

    def _copy(self, copy: SliceCopy, at_once: int) -> tuple[str, str]:
        """Have the agent copy a slice, as one of so many at once; return its digest, or why it has not."""
        known = self._known
        about, digest = self._data.slice_name(known.layout, copy.slice), known.digests[copy.slice]
        addresses = tuple(known.hosts[each] for each in copy.sources)
        limit_s = COPY_S + at_once * about.nbytes / COPY_BYTES_PER_S
        order = KeepCopy(about, addresses, limit_s, self._job.config.memory.budget, digest=digest)
        return digest, self._agent.keep(order)

    def _tell(self, result: SubmittedBlocks, lost: Sequence[Span], seconds: float) -> None:
        data, refused, origin = self._data, self._refused, self._reader.origin
        facts: dict[str, Any] = {"store": data.name, "blocks": data.blocks, "seconds": seconds}
        if lost:
            count = sum(end - first for first, end in lost)
            why = f"no host has {shown_spans(merged(lost))} any more"
            self._job.note_event("BlocksRead", why, store=data.name, blocks=count, origin=origin)
        why = f"{result.read} blocks were read from {origin}, {result.copied} copied from host to host"
        if result.copies < data.copies:
            why += "; " + next(iter(refused.values()), f"there are {len(self._known.hosts)} hosts")
            facts["wanted"] = data.copies
        if result.read or result.copied or "wanted" in facts:
            self._job.note_event("BlocksSubmitted", why, copies=result.copies, **facts)
