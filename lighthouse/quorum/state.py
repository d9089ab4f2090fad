"""What the lighthouse knows (`LighthouseState`), and the changes of it that several decisions share.

All times are seconds on the lighthouse's own clock, which never jumps; they come with the events. Everything here
is immutable: a function returns a changed copy. `lighthouse.store` lists the fields that must outlive the
lighthouse, so the names of those fields are keys of its rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ft_hsdp.core import state_id
from ft_hsdp.core.grant import Answer, Continue, Grant, Holders, Hosts, Member, Report, paths
from ft_hsdp.core.state_id import StateId
from ft_hsdp.core.units import EACH_ITS_BATCH, UnitPolicy
from lighthouse.placement.state import (
    NOBODY_HEARD,
    NOTHING_PLACED,
    PlacedReplica,
    Placement,
    PlacementPolicy,
    Presence,
    ReplicaPhase,
)
from lighthouse.placement.state import remembered as placed
from lighthouse.quorum import rules
from lighthouse.quorum.events import Effect, Note, OpenRequest, Reply
from lighthouse.quorum.rules import (
    NO_EDGES,
    AdmittedIncarnation,
    Base,
    Edges,
    Epoch,
    Incarnation,
    Spread,
    replace,
)
from lighthouse.quorum.units import apportion


@dataclass(frozen=True, slots=True)
class Policy:
    """What the operator chose, from the configuration of the job."""

    slots: int  # ids of replicas are below this
    steps: int  # of the whole job
    replicas: int | None = None  # how many of the slots the job begins with; None: all
    min_replicas: int = 1  # fewer contributors than this make no step
    suspect_grace_s: float = 0.2  # a round waits this long for a silent member that another one suspects
    silence_grace_s: float = 1.0  # and this long for any other silent member
    evict_s: float = 10.0  # a member that is silent for this long while its ring is broken is killed
    start_wait_s: float | None = None  # longest wait for all replicas before the first epoch; None: for ever
    final_wait_s: float = 120.0  # longest wait for the others once one replica has the final state
    return_wait_s: float = 120.0  # after an exit its replica may come back with its state for this long
    on_lost_head: Literal["wait", "halt", "rollback"] = "halt"  # if no copy of the newest committed state is left
    edge_wait_s: float = 30.0  # first pause of a replica that is left out for its failed connections
    on_divergence: Literal["halt", "checkpoint"] = "halt"  # if states differ and no majority tells which is right
    on_culprit: Literal["tell", "evict"] = "tell"  # if a diagnosis names one replica that keeps the job waiting
    on_straggler: Literal["tell", "demote"] = "tell"  # if a replica is much slower than the others
    units: UnitPolicy = EACH_ITS_BATCH  # how the units of a step are shared out
    placing: PlacementPolicy | None = None  # where replicas run that have no supervisor; None: none is placed


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all replicas of a job share; a field is None until a replica or the lighthouse has set it."""

    config_hash: str | None = None
    layout: str | None = None
    numerics: str | None = None
    rules: tuple[tuple[str, str], ...] = ()  # (dotted key, value as JSON text)
    frozen: str | None = None
    data: tuple[tuple[str, str], ...] = ()  # (fact about the data, value)


@dataclass(frozen=True)  # without slots: see `rules.replace`
class View:
    """What is known of one replica."""

    incarnation: str | None = None  # its newest one
    down: bool | None = None  # whether no process of it runs; None: neither it nor a supervisor has said
    lost: bool = False  # its supervisor has given it up
    ended: bool = False  # its script has ended its part of the job
    ask: OpenRequest | None = None  # its open request
    fetching: bool = False  # it was told to fetch a state without a ring, and has not asked since
    claim: StateId | None = None  # what it reported above the head
    doubted: StateId | None = None  # what it reported and was not believed (`witnesses`)


