"""With which state a replica joins its job.

`Restoration.run` brings the live state to the newest one that can be had: from the memory of state agents, from a
checkpoint, or else the initial one. The ranks do it together, so that all of them load one state or none. Rank 0
decides, each rank takes its own shard:

    all ranks      what the agent of this rank's host has kept
    rank 0         if nobody else trains and the head is newer: what all other agents have kept;
                   while others train, if these agents have no whole state: what else they have kept
    rank 0         `KnownShards.newest`: the newest state of which every shard is in some agent
    each rank      verifies its shard: its own agent's, or one that it fetches into a slot of its own agent
    all ranks      load it if all have verified theirs; else rank 0 decides again, without the failed sources

So the rungs fall by themselves: own agent, a copy elsewhere, another replica, an older state, the checkpoint. A
snapshot is only made of a committed state, so shards of one state may come from several replicas. They may be
those of another number of ranks (`OtherWidths`): then each rank fetches parts of several.

A rank that is warm joins its job in this order; each step waits for the other ranks of the replica:

    RankRuntime       all that does not depend on the replica; a spare stops here until it is assigned
    begin, start      the incarnation: journal, state agent, the ring's listener
    restored          the newest state in memory or in a checkpoint
    check_in          the ranks compare what they are and hold (`check_claims`); the leader asks for the first step

The ranks of a replica that contradict each other do not join: another start may mend it (75).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeVar

import numpy as np
from pydantic import TypeAdapter

from ft_hsdp.core import state_id
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import ConfigError, FtHsdpError, Retryable
from ft_hsdp.jsonl import Journal
from ft_hsdp.memory.recovery import Holding, Recoverable, rung
from ft_hsdp.memory.replacement import RankClaim, disagreement
from ft_hsdp.state.checkpoint import catalog, checkpoint_manifest
from ft_hsdp.state.replica_group import ReplicaGroup
from ft_hsdp.state.shared_memory import Bytes
from ft_hsdp.state.transfer import fetch, reshape
from ft_hsdp.state.transfer.fetch import Donor
from ft_hsdp.state.transfer.parts import Uncuttable
from ft_hsdp.state.transfer.reshape import WantedShard
from ft_hsdp.state.transfer.shard_manifest import ShardManifest
from ft_hsdp.train.runtime import RankRuntime
from ft_hsdp.train.state.checkpointing import Checkpoints, load_checkpoint, missed
from ft_hsdp.train.state.known_shards import KnownShards, RankAgent, Recoverer
from ft_hsdp.train.state.live_state import LiveState
from ft_hsdp.train.state.snapshots import SnapshotWriter
from ft_hsdp.train.step_log import StepLog

MAX_DONORS = 4  # from which one rank fetches at once


T = TypeVar("T")
Taken = tuple[ShardManifest, Bytes]
"""A verified shard, not loaded yet."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    used: tuple[int, ...] = ()  # the sources that gave something, most first; (): the shard is not there
    failed: tuple[int, ...] = ()  # sources that must not be used again
    fetched: int = 0  # bytes from other agents than its own, also in earlier attempts


@dataclass(frozen=True, slots=True)
class _Decision:
    plan: Recoverable | None
    checkpoint_first: bool


_AGENT, _OUTCOME, _DECISION = TypeAdapter(RankAgent), TypeAdapter(_Outcome), TypeAdapter(_Decision)


