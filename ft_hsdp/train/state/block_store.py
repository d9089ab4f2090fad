"""Static data of a user's job in the memory of several hosts (ReStore §IV): `BlockStore`.

A rank reads its part of static data, such as points or features, once from a file. When the rank or its host is
lost, its successor, or the ranks that are left, load that part from the memory of the other hosts, which is faster
than the file. Only what no host has any more is read from the file again, and that is said.

The state agents of the replica's hosts hold the data; they outlive the ranks. Nothing new listens on a network:
holders copy from each other, and ranks load, through the agents' state servers. Where everything lies is computed
by `ft_hsdp.memory.blocks`, alike on all ranks. What the data are is in `block_data`, how they come into the memory
of the hosts in `block_submission`. Here is how they are loaded.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ft_hsdp.errors import ConfigError
from ft_hsdp.memory.blocks import BlockRead, SliceRun, Span, merged, plan_load, share
from ft_hsdp.state.agent.client import BlockAgent
from ft_hsdp.state.replica_group import ReplicaGroup
from ft_hsdp.state.transfer import blocks as slices_of
from ft_hsdp.state.transfer.blocks import Known, SliceRead
from ft_hsdp.train.state.block_data import BlockData, BlockReader, BlockSource, Bytes, LoadAnswer, shown_spans
from ft_hsdp.train.state.block_submission import BlockHolders, BlockSubmission, SubmittedBlocks

if TYPE_CHECKING:
    from ft_hsdp.train.job import Job


@dataclass(slots=True)
class BlockCounts:
    loaded: int = 0  # blocks
    received_bytes: int = 0  # from state agents, with those that had to be fetched to verify others
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
            job: What `ft_hsdp.join` returned.
            name: 1 to 64 letters, digits and ``. _ -``. A store with the same name and another description
                replaces the one before.
            blocks: The number of blocks.
            block_bytes: Bytes of each.
            copies: The number of hosts that each block is on; all of them if there are fewer.
            permute: Whether neighbouring ranges of blocks are spread over all hosts (ReStore §IV-B). It makes the
                loading of a part by many ranks faster, and that of all data slower.

        Raises:
            ConfigError: An argument cannot be used.
        """
        self._data = BlockData.described(name, blocks, block_bytes, copies, permute=permute)
        self.name = name
        self.blocks = blocks
        self.block_bytes = block_bytes
        self.copies = copies
        self.align = self._data.align  # ranks should ask for multiples of so many blocks
        self.counts = BlockCounts()
        self._job = job
        self._token = ""
        self._reader: BlockReader | None = None
        self._group: ReplicaGroup | None = None
        self._known = BlockHolders(self._data.cut(1))
        self._manifests: Known = {}  # that were read

    def submit(self, source: BlockSource) -> SubmittedBlocks:
        """Bring each block into the memory of ``copies`` hosts. Blocks; a collective of the replica's ranks.

        What is there already stays where it is; what a lost host held is copied from the hosts that have it, to
        the next host of its probing sequence (ReStore §IV-E); what no host has is read from the source. So call it
        when a rank starts, and again whenever copies may be missing. The ranks tell each other after each slice
        that they have read or copied, of about 256 MiB. They wait `timeouts.load_s` at most for each other then.

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
        self._reader = BlockReader(self._data, source)
        home = self._job.agent_home("BlockStore.submit")
        if home is None:
            return SubmittedBlocks(0, 0, 0, 0)  # a replay: nothing is lost there, so the source is enough
        timeouts = self._job.config.timeouts
        if self._group is None:
            self._group = ReplicaGroup(timeouts.load_s)
        self._token = home.token
        # A rank has one such connection, and may have several stores; and another agent may have come since.
        agent = BlockAgent.connect(home.token, home.replica, home.rank, timeouts.agent_s, home.host)
        with contextlib.closing(agent):
            work = BlockSubmission(self._data, self._reader, self._job, agent, self._group, self._known)
            return work.run(home.host)

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
        if self._reader is None:
            raise ConfigError("BlockStore.load", self.name, "a call after BlockStore.submit(source)")
        rank = self._job.rank
        requests = wanted if isinstance(wanted, Mapping) else {rank: wanted}
        requests = {each: self._data.checked(spans) for each, spans in requests.items()}
        mine = requests.get(rank, ())
        answer = LoadAnswer(self._data, mine)
        missing = tuple(mine)
        if self._known.holders:
            until_s = self._job.config.timeouts.load_s if deadline_s is None else deadline_s
            missing = self._from_hosts(requests, answer, time.monotonic() + until_s)
        for first, end in merged(missing):
            self._reader.fill(answer, first, end)
        if missing and self._known.holders:
            count = sum(end - first for first, end in merged(missing))
            self.counts.read += count
            why = f"no host delivers {shown_spans(merged(missing))}"
            self._job.note_event("BlocksRead", why, store=self.name, blocks=count, origin=self._reader.origin)
        self.counts.loaded += len(answer.out)
        return answer.out

    def share(self) -> Span:
        """Return this rank's equal part of the blocks: (first block, block after the last one)."""
        return share(self.blocks, self._job.ranks, self.align)[self._job.rank]

    # Loading.

    def _from_hosts(
        self,
        requests: Mapping[int, Sequence[Span]],
        answer: LoadAnswer,
        until: float,
    ) -> tuple[Span, ...]:
        """Load what this rank wants, and return the blocks that no holder has delivered in time."""
        rank, known = self._job.rank, self._known
        near = dict(enumerate(known.host_of))
        given_up: set[int] = set()  # hosts, in this load
        missing: list[Span] = []
        while requests.get(rank):
            left_s = until - time.monotonic()
            plan = plan_load(known.layout, requests, known.holders, near)
            missing += [span for reader, span in plan.missing if reader == rank]
            reads = [read for read in plan.reads if read.reader == rank]
            if left_s <= 0:
                missing += [read.run.span for read in reads]
                break
            orders = self._orders(reads, answer)
            outcome = slices_of.read_slices(
                [order for order, _ in orders], answer.out.reshape(-1).data, self._token, left_s, self._manifests
            )
            self.counts.received_bytes += outcome.nbytes
            why_of = {id(order): why for order, why in outcome.failed}
            again: list[Span] = []
            for order, runs in orders:
                why = why_of.get(id(order))
                if why is not None:
                    host = known.hosts.index(order.address)
                    again += [run.span for run in runs]
                    self._strike(order.about.slice, host, why, told=host in given_up)
                    given_up.add(host)
            requests = {rank: merged(again)}
        return merged(missing)

    def _orders(self, reads: Sequence[BlockRead], answer: LoadAnswer) -> list[tuple[SliceRead, list[SliceRun]]]:
        """Return what is asked of whom: a request for each slice and holder, with the runs in it."""
        size, known = self.block_bytes, self._known
        grouped: dict[tuple[int, int], list[SliceRun]] = defaultdict(list)
        for read in reads:
            grouped[read.holder, read.run.slice].append(read.run)
        orders = []
        for (host, number), runs in grouped.items():
            spans = tuple(
                ((run.offset + first - run.block) * size, (end - first) * size, place * size)
                for run in runs
                for first, end, place in answer.parts(*run.span)  # a run may cross spans of the user
            )
            about = self._data.slice_name(known.layout, number)
            orders.append((SliceRead(about, known.digests[number], known.hosts[host], spans), runs))
        return orders

    def _strike(self, number: int, host: int, why: str, *, told: bool) -> None:
        """Ask a host no more for a slice, until the next `submit`."""
        holders = self._known.holders
        holders[number] = [each for each in holders[number] if each != host]
        if not told:
            self.counts.rejected += 1
            self._job.note_event(
                "BlocksRejected", why, store=self.name, host=self._known.names[host], slice=number
            )


__all__ = ["BlockCounts", "BlockStore", "SubmittedBlocks"]