@dataclass(frozen=True)
class LighthouseState:
    """All that the lighthouse knows; `lighthouse.store` says which fields are durable."""

    policy: Policy
    term: int  # one life of the lighthouse; it grows with each
    views: tuple[View, ...]  # by replica id
    target: int  # how many replicas the operator wants: those with lower ids

    # What has been committed and granted.
    fresh: bool = True  # no grant yet, or none since the store was found to be an older copy
    head: StateId | None = None  # the highest committed state reported, unless it was lost; None: step 0
    epoch: int = 0  # the highest epoch that was granted or reported; the next grant is above it
    epochs: tuple[Epoch, ...] = ()  # granted epochs whose members may know a state above the head
    exited: frozenset[Incarnation] = frozenset()  # known to have exited; `transition` bounds the set
    grant: Grant | None = None  # the current membership

    # The current membership and the round for the next one.
    settled: int = 0  # the grant stands for the requests of all steps up to this one
    broken: bool = False  # the ring of the grant is lost, a round is due
    since: float | None = None  # when the round began; None: there is none
    last_exit: float = 0.0  # when an exit was reported last

    # The end of the job.
    final_since: float | None = None  # when the first replica was seen with the final state
    finished: bool = False  # every replica had the final state, or the wait for the rest is over
    halted: str = ""  # why the job was halted; "": it was not
    diverged: tuple[int, ...] = ()  # replicas that hold different states, which halts the job

    # What operators ordered.
    drained: frozenset[int] = frozenset()  # replicas that must stay away although they are below `target`
    checkpoint: int = 0  # a state of this step or a later one is to be written on demand; 0: none is

    # Connections that fail, and epochs that make no step.
    edges: Edges = NO_EDGES
    fruitless: int = 0  # epochs granted since the last committed step

    # Incarnations.
    lives: tuple[AdmittedIncarnation, ...] = ()  # the newest incarnations that were admitted
    agreed: Agreement | None = None  # what the members of the first grant had in common
    admissions: int = 0  # numbers of new incarnations are above this
    spread: tuple[Spread, ...] = ()  # living ones that no supervisor watches; not durable: machines repeat it

    # Where replicas run that have no supervisor: `lighthouse.placement`.
    placement: Placement = NOTHING_PLACED
    presence: Presence = NOBODY_HEARD  # not durable: hosts repeat it

    # After states differed and `Policy.on_divergence` is "checkpoint".
    rewound: tuple[int, ...] = ()  # by replica: incarnations up to this number must end and drop their copies
    rewinding: bool = False  # there is no grant to later incarnations yet

    @staticmethod
    def empty(policy: Policy, term: int) -> LighthouseState:
        """Return the state of a lighthouse with ``policy`` that begins with ``term`` and has granted nothing."""
        target = policy.slots if policy.replicas is None else policy.replicas
        return LighthouseState(policy, term, (View(),) * policy.slots, target)


def remembered(s: LighthouseState, halted: bool = False) -> LighthouseState:
    """Return a state from the store as it counts after a restart of the lighthouse, whose clock is another one.

    An end is told once, so the store says which replicas had ended. It does not where all that may live are heard
    first (`begin_anew`): later incarnations may run, of which it knows nothing.

    Args:
        s: What is durable.
        halted: The job was halted, and is tried once more.
    """
    placement = placed(s.placement, s.policy.placing, halted)
    s = replace(s, edges=rules.remembered(s.edges), placement=placement)
    if s.fresh and s.epoch:
        return s
    newest = {each.replica: each.incarnation for each in s.lives}  # the newest one of a replica is its last
    shadows = {me.incarnation for _, me in placement.shadows}
    views = []
    for replica in range(s.policy.slots):
        me = placement.replicas[replica] if replica < len(placement.replicas) else PlacedReplica()
        over = (replica, newest.get(replica, "")) in s.exited
        if me.incarnation:
            over = me.phase is ReplicaPhase.RESTS and (bool(me.given_up) or me.incarnation not in shadows)
        ended = over and me.done and not me.given_up
        views.append(View(down=over or None, lost=ended or bool(me.given_up), ended=ended))
    return replace(s, views=tuple(views))


# The next state, and what the caller must do once it is durable.
Step = tuple[LighthouseState, tuple[Effect, ...]]


def with_view(s: LighthouseState, replica: int, **changes: object) -> LighthouseState:
    """Return ``s`` with ``changes``, fields by name, in the `View` of one ``replica``."""
    views = list(s.views)
    views[replica] = replace(views[replica], **changes)  # type: ignore[arg-type]
    return replace(s, views=tuple(views))


def raise_head(s: LighthouseState, state: StateId) -> LighthouseState:
    """Return ``s`` with ``state`` as the head if it is newer, and without the epochs that no longer matter for it.

    The decision made now may be what commits it. The initial state is never the head.
    """
    if s.head is not None and not state_id.newer(state, s.head):
        return s
    if s.head is None and state.step == 0:
        return s
    keep = tuple(e for e in s.epochs if s.head is None or e.number >= s.head.commit_epoch)
    return replace(s, head=state, epochs=keep, fruitless=0)


def store_behind(s: LighthouseState, report: Report) -> bool:
    """Return whether by a replica's ``report`` the store is an older copy, of an older membership or term."""
    grant = s.grant
    return grant is not None and (max(report.epoch, report.after) > grant.epoch or report.max_term > s.term)


