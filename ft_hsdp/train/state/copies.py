"""Copies of other hosts' shards: which of them this rank orders, its vote that waits for them, and what is told.

Every rank evaluates `memory.copies` on its grant, so all know the same plan. The first rank of each host orders
what its host has to keep: the state agent of that host fetches it from the owner's. No rank orders anything where
the healthy replicas are copies enough.

    control loop   configure       a new epoch has a plan of its own
                   give_up         a shard cannot be copied: no vote on this attempt waits for copies
                   settled         the commit says whether the state before it is kept in all promised places
    main thread    mark_current    a state is reached: its copies are ordered
    FTAR's thread  vote            vote once the copies of the state before are complete, or time is over

The wait for copies has a thread of its own, which begins with the first copy that is ordered. What the commit says
becomes an event when it changes: `Protected` or `Unprotected`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from ft_hsdp.core.commit import AttemptId, Vote
from ft_hsdp.core.grant import Grant
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import ConfigError
from ft_hsdp.jsonl import Journal
from ft_hsdp.memory.copies import MemberHosts, Refusal, unmet
from ft_hsdp.memory.schedule import CopyInterval, Profile
from ft_hsdp.state.agent.messages import KeepCopy, OweCopies
from ft_hsdp.state.pacing import MAX_SPANS, PROFILED, SpanMeter
from ft_hsdp.train.state.copy_plan import CopyPlan, CopyPlanner, hosts_of
from ft_hsdp.train.state.snapshots import SnapshotWriter

WAIT_S = 2.0  # default of the longest wait of a vote, and
BYTES_PER_S = 1e9  # the time that it waits longer, to move the copies
FAILURES = 3  # fetches of a shard that fail in a row until another host is to keep it; one may be an accident
TOLD_HOSTS = 64  # that one event names
LOOK_S = 0.1  # between two looks whether a wait is still of use


@dataclass(frozen=True, slots=True)
class CopyCost:
    waited_s: float = 0.0  # by the vote that waited longest
    nbytes: int = 0  # that the replica's hosts have copied
    step_s: float = 0.0  # from the votes before to these; 0: not known
    late: bool = False  # copies were still under way when the wait of a vote ran out


@dataclass(eq=False)
class CopyKeeper:
    """Orders the copies that this rank's host owes, and holds its votes back for them. Thread-safe."""

    _planner: CopyPlanner
    _replicas: int  # with which the job begins; all their hosts together have to be enough
    _agent: SnapshotWriter
    _journal: Journal
    _wrong: Callable[[ConfigError], None]  # takes the error of a configuration that this job's hosts cannot meet
    # Whether no incarnation of this replica came before. A later one may have fewer hosts than the job began
    # with: an explicit number of copies that they cannot hold ends nothing then.
    first_life: bool = True
    _grant: Grant | None = None  # of this epoch
    _refusals: tuple[Refusal, ...] = ()  # that commits told, in their order; the same on all ranks
    # By shard the newest state of which it could not be copied, and how many in a row there were.
    _failures: dict[tuple[int, int], tuple[StateId, int]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)  # of what follows
    _plan: CopyPlan | None = None
    _state: StateId | None = None  # that this rank holds
    # Shards for which the agent had no room, with the state and the reason.
    _refused: dict[tuple[int, int], tuple[StateId, str]] = field(default_factory=dict)
    _missing: bool = False  # whether copies of the last state that was waited for were missing
    _given_up: AttemptId | None = None
    _counted: StateId | None = None  # whose bytes are counted
    _cost: CopyCost = field(default_factory=CopyCost)
    _keepers: dict[str, str] = field(default_factory=dict)  # which shards each host keeps, as it was told last
    _said: bool | None = None  # whether the state is protected, as far as this replica has told it
    _thread: ThreadPoolExecutor | None = None

    def __post_init__(self) -> None:
        config = self._config = self._planner.config
        self._replica, self._rank = self._planner.replica, self._planner.rank
        self._interval = CopyInterval.of(config.every)  # changed by a commit alone: the same on all ranks
        self._checked = config.copies in (None, 1) or not self.first_life

    # The control loop.

    def configure(self, grant: Grant) -> None:
        """Take the plan of a new epoch, and order the copies of the present state. Does not block."""
        members = hosts_of(grant) if self._planner.copied else ()
        ranks = len(self._planner.shards)
        whole = len(members) >= self._replicas and all(len(member.hosts) == ranks for member in members)
        if members and whole and not self._checked:
            self._check(members)
        self._grant = grant
        plan = self._planner.plan(grant, members, self._refusals)
        if plan.foreign and self._interval.every != self._config.every:
            self._interval = CopyInterval.of(self._config.every)
            if self._rank == 0:
                why = "hosts of another replica keep copies, so all replicas copy the same states"
                self._journal.event("CopiesSlowed", why, every=self._interval.every, over=True)
        before, state = self._take(plan, grant.base)
        made = set(before.whole.copies) if before is not None else set()
        if before is not None and plan.speaks and self._said is not False and set(plan.whole.copies) - made:
            self._say(False, plan, f"replica {self._replica} begins to copy what the others held")
        if state is not None:
            self._order(plan, state)

    def _take(self, plan: CopyPlan, since: StateId) -> tuple[CopyPlan | None, StateId | None]:
        with self._lock:
            before, self._plan = self._plan, plan
            state = self._state
        # An earlier process of this rank may have ordered others.
        if before is None or plan.orders.keys() != before.orders.keys():
            self._agent.order(OweCopies(tuple(sorted(plan.orders)), since))
        keepers = plan.keepers(self._replica)
        if self._rank == 0 and keepers != self._keepers:
            told = dict(list(keepers.items())[:TOLD_HOSTS])
            why = f"plan of epoch {plan.epoch}"
            self._journal.event("CopiesPlanned", why, hosts=len(keepers), keeps=told)
        self._keepers = keepers
        return before, state

    def give_up(self, fence: AttemptId) -> None:
        """Note that a shard cannot be copied: the state will not be kept everywhere, so no vote waits for it."""
        with self._lock:
            self._given_up = fence

    @property
    def sources(self) -> bool:
        plan = self._plan
        return plan is not None and any(copy.replica == self._replica for copy in plan.whole.copies)

    def settled(
        self, state: StateId, everywhere: bool, cost: CopyCost, refused: Sequence[tuple[int, int]] = ()
    ) -> bool:
        """Take what a commit says of the state before it; on rank 0 it is told when it has changed.

        If copies hold up the steps, or are never complete, fewer states are copied from now on. This does not hold
        if hosts of another replica keep some: only this replica knows what this commit says, and it would settle
        states that those do not copy. A copy whose holder refuses it moves to another host from the next state on.

        Args:
            everywhere: Whether it is kept in all promised places.
            refused: The rank of each shard that a host does not keep, and the rank of that host that said so.

        Returns:
            Whether it says something of the snapshots, too. With `memory.every` it does not of states that are not
            copied: the snapshots of the last one that was stay, beside the newest ones.
        """
        with self._lock:
            plan = self._plan
            self._cost = CopyCost(self._cost.waited_s + cost.waited_s, self._cost.nbytes + cost.nbytes)
        if plan is None:
            return True
        counts = not plan.whole.copies or self._due(plan, state)
        if refused:
            self._move(plan, state, refused)
        if plan.lacks:
            if plan.speaks:
                self._say(False, plan, plan.lacks)
        elif everywhere:
            part = f" that replica {self._replica} has to keep" if plan.foreign else ""
            self._say(True, plan, f"all shards of step {state.step}{part} are in memory")
        elif counts:
            self._say(False, plan, f"not all shards of step {state.step} were in memory in time")
        if counts and plan.whole.copies and cost.step_s and not plan.foreign:
            self._space(cost)
        return counts

    def _move(self, plan: CopyPlan, state: StateId, refused: Sequence[tuple[int, int]]) -> None:
        """Plan anew without the holders that refuse copies. What they keep stays until the new plan is settled."""
        grant = self._grant
        members = hosts_of(grant) if grant is not None else ()
        mine = next((member for member in members if member.replica == self._replica), None)
        if grant is None or mine is None:
            return
        told = (Refusal(self._replica, rank, mine.hosts[voter].name) for rank, voter in refused)
        new = tuple(refusal for refusal in told if refusal not in self._refusals)
        if not new:
            return
        self._refusals += new
        moved = self._planner.plan(grant, members, self._refusals)
        self._take(moved, state)
        old, now = plan.whole.copies, moved.whole.copies
        gone = [copy for copy in old if copy not in now] if self._rank == 0 else []  # both by rank
        came = [copy for copy in now if copy not in old] if self._rank == 0 else []
        for before, after in zip(gone, came, strict=True):
            why = f"host {before.holder.name} does not keep it"
            self._journal.event("CopyMoved", why, shard=after.rank, holder=after.holder.name)

    def _space(self, cost: CopyCost) -> None:
        """Choose how many states are copied, from what the copies of one have cost."""
        before = self._interval
        self._interval = before.after(cost.waited_s, cost.step_s, late=cost.late)
        every = self._interval.every
        if self._rank:
            return
        why = f"a step of {cost.step_s:.3g} s waited {cost.waited_s:.3g} s for the copies of a state"
        if cost.late:
            why += ", which were not complete then"
        if every != before.every:
            self._journal.event("CopiesSlowed", why, every=every, over=every < before.every)

    # The main thread.

    def mark_current(self, state: StateId) -> None:
        with self._lock:
            self._state, plan = state, self._plan
        if plan is not None:
            self._order(plan, state)

    def cost(self) -> CopyCost:
        with self._lock:
            cost, self._cost = self._cost, CopyCost()
        return cost

    def close(self) -> None:
        with self._lock:
            self._plan, thread = None, self._thread
        if thread is not None:
            thread.shutdown(wait=True)

    # The thread that votes.

    def vote(self, vote: Vote, state: StateId, send: Callable[[Vote], None]) -> None:
        """Send a vote when the copies of ``state`` that this rank owes are complete; it says whether they are.

        All orders of the writer are carried out by then. Does not block: what waits has a thread of its own.
        """
        own = self._agent.keeps(state)
        with self._lock:
            plan = self._plan
            if own and plan is not None and plan.orders and self._due(plan, state):
                self._thread = self._thread or ThreadPoolExecutor(1, "copies")
                try:
                    self._thread.submit(self._wait, plan, vote, state, send)
                except RuntimeError:  # the host has no thread left; without its vote the step would stop
                    self._thread.shutdown(wait=False, cancel_futures=True)
                    self._thread = None
                    send(replace(vote, kept=False))
                return
        if plan is None or not plan.whole.copies:
            send(replace(vote, kept=own))
        elif self._due(plan, state):
            send(replace(vote, kept=own, left_out=plan.source and not own))
        else:
            send(vote)  # only states that are copied are settled

    def _wait(self, plan: CopyPlan, vote: Vote, state: StateId, send: Callable[[Vote], None]) -> None:
        """Send a vote once the copies of ``state`` are complete, or it is clear that they will not be in time."""
        began = now = time.monotonic()
        until = began + self._patience_s(plan)
        owed = plan.orders
        why, late = "", False
        complete: set[tuple[int, int]] = set()
        lasting: set[tuple[int, int]] = set()  # that this host will not keep, as far as it knows
        while True:
            with self._lock:
                over = self._plan is not plan or self._given_up == vote.fence
                known = {shard: self._refused[shard] for shard in owed if shard in self._refused}
            refused = {shard: reason for shard, (of, reason) in known.items() if of == state}
            if over or refused:
                why = "" if over else next(iter(refused.values()))
                break
            look_s = max(0.0, min(LOOK_S, until - now))
            found = self._agent.copied(state, look_s)
            ended, now = time.monotonic() - now < look_s, time.monotonic()  # no copy is under way any more
            if found is None:
                why = "there is no state agent"
                break
            for lost in found.damaged:
                reason = f"the copy of rank {lost.rank} of replica {lost.replica} is damaged: {lost.reason}"
                self._journal.event("SnapshotCorrupt", reason, step=lost.state.step)
            complete = owed.keys() & set(found.complete)
            if complete == owed.keys():
                break
            if found.failed or ended or now >= until:
                late = not found.failed and not ended
                lasting = self._lasting(owed.keys() & {(each.replica, each.rank) for each in found.failed}, state)
                why = found.failed[0].reason if found.failed else f"not here within {now - began:.1f} s"
                break
        kept = complete == owed.keys()
        for shard in complete:
            self._failures.pop(shard, None)
        lasting |= refused.keys()
        with self._lock:
            nbytes = sum(owed[shard][0].nbytes for shard in complete) if self._counted != state else 0
            self._counted = state
            first = bool(why) and not self._missing
            if kept or why:
                self._missing = bool(why)
        if first:
            short = sorted(owed.keys() - complete)
            self._journal.event("CopyMissing", why, step=state.step, shards=[list(shard) for shard in short])
        told = tuple(sorted(rank for replica, rank in lasting if replica == self._replica))
        refused_by = () if over else told
        send(replace(vote, kept=kept, waited_s=now - began, copied=nbytes, late=late, refused=refused_by))

    def _lasting(self, failed: Collection[tuple[int, int]], state: StateId) -> set[tuple[int, int]]:
        """Count the fetches that have failed, and return those of which so many in a row have that it may last."""
        for shard in failed:
            before, count = self._failures.get(shard, (None, 0))
            self._failures[shard] = state, count + (before != state)
        return {shard for shard in failed if self._failures[shard][1] >= FAILURES}

    def _patience_s(self, plan: CopyPlan) -> float:
        if self._config.wait_s is not None:
            return self._config.wait_s
        nbytes = sum(shard.nbytes for shard, _ in plan.orders.values())
        return min(WAIT_S + nbytes / BYTES_PER_S, self._planner.limit_s / 2)

    # Any thread.

    def _due(self, plan: CopyPlan, state: StateId) -> bool:
        return self._interval.due(state.step) or state == plan.base

    def _order(self, plan: CopyPlan, state: StateId) -> None:
        if not self._due(plan, state):
            return
        for index, (shard, address) in plan.orders.items():
            wanted, limit_s = replace(shard, state=state), self._planner.limit_s
            order = KeepCopy(wanted, (address,), limit_s, self._config.budget, index[0])
            self._agent.keep(order, state.step, self._refusal(index, state))

    def _refusal(self, shard: tuple[int, int], state: StateId) -> Callable[[str], None]:
        def refused(reason: str) -> None:
            with self._lock:
                self._refused[shard] = state, reason

        return refused

    def _check(self, members: tuple[MemberHosts, ...]) -> None:
        """Compare an explicit number of copies with the hosts of the whole job, once, as it begins.

        What is lost later is said (`Unprotected`), and ends nothing: a job that is less safe is better than none.
        """
        self._checked = True
        wanted = self._config.copies
        assert wanted is not None
        if allowed := unmet(members, wanted, self._config.apart, self._planner.room):
            self._wrong(ConfigError("memory.copies", wanted, allowed))

    def _say(self, protected: bool, plan: CopyPlan, why: str) -> None:
        """Write down whether the state is protected, if that has changed.

        At first the replica with the lowest id says so for all of them, and the others only if it is not so.
        """
        before, self._said = self._said, protected
        silent = before is None and protected and not plan.speaks
        if self._rank != 0 or before == protected or silent:
            return
        if protected:
            self._journal.event("Protected", why, copies=plan.copies, apart=self._config.apart)
        else:
            self._journal.event("Unprotected", why, apart=self._config.apart)


