"""Which shards of a replica's states are in the memory of state agents: what rank 0 knows while it recovers.

Each rank says what the agent of its own host keeps (`RankAgent`). Agents of other hosts and replicas are asked
over HTTP, and only if this replica needs them. `KnownShards.newest` is then the newest state of which every shard
is somewhere, by `memory.recovery`, without the sources that have failed.

`OtherWidths` and `donors_of` are for shards of a state that is cut for another number of ranks. All of it follows
from the layout of this rank's own shard. A layout that FSDP2 has not cut by rows over all ranks has no other
widths: then only shards of the own width count, and checkpoints.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ft_hsdp.core import state_id
from ft_hsdp.core.grant import Holders, Member
from ft_hsdp.core.state_id import StateId
from ft_hsdp.memory.hosts import Host, plain
from ft_hsdp.memory.recovery import Gathering, Holding, Recoverable, Width, newest
from ft_hsdp.state.transfer import parts, reshape
from ft_hsdp.state.transfer.donor_connection import ask_held
from ft_hsdp.state.transfer.fetch import Donor
from ft_hsdp.state.transfer.parts import Uncuttable
from ft_hsdp.state.transfer.reshape import WantedShard
from ft_hsdp.state.transfer.shard_manifest import Held, HeldShard, Layout

ASK_S = 1.0  # for all agents that are asked at once
NOBODY = Holders(stands=False, head=None)  # no agent besides those of the own hosts is known
DOUBT_S = 1.0  # for which a replica without any state of its own looks whether the others still train
LOOK_S = 0.1  # between two such looks


@dataclass(frozen=True, slots=True)
class Recoverer:
    """The incarnation that is restored, and whom it asks."""

    replica: int
    number: int  # how many incarnations of this replica came before
    host: str  # of this rank: "zone/rack/host", "rack/host" or "host"
    token: str  # of the job
    # Asks the lighthouse, on rank 0, for so many seconds; None: no answer.
    holders: Callable[[float], Holders | None]
    reach_s: float  # how long the lighthouse is looked for, if nothing can be restored without it
    limit_s: float  # after which no further source in memory is tried; half of it for one fetch


@dataclass(frozen=True, slots=True)
class RankAgent:
    """The state agent of a rank's host, as the rank has told the others."""

    host: str
    address: str  # at which the agent serves
    layout: str
    nbytes: int
    kept: tuple[tuple[StateId, bool], ...]  # complete snapshots, and whether they are settled


class KnownShards:
    """What the state agents of a job keep of one replica's states, as far as rank 0 has asked."""

    def __init__(self, about: Recoverer, peers: Sequence[RankAgent], layout: Layout) -> None:
        self._about = about
        self._peers = tuple(peers)
        self._other_widths = OtherWidths(layout, [peer.layout for peer in peers])
        # Snapshots of this replica's ranks, each in its rank's agent; and what all agents keep besides.
        self._own = [self._in_its_slot(rank, *kept) for rank, peer in enumerate(peers) for kept in peer.kept]
        self._others: list[Holding] = []
        self._patient = False  # whether all agents had the time to answer
        self._failed: set[Holding] = set()
        self.holders: Holders | None = None  # what the lighthouse has answered to `ask`; None: nothing

    @property
    def others_train(self) -> bool:
        return self.holders is not None and self.holders.stands

    def ask(self) -> None:
        """Ask the lighthouse, and then other agents if this replica needs what they keep. Blocks.

        While others train it does not: it would have to fetch what they have by then, anyway. Exits are reported a
        moment after they happen, so a replica that has no state of its own looks twice. Then its own hosts tell
        which copies they keep: those who train may end before it has fetched anything.
        """
        about, best = self._about, self._newest()
        found = about.holders(0.0 if best is not None or about.number == 0 else about.reach_s)
        if found is not None and best is None and about.number > 0:
            first, until = found.head, time.monotonic() + DOUBT_S
            while found.stands and found.head == first and time.monotonic() < until:
                time.sleep(LOOK_S)
                found = about.holders(0.0) or found
        self.holders = found
        if found is None or found.stands or found.head is None:
            if found is not None and (best is not None or about.number == 0):
                return
            # Its own hosts may have copies for each other, or shards of another number of ranks.
            self._others = [h for h in self._ask_agents(NOBODY, hurry=False) if h.replica == about.replica]
        elif best is None or state_id.newer(found.head, best.state):
            self._others = self._ask_agents(found, hurry=True)

    def newest(self) -> Recoverable | None:
        """Return the newest state of which every shard is in an agent and has not failed.

        Once a source has failed, all agents are asked again, once: others may have the same shard. Then it blocks.
        """
        holders = self.holders
        if self._failed and not self._patient and holders is not None:
            if not holders.stands and holders.head is not None:
                self._others = self._ask_agents(holders, hurry=False)
            self._patient = True
        return self._newest(self._others)

    def fail(self, sources: Iterable[Holding]) -> None:
        """Never count these shards again: their sources do not give them, or give damaged ones."""
        self._failed.update(sources)

    def _in_its_slot(self, rank: int, state: StateId, settled: bool) -> Holding:
        peer, size = self._peers[rank], len(self._peers)
        return Holding(state, self._about.replica, rank, size, peer.layout, peer.host, peer.address, settled)

    def _ask_agents(self, found: Holders, *, hurry: bool) -> list[Holding]:
        """Return what all agents keep that answer, besides the own snapshots of this replica's ranks. Blocks.

        With ``hurry`` hosts that do not answer are not waited for once the head is whole.
        """
        mine = {peer.address: peer.host for peer in self._peers}
        where = found.hosts | mine
        known = {(h.address, h.replica, h.rank, h.ranks, h.state) for h in self._own}
        others = [address for agents in found.agents.values() for address in agents]

        def holdings(answers: Mapping[str, Held]) -> list[Holding]:
            return [
                _holding(row, address, where.get(address, row.host))
                for address, rows in answers.items()
                for row in rows
                if (address, row.replica, row.rank, row.ranks, row.state) not in known
            ]

        answers: dict[str, Held] = {}
        gathering = Gathering(found.head) if hurry and found.head is not None else None
        if gathering is not None:
            gathering.add((h.state, h.ranks, h.rank) for h in self._own)

        def enough(address: str, rows: Held) -> bool:
            answers[address] = rows
            if gathering is None or not gathering.add((r.state, r.ranks, r.rank) for r in rows if self._fits(r)):
                return False
            whole = self._newest(holdings(answers))
            assert found.head is not None
            return whole is not None and not state_id.newer(found.head, whole.state)

        return holdings(ask_held([*mine, *others], self._about.token, ASK_S, enough))

    def _fits(self, row: HeldShard) -> bool:
        size = len(self._peers)
        return row.ranks != size or (0 <= row.rank < size and row.layout == self._peers[row.rank].layout)

    def _newest(self, others: Sequence[Holding] = ()) -> Recoverable | None:
        layouts, hosts = [p.layout for p in self._peers], [p.host for p in self._peers]
        found = [*self._own, *others]
        return newest(found, self._about.replica, layouts, hosts, self._failed, self._other_widths.of(found))