def begin_anew(s: LighthouseState, report: Report) -> tuple[LighthouseState, Note]:
    """Return the state without grants, because by ``report`` the store is an older copy.

    What was granted since then is unknown. As with an empty store, every replica that may live is heard before the
    next epoch (`membership.hold_round`). Exits and the head are facts and stay; what the store said of replicas
    (`remembered`) does not. `transition` raises the term and the epoch above all that a member may have seen.
    """
    assert s.grant is not None
    newest = max(report.epoch, report.after)
    why = (
        f"the store is an older copy: it knows epoch {s.grant.epoch} of term {s.grant.term}, replica "
        f"{report.replica} knows epoch {newest} of term {report.max_term}; every replica that may live is heard "
        "before the next epoch"
    )
    facts = {
        "replica": report.replica,
        "epoch": newest,
        "term": report.max_term,
        "store_epoch": s.grant.epoch,
        "store_term": s.grant.term,
    }
    views = tuple(view if view.incarnation is not None else View() for view in s.views)
    s = replace(s, fresh=True, grant=None, epochs=(), settled=0, broken=False, since=None, views=views)
    return s, Note("StoreBehind", why, facts)


def member(request: OpenRequest, base: Base) -> Member:
    """Return the entry of the replica of an open ``request`` in a grant on ``base``, which decides its role."""
    report = request.report
    role = rules.role(report, base)
    addresses = (request.ring, request.state)
    return Member(report.replica, report.incarnation, role, *addresses, report.number, hosts=request.hosts)


def new_epoch(
    s: LighthouseState, base: Base, members: tuple[Member, ...], why: str, refill: bool
) -> tuple[LighthouseState, tuple[Note, ...]]:
    """Grant the next epoch: number the membership, remember it and make it the current one.

    A committed step in the epoch that ends clears the failures of its edges. The ring is ordered so that
    replicas that cannot connect are no neighbours, where that is possible.

    Args:
        s: What the lighthouse knows.
        base: The state that the epoch builds on.
        members: The members in any order.
        why: Why the membership changed, for humans.
        refill: Whether members that stay may take more units in the first step than they were to take before.

    Returns:
        The state with the grant, of which no member has been told yet, and the events for the journal.
    """
    ended = s.grant
    if ended is not None and progressed(s):
        s = replace(s, edges=rules.without_failures(s.edges, ended.ring))
    ring = rules.arrange(members, s.edges.avoided)
    grant = rules.grant(s.term, s.epoch + 1, base, ring, total(s, len(members)), why)
    grant = apportion(grant, ended, s.policy.units, refill)
    grant = replace(grant, reason=rules.describe(grant.members, base.state, why))
    if base.state.step > 0 and (s.head is None or state_id.newer(base.state, s.head)):
        s = raise_head(s, base.state)
    epoch = Epoch(grant.epoch, tuple((m.replica, m.incarnation) for m in grant.members), base.state)
    s = replace(
        s,
        epoch=grant.epoch,
        epochs=rules.merged((*s.epochs, epoch), s.exited),
        grant=grant,
        fresh=False,
        broken=False,
        since=None,
        settled=base.state.step + 1,
        fruitless=s.fruitless + 1,
    )
    facts: dict[str, object] = {
        "term": grant.term,
        "epoch": grant.epoch,
        "step": base.state.step + 1,
        "base": [base.state.commit_epoch, base.state.step, base.state.lineage],
        "members": list(grant.ring),
        "total": grant.total,
        "roles": {str(m.replica): m.role for m in grant.members},
        "units": {str(m.replica): m.units for m in grant.members if m.role == "contribute"},
        "units_wanted": grant.units,
    }
    known = {m.replica: m.hosts for m in ended.members} if ended else {}
    hosts = {str(m.replica): m.hosts for m in grant.members if m.hosts != known.get(m.replica, ())}
    facts |= {"hosts": hosts} if hosts else {}
    notes = [Note("EpochGranted", grant.reason, facts)]
    taken = sum(m.units for m in grant.members if m.role == "contribute")
    if s.policy.units.batch == "constant" and taken < grant.units:
        most = s.policy.units.max_accumulate
        cap = f"a rank trains at most {most} micro-batches (quorum.max_accumulate)"
        if grant.units - taken < min((len(m.ring) for m in grant.members if m.role == "contribute"), default=0):
            cap = f"{grant.units - taken} units are too few for one more micro-batch of each rank of a replica"
        counts = {"epoch": grant.epoch, "step": base.state.step + 1, "units": taken, "units_wanted": grant.units}
        notes.append(Note("BatchReduced", cap, counts))
    return s, tuple(notes)