@dataclass(eq=False)
class SpanWatch:
    """Watches when one rank's network is idle while copies of its replica's shards are made, for the state agent.

    Three parts of a rank communicate: FSDP2 inside the replica, forward and backward (`fsdp.param_groups.watch`);
    FTAR's ring, from the first bucket to the last one (`gradients.Reducer`); and the control loop, whose messages
    are too small to count. The first two tell a `SpanMeter`, and the gate at the agent opens, as long as the
    hosts of its replica owe copies. Otherwise nothing is watched, and there is no gate.
    """

    # Has a meter told of each communication inside the replica; with None no meter any more.
    _watch: Callable[[SpanMeter | None], None]
    _agent: SnapshotWriter
    _journal: Journal
    _wanted: bool = False
    _planned: bool | None = None  # as it was told last

    def __post_init__(self) -> None:
        self.meter = SpanMeter(self._found)

    def want(self, wanted: bool) -> None:
        """Watch from now on, or do not. On the control loop; does not block."""
        if wanted == self._wanted:
            return
        self._wanted = wanted
        if wanted:
            self._watch(self.meter)
            self._agent.open_gate(self.meter.attach)
        else:
            self._watch(None)
            self.meter.detach()
            self._planned = None
            self._agent.close_gate()

    def step(self, step: int) -> None:
        """Note that the live state is that of ``step``. On the main thread."""
        if self._wanted:
            self.meter.step(step)

    def _found(self, profile: Profile, planned: bool) -> None:
        """Tell how copies leave when that has changed. On the main thread."""
        if planned == self._planned:
            return
        self._planned = planned
        idle_s = sum(profile.spans)
        deviation = f"{100 * profile.deviation:.0f} %" if profile.spans else "not known"
        if planned:
            why = f"{len(profile.spans)} idle spans of {PROFILED} steps are steady ({deviation} deviation)"
        elif profile.steady:
            why = f"a step has {len(profile.spans)} idle spans, more than the {MAX_SPANS} of the largest plan"
        else:
            why = f"the idle spans of {PROFILED} steps are not steady ({deviation} deviation)"
        self._journal.event("CopiesPaced", why, planned=planned, spans=len(profile.spans), idle_s=round(idle_s, 6))