def _holding(row: HeldShard, address: str, host: str) -> Holding:
    try:
        host = str(Host.parse(host))
    except ValueError:
        host = plain(address)
    return Holding(row.state, row.replica, row.rank, row.ranks, row.layout, host, address, row.settled)


MAX_OTHERS = 8  # other widths that count, the largest ones


class OtherWidths:
    """The other widths of one state, worked out when a shard of them is seen."""

    def __init__(self, layout: Layout, layouts: Sequence[str]) -> None:
        self._layout = layout
        self._layouts = tuple(layouts)
        self._found: dict[int, Width | None] = {}

    def of(self, holdings: Iterable[Holding]) -> Mapping[int, Width]:
        """Return the other widths that ``holdings`` have, as far as the state can be cut for them."""
        seen = {each.ranks for each in holdings if 0 < each.ranks <= parts.MAX_WIDTH} - {len(self._layouts)}
        for ranks in sorted(seen, reverse=True)[:MAX_OTHERS]:
            if ranks not in self._found:
                self._found[ranks] = self._width(ranks)
        return {ranks: width for ranks, width in self._found.items() if width is not None}

    def _width(self, ranks: int) -> Width | None:
        own = len(self._layouts)
        try:
            if self._fingerprints(own) != self._layouts:  # another rank's shard is cut in another way
                return None
            needs = tuple(reshape.sources(self._layout, ranks, rank, own) for rank in range(own))
            return Width(self._fingerprints(ranks), needs)
        except Uncuttable:
            return None

    def _fingerprints(self, ranks: int) -> tuple[str, ...]:
        tensors = self._layout.tensors
        return tuple(parts.layout_at(tensors, ranks, rank).fingerprint for rank in range(ranks))


def donors_of(members: Sequence[Member], shard: WantedShard) -> tuple[int, dict[int, list[Donor]]]:
    """Return from whom a rank fetches its shard: the width of the replicas, and who has which shard there.

    Replicas of its own width come first, then those of the width that most have.
    """
    widths = [len(each.state) for each in members]
    width = max(widths, key=lambda w: (w == shard.ranks, widths.count(w), w), default=shard.ranks)
    chosen = [each for each in members if len(each.state) == width]
    needed = (
        (shard.rank,) if width == shard.ranks else reshape.sources(shard.layout, width, shard.rank, shard.ranks)
    )
    return width, {rank: [Donor(each.replica, each.state[rank]) for each in chosen] for rank in needed}