def progressed(s: LighthouseState) -> bool:
    """Return whether a step was committed in the current epoch."""
    return s.grant is not None and s.head is not None and s.head.commit_epoch >= s.grant.epoch


def answer(s: LighthouseState, answers: Mapping[int, Answer]) -> Step:
    """Return the state without the open requests that get ``answers``, by replica, and the replies."""
    replies: list[Effect] = []
    for replica, answer in answers.items():
        ask = s.views[replica].ask
        if ask is not None:
            replies.append(Reply(replica, ask.id, answer))
            s = with_view(s, replica, ask=None)
    return s, tuple(replies)


def alive(s: LighthouseState, incarnation: Incarnation) -> bool:
    """Return whether this incarnation is not known to have exited. Silence does not count."""
    return incarnation not in s.exited


def wanted(s: LighthouseState, replica: int) -> bool:
    """Return whether ``replica`` is to take part: it is below the target and not drained."""
    return replica < s.target and replica not in s.drained


def total(s: LighthouseState, members: int) -> int:
    """Return how many replicas the contributors are a share of: the target, or ``members`` if those are more."""
    return max(s.target, members)


def away(s: LighthouseState, replica: int) -> bool:
    """Return whether ``replica`` is not wanted and has left.

    It is not started again until it is wanted, so neither a round nor the end of training waits
    for it.
    """
    view = s.views[replica]
    left = s.grant is not None and s.grant.member(replica, view.incarnation or "") is None
    return not wanted(s, replica) and view.ask is None and (view.down is not False or left)


def is_placed(s: LighthouseState, replica: int) -> bool:
    """Return whether `lighthouse.placement` has started processes of a replica that are not known to be gone."""
    known = s.placement.replicas
    return bool(known) and known[replica].phase is not ReplicaPhase.RESTS


def training_is_over(s: LighthouseState) -> bool:
    """Return whether the head is the final state."""
    return s.head is not None and s.head.step >= s.policy.steps


def answer_settled(s: LighthouseState) -> Step:
    """Return the replies to every open request that the current membership settles; there is a grant.

    A member that does not know the grant yet gets the grant; one that asks for a settled step gets `Continue`.
    Members that report its ring as broken or that have the final state keep waiting.
    """
    assert s.grant is not None
    answers: dict[int, Answer] = {}
    for replica, view in enumerate(s.views):
        if view.ask is None or s.grant.member(replica, view.incarnation or "") is None:
            continue
        report = view.ask.report
        if report.after >= s.grant.epoch or report.state.step >= s.policy.steps:
            continue
        if report.epoch < s.grant.epoch:
            answers[replica] = s.grant
        elif report.step <= s.settled:
            answers[replica] = continue_grant(s, report)
    return answer(s, answers)


def continue_grant(s: LighthouseState, report: Report) -> Continue:
    """Return the answer that the current grant stands for the step that a member's ``report`` asks for."""
    assert s.grant is not None
    return Continue(s.grant.epoch, report.step, not wanted(s, report.replica), s.checkpoint)


StateAgents = tuple[tuple[str, ...], Hosts]
"""The addresses of the state agents of a replica, of each rank, and its hosts."""


def holders(
    s: LighthouseState, replica: int | None = None, heard: Mapping[int, StateAgents] | None = None
) -> Holders:
    """Return what a ``replica`` that recovers, and of which nothing runs any more, has to know.

    No agent is named after states differed and no majority told which is right: copies that have not been
    dropped yet must not spread. The state agents are those that each replica has told last (``heard``).
    """
    grant = s.grant
    members = grant.members if grant else ()
    others = [m for m in members if m.replica != replica]
    # Also while their ring is broken: they hold the head, and form the next epoch in a moment. One that is behind
    # does not hold it: if it lives alone, the head is what the replica that recovers finds.
    stands = any(m.holds_base and alive(s, (m.replica, m.incarnation)) for m in others)
    if s.rewinding or s.diverged:
        return Holders(stands, s.head)
    told: list[tuple[int, StateAgents]] = list((heard or {}).items())
    told += [(m.replica, (m.state, m.hosts)) for m in members]
    told += [(who, (view.ask.state, view.ask.hosts)) for who, view in enumerate(s.views) if view.ask is not None]
    agents: dict[int, dict[str, None]] = {}
    hosts: dict[str, str] = {}
    for who, (addresses, where) in told:
        agents.setdefault(who, {}).update(dict.fromkeys(addresses))
        hosts.update(zip(addresses, paths(where), strict=False))  # () if they are not known
    return Holders(stands, s.head, {who: tuple(agents[who]) for who in sorted(agents)}, hosts)