@dataclass(eq=False, slots=True)
class Restoration:
    """How one rank comes from the initial state to the newest that is found."""

    _live: LiveState
    _snapshots: SnapshotWriter
    _ranks: ReplicaGroup
    _checkpoints: Checkpoints
    _current: bool  # the agents keep every step: those of a job that trains have what no checkpoint has
    _journal: Journal
    _about: Recoverer
    _began: float = field(default_factory=time.monotonic)
    _peers: tuple[RankAgent, ...] = ()  # by rank
    _known: KnownShards | None = None  # on rank 0
    _fetched: int = 0  # bytes, by this rank, in all attempts

    def run(self) -> None:
        """Try what is in memory, newest first, and then the checkpoint; or the other way round.

        A collective of all ranks. Blocks; each wait has a deadline.

        Raises:
            ConfigError: There are checkpoints, but none that can be used.
        """
        self._peers = self._gather()
        if self._ranks.rank == 0:
            self._known = KnownShards(self._about, self._peers, self._live.layout)
            self._known.ask()
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
        fetches = self._known is not None and self._known.others_train  # from those that train: nothing is lost
        if self._now.step == 0 and self._about.number > 0 and not fetches:
            self._tell("initial", "no copy and no checkpoint was found", origin="initial")

    @property
    def _now(self) -> StateId:
        assert self._live.state is not None
        return self._live.state

    # What is kept, and where.

    def _gather(self) -> tuple[RankAgent, ...]:
        layout = self._live.layout
        kept = tuple((snapshot.state, snapshot.settled) for snapshot in self._snapshots.list())
        mine = RankAgent(self._about.host, self._snapshots.address, layout.fingerprint, layout.nbytes, kept)
        return tuple(self._told(_AGENT, mine))

    def _told(self, kind: TypeAdapter[T], mine: T) -> list[T]:
        """Return what each rank has passed. A collective."""
        return [kind.validate_json(each) for each in self._ranks.gather(kind.dump_json(mine))]

    def _decide(self) -> tuple[Recoverable | None, bool]:
        """Return the next state to try and each rank's sources, and whether the checkpoint is to be read first.

        Rank 0 decides, and tells the others. None: there is nothing more in memory.
        """
        decided = _Decision(None, False)
        if (known := self._known) is not None:
            late = time.monotonic() - self._began > self._about.limit_s
            plan = None if late else known.newest()
            if plan is not None:
                plan = Recoverable(plan.state, tuple(map(self._chosen, plan.sources)))
            decided = _Decision(plan, self._checkpoint_is_newer(plan, known))
        decided = _DECISION.validate_json(self._ranks.broadcast(_DECISION.dump_json(decided)))
        return decided.plan, decided.checkpoint_first

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
        if holding.replica != self._about.replica or holding.ranks != len(self._peers):
            return False
        return holding.address == self._peers[holding.rank].address

    def _checkpoint_is_newer(self, plan: Recoverable | None, known: KnownShards) -> bool:
        """Return whether a checkpoint has the name of a newer state than ``plan``. On rank 0.

        While others train nobody asks: what this replica has kept is only where it begins to catch up.
        """
        if plan is None or (self._current and (known.holders is None or known.others_train)):
            return False
        try:
            names = [path.name for path in catalog.published(self._checkpoints.folder)]
        except ConfigError:
            return True  # all ranks say so when they read it
        named = checkpoint_manifest.PUBLISHED.fullmatch(names[0]) if names else None
        return named is not None and (int(named[2]), int(named[1])) > (plan.state.commit_epoch, plan.state.step)

    # From memory.

    def _from_memory(self, plan: Recoverable) -> bool:
        """Load a state if every rank can verify its shard; return whether that was done."""
        rank = self._ranks.rank
        taken, outcome = self._take(plan.state, plan.sources[rank])
        outcomes = self._told(_OUTCOME, outcome)
        everywhere = all(each.used for each in outcomes)
        if everywhere:
            assert taken is not None
            self._live.load(*taken)
            if rank == 0:
                self._restored(plan, outcomes)
        elif self._known is not None:
            for sources, each in zip(plan.sources, outcomes, strict=True):
                self._known.fail(sources[index] for index in each.failed)
        self._snapshots.release_taken()
        return everywhere

    def _take(self, state: StateId, sources: Sequence[Holding]) -> tuple[Taken | None, _Outcome]:
        """Verify this rank's shard of ``state``, from its own agent or from others. Blocks."""
        if self._is_own(sources[0]):
            found = self._snapshots.acquire(state)
            if found is None or found[0].layout != self._live.layout.fingerprint:
                return None, _Outcome(failed=(0,))
            return found, _Outcome((0,), fetched=self._fetched)
        return self._fetch(state, sources)

    def _fetch(self, state: StateId, sources: Sequence[Holding]) -> tuple[Taken | None, _Outcome]:
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
        return (got.manifest, packed), _Outcome(tuple(used) or (0,), tuple(sorted(failed)), self._fetched)

    def _restored(self, plan: Recoverable, outcomes: Sequence[_Outcome]) -> None:
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
            self._tell_changes()
            nbytes = sum(peer.nbytes for peer in self._peers)
            other = f"; other data, from their beginning: {found.other_data}" if found.other_data else ""
            self._tell("checkpoint", f"newest valid checkpoint{other}", origin=str(found.path), fetched=nbytes)

    def _tell_changes(self) -> None:
        step = self._now.step
        for change in self._live.changes:
            reason = (
                f"the script gives it so now, and the checkpoint of step {step} was written with the other value"
            )
            facts = {"setting": change.setting, "old": change.old, "new": change.new, "step": step}
            self._journal.event("SettingChanged", reason, **facts)

    def _tell(
        self,
        on: str,
        reason: str,
        origin: str,
        hosts: Mapping[str, str] | None = None,
        fetched: int = 0,
        width: int | None = None,
    ) -> None:
        if self._known is None:
            return
        holders, state = self._known.holders, self._now
        lost = None
        if holders is not None:
            lost = max(0, holders.head.step - state.step) if holders.head and not holders.stands else 0
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


