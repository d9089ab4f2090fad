"""With which state a replica joins its job.

`restore` brings the live state to the newest one that can be had: from the memory of state agents, from a
checkpoint, or else the initial one. The ranks do it together, so that all of them load one state or none. Rank 0
decides, each rank takes its own shard:

    all ranks      what the agent of this rank's host has kept
    rank 0         if nobody else trains and the head is newer: what all other agents have kept;
                   while others train, if these agents have no whole state: what else they have kept
    rank 0         `memory.recovery.newest`: the newest state of which every shard is in some agent
    each rank      verifies its shard: its own agent's, or one that it fetches into a slot of its own agent
    all ranks      load it if all have verified theirs; else rank 0 decides again, without the failed sources

So the rungs fall by themselves: own agent, a copy elsewhere, another replica, an older state, the checkpoint. A
snapshot is only made of a committed state, so shards of one state may come from several replicas. They may be
those of another number of ranks (`other_widths`): then each rank fetches parts of several.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ft_hsdp.core import state_id
from ft_hsdp.core.grant import Holders
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import ConfigError, FtHsdpError
from ft_hsdp.jsonl import Journal
from ft_hsdp.memory.hosts import Host, plain
from ft_hsdp.memory.recovery import Gathering, Holding, Recoverable, newest, rung
from ft_hsdp.state.checkpoint import catalog
from ft_hsdp.state.replica_group import ReplicaGroup
from ft_hsdp.state.shared_memory import Bytes
from ft_hsdp.state.transfer import fetch, reshape
from ft_hsdp.state.transfer.fetch import Donor
from ft_hsdp.state.transfer.holdings import Held, ask_held
from ft_hsdp.state.transfer.parts import Uncuttable
from ft_hsdp.state.transfer.reshape import WantedShard
from ft_hsdp.state.transfer.shard_manifest import HeldShard, ShardManifest
from ft_hsdp.train.state.checkpointing import Checkpoints, load_checkpoint
from ft_hsdp.train.state.live_state import LiveState
from ft_hsdp.train.state.other_widths import OtherWidths
from ft_hsdp.train.state.snapshots import SnapshotWriter

ASK_S = 1.0  # for all agents that are asked at once
NOBODY = Holders(stands=False, head=None)  # no agent besides those of the own hosts is known
DOUBT_S = 1.0  # for which a replica without any state of its own looks whether the others still train
LOOK_S = 0.1  # between two such looks
MAX_DONORS = 4  # from which one rank fetches at once


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
class _Peer:
    """What one rank has told the others."""

    host: str
    address: str  # of its agent
    layout: str
    nbytes: int
    kept: tuple[tuple[StateId, bool], ...]  # complete snapshots in its agent, and whether they are settled


@dataclass(frozen=True, slots=True)
class _Taken:
    """A verified shard, not loaded yet."""

    manifest: ShardManifest
    packed: Bytes


@dataclass(frozen=True, slots=True)
class _Outcome:
    """How a rank fared with its sources."""

    used: tuple[int, ...] = ()  # the sources that gave something, most first; (): the shard is not there
    failed: tuple[int, ...] = ()  # sources that must not be used again
    fetched: int = 0  # bytes from other agents than its own, also in earlier attempts


def restore(
    live_state: LiveState,
    snapshots: SnapshotWriter,
    ranks: ReplicaGroup,
    checkpoints: Checkpoints,
    current: bool,
    journal: Journal,
    about: Recoverer,
) -> None:
    """Bring the live state, which is the initial one, to the newest that is found. A collective of all ranks.

    Blocks; each wait has a deadline.

    Args:
        live_state: With its initial state.
        snapshots: What this host's agent has.
        ranks: Of this replica.
        checkpoints: What durable storage has.
        current: Whether the agents keep every step; then those of a job that trains have what no checkpoint has.
        journal: This rank's events.
        about: The incarnation that is restored.

    Raises:
        ConfigError: There are checkpoints, but none that can be used.
    """
    _Restoration(live_state, snapshots, ranks, checkpoints, current, journal, about).run()


@dataclass(slots=True)
class _Restoration:
    """The course of one call of `restore`, on one rank; the first fields are its arguments."""

    _live: LiveState
    _snapshots: SnapshotWriter
    _ranks: ReplicaGroup
    _checkpoints: Checkpoints
    _current: bool
    _journal: Journal
    _about: Recoverer
    _began: float = field(default_factory=time.monotonic)
    _peers: tuple[_Peer, ...] = ()  # by rank
    _others_cut: OtherWidths = field(init=False)  # the same state, cut for other numbers of ranks
    _fetched: int = 0  # bytes, by this rank, in all attempts
    # On rank 0.
    _found: Holders | None = None
    _own: list[Holding] = field(
        default_factory=list
    )  # snapshots of this replica's ranks, each in its rank's agent
    _others: list[Holding] = field(default_factory=list)  # what all agents keep besides
    _asked: bool = False  # whether all agents had the time to answer
    _failed: set[Holding] = field(default_factory=set)

    def run(self) -> None:
        """Try what is in memory, newest first, and then the checkpoint; or the other way round."""
        self._peers = self._gather()
        self._others_cut = OtherWidths(self._live.layout, [peer.layout for peer in self._peers])
        if self._ranks.rank == 0:
            self._own = [h for rank, peer in enumerate(self._peers) for h in self._kept(rank, peer)]
            self._others = self._elsewhere(self._newest())
        read = False  # the checkpoint
        while True:
            plan, checkpoint_first = self._decide()
            if checkpoint_first and not read:
                self._from_checkpoint()
                read = True
            if plan is None or not state_id.newer(plan.state, self._now):
                break
            if self._from_memory(plan):
                return
        if not read:
            self._from_checkpoint()
        fetches = self._found is not None and self._found.stands  # from those that train: nothing is lost
        if self._now.step == 0 and self._about.number > 0 and not fetches:
            self._tell("initial", "no copy and no checkpoint was found", origin="initial")

    @property
    def _now(self) -> StateId:
        """The state that is held now."""
        assert self._live.state is not None
        return self._live.state

    # What is kept, and where.

    def _gather(self) -> tuple[_Peer, ...]:
        """Return what each rank's agent keeps."""
        layout = self._live.layout
        kept = tuple((snapshot.state, snapshot.settled) for snapshot in self._snapshots.list())
        mine = _Peer(self._about.host, self._snapshots.address, layout.fingerprint, layout.nbytes, kept)
        told = [json.loads(each) for each in self._ranks.gather(json.dumps(asdict(mine)).encode())]
        return tuple(
            _Peer(**{**each, "kept": tuple((StateId(**state), settled) for state, settled in each["kept"])})
            for each in told
        )

    def _kept(self, rank: int, peer: _Peer) -> list[Holding]:
        """Return the snapshots of a rank in its own agent."""
        size = len(self._peers)
        return [
            Holding(state, self._about.replica, rank, size, peer.layout, peer.host, peer.address, settled)
            for state, settled in peer.kept
        ]

    def _elsewhere(self, best: Recoverable | None) -> list[Holding]:
        """Return what other agents keep, if this replica needs it. On rank 0; blocks.

        While others train it does not: it would have to fetch what they have by then, anyway. Exits are reported a
        moment after they happen, so a replica that has no state of its own looks twice. Then its own hosts tell
        which copies they keep: those who train may end before it has fetched anything.
        """
        about = self._about
        found = about.holders(0.0 if best is not None or about.number == 0 else about.reach_s)
        if found is not None and best is None and about.number > 0:
            first, until = found.head, time.monotonic() + DOUBT_S
            while found.stands and found.head == first and time.monotonic() < until:
                time.sleep(LOOK_S)
                found = about.holders(0.0) or found
        self._found = found
        if found is None or found.stands or found.head is None:
            if found is not None and (best is not None or about.number == 0):
                return []
            # Its own hosts may have copies for each other, or shards of another number of ranks.
            return [h for h in self._ask(NOBODY, hurry=False) if h.replica == about.replica]
        if best is not None and not state_id.newer(found.head, best.state):
            return []
        return self._ask(found, hurry=True)

    def _ask(self, found: Holders, *, hurry: bool) -> list[Holding]:
        """Return what all agents keep that answer, besides the own snapshots of this replica's ranks. On rank 0.

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
        """Return whether a shard is one of this replica, as far as its width says. On rank 0."""
        size = len(self._peers)
        return row.ranks != size or (0 <= row.rank < size and row.layout == self._peers[row.rank].layout)

    def _ask_everybody(self) -> None:
        """Ask all agents once, with time to answer: a source has failed, and others may have the same shard."""
        found = self._found
        if not self._asked and found is not None and not found.stands and found.head is not None:
            self._others = self._ask(found, hurry=False)
            self._asked = True

    def _newest(self, others: Sequence[Holding] = ()) -> Recoverable | None:
        """Return the newest state of which every shard is in an agent and has not failed. On rank 0.

        Args:
            others: What is kept besides the own snapshots of this replica's ranks.
        """
        layouts, hosts = [p.layout for p in self._peers], [p.host for p in self._peers]
        found = [*self._own, *others]
        return newest(found, self._about.replica, layouts, hosts, self._failed, self._others_cut.of(found))

    def _decide(self) -> tuple[Recoverable | None, bool]:
        """Return the next state to try and each rank's sources, and whether the checkpoint is to be read first.

        Rank 0 decides, and tells the others. None: there is nothing more in memory.
        """
        decided: dict[str, Any] = {}
        if self._ranks.rank == 0:
            late = time.monotonic() - self._began > self._about.limit_s
            if self._failed and not late:
                self._ask_everybody()
            plan = None if late else self._newest(self._others)
            if plan is not None:
                plan = Recoverable(plan.state, tuple(map(self._chosen, plan.sources)))
            decided = {"plan": plan and asdict(plan), "checkpoint": self._checkpoint_is_newer(plan)}
        decided = json.loads(self._ranks.broadcast(json.dumps(decided).encode()))
        return _recoverable(decided["plan"]), bool(decided["checkpoint"])

    def _chosen(self, sources: Sequence[Holding]) -> tuple[Holding, ...]:
        """Return from which sources a rank takes its shard: its own agent, or the nearest of each replica.

        Of each part, if they are of another width.
        """
        nearest = sources[0]
        if self._is_own(nearest):
            return (nearest,)
        of_replica: dict[int, dict[int, Holding]] = {}
        for source in sources:
            of_replica.setdefault(source.rank, {}).setdefault(source.replica, source)
        return tuple(each for found in of_replica.values() for each in [*found.values()][:MAX_DONORS])

    def _is_own(self, holding: Holding) -> bool:
        """Return whether a shard is in the slots of its own rank."""
        if holding.replica != self._about.replica or holding.ranks != len(self._peers):
            return False
        return holding.address == self._peers[holding.rank].address

    def _checkpoint_is_newer(self, plan: Recoverable | None) -> bool:
        """Return whether a checkpoint has the name of a newer state than ``plan``. On rank 0.

        While others train nobody asks: what this replica has kept is only where it begins to catch up.
        """
        if plan is None or (self._current and (self._found is None or self._found.stands)):
            return False
        try:
            names = [path.name for path in catalog.published(self._checkpoints.folder)]
        except ConfigError:
            return True  # all ranks say so when they read it
        named = catalog.PUBLISHED.fullmatch(names[0]) if names else None
        return named is not None and (int(named[2]), int(named[1])) > (plan.state.commit_epoch, plan.state.step)

    # From memory.

    def _from_memory(self, plan: Recoverable) -> bool:
        """Load a state if every rank can verify its shard; return whether that was done."""
        rank = self._ranks.rank
        taken, outcome = self._take(plan.state, plan.sources[rank])
        told = [json.loads(each) for each in self._ranks.gather(json.dumps(asdict(outcome)).encode())]
        outcomes = [_Outcome(tuple(each["used"]), tuple(each["failed"]), each["fetched"]) for each in told]
        everywhere = all(each.used for each in outcomes)
        if everywhere:
            assert taken is not None
            self._live.load(taken.manifest, taken.packed)
            if rank == 0:
                self._restored(plan, outcomes)
        else:
            for sources, each in zip(plan.sources, outcomes, strict=True):
                self._failed.update(sources[index] for index in each.failed)
        self._snapshots.release_taken()
        return everywhere

    def _take(self, state: StateId, sources: Sequence[Holding]) -> tuple[_Taken | None, _Outcome]:
        """Verify this rank's shard of ``state``, from its own agent or from others. Blocks."""
        if self._is_own(sources[0]):
            found = self._snapshots.acquire(state)
            if found is None or found[0].layout != self._live.layout.fingerprint:
                return None, _Outcome(failed=(0,))
            return _Taken(*found), _Outcome((0,), fetched=self._fetched)
        return self._fetch(state, sources)

    def _fetch(self, state: StateId, sources: Sequence[Holding]) -> tuple[_Taken | None, _Outcome]:
        """Fetch and verify this rank's shard, into a slot of its own agent if there is one. Blocks."""
        layout, rank, ranks = self._live.layout, self._ranks.rank, self._ranks.size
        donors: dict[int, dict[Donor, int]] = {}  # by rank whose shard they have: the number of the source
        for index, source in enumerate(sources):
            donors.setdefault(source.rank, {})[Donor(source.replica, source.address)] = index
        failed: set[int] = set()

        def rejected(of: int, donor: Donor, why: str) -> None:
            failed.add(donors[of][donor])
            self._journal.event("FetchRejected", why, donor=donor.replica)

        slot = self._snapshots.allocate(state)
        try:
            packed = np.empty(layout.nbytes, dtype=np.uint8) if slot is None else slot
            got = reshape.fetch_shard(
                WantedShard(state, rank, ranks, layout),
                sources[0].ranks,
                {of: list(each) for of, each in donors.items()},
                packed.data,
                self._about.token,
                self._about.limit_s / 2,
                threading.Event(),
                rejected,
                awaited=False,
            )
        except (FtHsdpError, OSError, MemoryError, Uncuttable, fetch.NotFetched, fetch.Cancelled) as error:
            self._snapshots.release()
            if not failed:  # no donor alone is to blame
                why = str(error) or type(error).__name__
                self._journal.event("FetchRejected", why, donor=sources[0].replica)
            return None, _Outcome(failed=tuple(sorted(failed)) or tuple(range(len(sources))))
        if slot is not None:
            self._snapshots.complete(got.manifest)
        self._fetched += sum(got.given.values())
        by_source = {
            index: got.given.get((of, d.replica), 0) for of, each in donors.items() for d, index in each.items()
        }
        used = sorted((index for index, n in by_source.items() if n), key=lambda index: -by_source[index])
        return _Taken(got.manifest, packed), _Outcome(tuple(used) or (0,), tuple(sorted(failed)), self._fetched)

    def _restored(self, plan: Recoverable, outcomes: Sequence[_Outcome]) -> None:
        """Write down what was restored from memory, and from where. On rank 0."""
        pairs = zip(plan.sources, outcomes, strict=True)
        used = [[sources[index] for index in each.used] for sources, each in pairs]
        worst = rung(used, self._about.replica, [peer.host for peer in self._peers])
        reasons = {
            "agent": "the state agents of its hosts kept it",
            "copy": "state agents of other hosts kept a part of it",
            "replica": "state agents of other replicas kept a part of it",
        }
        self._tell(
            worst,
            reasons[worst],
            origin=worst,
            hosts={str(rank): holdings[0].host for rank, holdings in enumerate(used)},
            fetched=sum(each.fetched for each in outcomes),
            width=used[0][0].ranks,
        )

    # From a checkpoint.

    def _from_checkpoint(self) -> None:
        found = load_checkpoint(self._live, self._ranks, self._checkpoints)
        if found is not None and self._ranks.rank == 0:
            for passed in found.skipped:
                self._journal.event("CheckpointPassedOver", passed.reason, checkpoint=passed.name)
            nbytes = sum(peer.nbytes for peer in self._peers)
            self._tell("checkpoint", "newest valid checkpoint", origin=str(found.path), fetched=nbytes)

    def _tell(
        self,
        on: str,
        reason: str,
        origin: str,
        hosts: Mapping[str, str] | None = None,
        fetched: int = 0,
        width: int | None = None,
    ) -> None:
        """Write the recovery down, with the ``width`` of the shards that were used. On rank 0."""
        if self._ranks.rank != 0:
            return
        found, state = self._found, self._now
        lost = None
        if found is not None:
            lost = max(0, found.head.step - state.step) if found.head is not None and not found.stands else 0
        facts = {
            "step": state.step,
            "origin": origin,
            "rung": on,
            "number": self._about.number,
            "state": [state.commit_epoch, state.step, state.lineage],
            "ranks": len(self._peers),
            "hosts": {str(rank): peer.host for rank, peer in enumerate(self._peers)},
            "from": dict(hosts or {}),
            "bytes": fetched,
            "seconds": time.monotonic() - self._began,
            "lost_steps": lost,
            **({} if width in (None, len(self._peers)) else {"width": width}),
        }
        self._journal.event("StateRestored", reason, **facts)


def _holding(row: HeldShard, address: str, host: str) -> Holding:
    """Return what an agent has answered; ``host`` is where it stands."""
    try:
        host = str(Host.parse(host))
    except ValueError:
        host = plain(address)
    return Holding(row.state, row.replica, row.rank, row.ranks, row.layout, host, address, row.settled)


def _recoverable(told: Mapping[str, Any] | None) -> Recoverable | None:
    """Return what rank 0 has decided."""
    if told is None:
        return None
    sources = tuple(
        tuple(Holding(**{**each, "state": StateId(**each["state"])}) for each in of_rank)
        for of_rank in told["sources"]
    )
    return Recoverable(StateId(**told["state"]), sources)