def check_claims(ranks: ReplicaGroup, replica: int, mine: RankClaim) -> None:
    """Compare what the ranks of a replica are and hold. Blocks; a collective of all of them."""
    told = [json.loads(each) for each in ranks.gather(json.dumps(asdict(mine)).encode())]
    claims = [
        RankClaim(**{**each, "hosts": tuple(each["hosts"]), "state": StateId(**each["state"])}) for each in told
    ]
    wrong = disagreement(claims)
    if wrong:
        raise Retryable(f"the ranks of replica {replica} contradict each other: {wrong}")


def open_log(runtime: RankRuntime, warm: float) -> StepLog:
    """Open the files of a replica in the run's directory, and note when it was ready. On rank 0."""
    journal, identity, model = runtime.journal, runtime.identity, runtime.model
    journal.note(identity.began, "ReplicaBooted", "its processes know which replica they are")
    name = f"{type(model.model).__module__}.{type(model.model).__qualname__}"
    parameters = sum(p.numel() for p in model.params.values())
    why = "model, optimizer and process group are ready"
    journal.note(warm, "ReplicaWarmed", why, model=name, parameters=parameters, layout=model.layout)
    folder = runtime.place.run / "replicas" / str(identity.replica)
    return StepLog(folder, identity.incarnation, runtime.reporter.commit, journal.lost, runtime.reporter.log)


def restored(runtime: RankRuntime, checkpoints: Checkpoints) -> StateId:
    """Bring the live state, which is the initial one, to the newest one that can be had, and return it.

    A collective of the replica. Blocks.
    """
    config, identity, live_state = runtime.config, runtime.identity, runtime.live_state
    where = identity.replica, identity.restarts, identity.host, runtime.place.token
    timeouts = config.timeouts
    recoverer = Recoverer(*where, runtime.holders, timeouts.reach_s, timeouts.load_s / 2)
    memory = runtime.snapshots, runtime.ranks, checkpoints, config.state.snapshot == "every_step"
    Restoration(live_state, *memory, runtime.journal, recoverer).run()
    state = live_state.state
    assert state is not None
    runtime.snapshots.mark_current(state)
    runtime.copies.mark_current(state)
    return state


def check_in(runtime: RankRuntime, state: StateId, checkpoints: Checkpoints) -> None:
    """Join the job with a state. A collective; blocks until all ranks of the replica have checked in."""
    place, identity = runtime.place, runtime.identity
    wanted = 0
    if place.rank == 0:
        wanted = missed(runtime.config, checkpoints.folder, state.step, runtime.journal)
    mine = RankClaim(place.rank, place.ranks, identity.incarnation, identity.shared, identity.hosts, state)
    check_claims(runtime.ranks, identity.replica, mine)
    runtime.join(state, wanted)
