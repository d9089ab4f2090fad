"""State: what the lighthouse knows, what happens to it, what it can do, and the changes that decisions share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from ft_hsdp.core import state_id
from ft_hsdp.core.grant import Answer, Continue, Grant, Member, Report
from ft_hsdp.core.state_id import StateId
from lighthouse.quorum import rules
from lighthouse.quorum.edges import NO_EDGES, Edges, arrange, proven
from lighthouse.quorum.rules import AdmittedIncarnation, Base, Epoch, Incarnation, Lease


@dataclass(frozen=True, slots=True)
class Policy:
    """What the operator chose; times in seconds.

    Ids of replicas are below ``slots``; a job begins with ``replicas`` of them (None: all).
    """

    slots: int
    steps: int
    replicas: int | None = None
    min_replicas: int = 1
    suspect_grace_s: float = 0.2
    silence_grace_s: float = 1.0
    evict_s: float = 10.0
    start_wait_s: float | None = None
    final_wait_s: float = 120.0
    return_wait_s: float = 120.0
    supervisor_lease_s: float = 5.0
    on_lost_head: Literal["wait", "halt", "rollback"] = "halt"
    edge_wait_s: float = 30.0
    on_divergence: Literal["halt", "checkpoint"] = "halt"


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """An open ask: the report, where the replica can be reached, and the id that the answer goes to."""

    report: Report
    id: int
    ring: tuple[str, ...] = ()
    state: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all replicas of a job share; None until somebody has said it. ``rules``: JSON text by dotted key."""

    config_hash: str | None = None
    layout: str | None = None
    numerics: str | None = None
    rules: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class View:
    """What is known of one replica: its newest incarnation, whether it runs, and its open ask.

    ``down`` is None while nobody has said whether a process of this replica runs. ``renewed`` is when the
    supervisor that has its lease reported last (None: not since this lighthouse started). ``fetching``: it was
    told to fetch a state without a ring, and has not asked since.
    """

    incarnation: str | None = None
    down: bool | None = None
    lost: bool = False
    ask: OpenRequest | None = None
    renewed: float | None = None
    fetching: bool = False


@dataclass(frozen=True, slots=True)
class LighthouseState:
    """All that the lighthouse knows; store.py says what of it must outlive it.

    ``target`` is how many replicas are wanted: those with lower ids. ``drained`` are the replicas that an operator
    wants away all the same, ``checkpoint`` is the step from which on a state is to be written on demand (0: none
    is). ``lives`` are the newest incarnations that were admitted, with their numbers; new numbers are above
    ``admissions``. ``leases`` say which supervisor may start a replica. ``agreed`` is what the members of the
    first grant had in common. ``edges`` are the connections that failed of late; ``fruitless`` epochs were granted
    since the last step. ``rewound``: by replica, the number up to which incarnations were there when states
    differed: they have no part in what comes after the checkpoint; ``rewinding`` until there is a grant to others.
    """

    policy: Policy
    term: int
    views: tuple[View, ...]
    target: int
    fresh: bool = True
    head: StateId | None = None
    epoch: int = 0
    epochs: tuple[Epoch, ...] = ()
    exited: frozenset[Incarnation] = frozenset()
    grant: Grant | None = None
    settled: int = 0
    broken: bool = False
    since: float | None = None
    last_exit: float = 0.0
    final_since: float | None = None
    finished: bool = False
    halted: str = ""
    diverged: tuple[int, ...] = ()
    drained: frozenset[int] = frozenset()
    checkpoint: int = 0
    edges: Edges = NO_EDGES
    fruitless: int = 0
    lives: tuple[AdmittedIncarnation, ...] = ()
    leases: tuple[Lease, ...] = ()
    agreed: Agreement | None = None
    admissions: int = 0
    rewound: tuple[int, ...] = ()
    rewinding: bool = False

    @staticmethod
    def empty(policy: Policy, term: int) -> LighthouseState:
        """A lighthouse that never granted anything."""
        target = policy.slots if policy.replicas is None else policy.replicas
        return LighthouseState(policy, term, (View(),) * policy.slots, target)


# Events.

Action = Literal["evict", "drain", "undrain", "checkpoint", "scale"]


@dataclass(frozen=True, slots=True)
class Asked:
    """A replica asks for a step at ``now``."""

    request: OpenRequest
    now: float


@dataclass(frozen=True, slots=True)
class AskWithdrawn:
    """The replica closed the connection that the answer would have gone to."""

    replica: int
    id: int


@dataclass(frozen=True, slots=True)
class ProcessesReported:
    """A supervisor's full picture: what runs now (None: nothing), what has exited, what is given up.

    ``owner`` is the supervisor; ``claims`` are the replicas that it wants to start alone, with its lease's number.
    """

    running: Mapping[int, str | None]
    exited: frozenset[Incarnation]
    lost: frozenset[int]
    now: float
    owner: str = ""
    claims: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Commanded:
    """An operator's order, which `commands.plan` found possible.

    Those for a checkpoint and to scale are about no ``replica`` (0); ``target``: how many replicas a scale wants.
    """

    action: Action
    replica: int
    reason: str
    now: float
    target: int = 0


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed."""

    now: float


Event = Asked | AskWithdrawn | ProcessesReported | Commanded | Ticked

# Effects.


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer the ask ``id`` of ``replica``."""

    replica: int
    id: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class Evict:
    """Have the supervisor SIGKILL this incarnation, stopped processes included."""

    replica: int
    incarnation: str
    reason: str


@dataclass(frozen=True, slots=True)
class Note:
    """An event for the journal."""

    event: str
    reason: str
    facts: Mapping[str, object] = field(default_factory=dict, hash=False, compare=False)


Effect = Reply | Evict | Note
Step = tuple[LighthouseState, tuple[Effect, ...]]


def with_view(s: LighthouseState, replica: int, **changes: object) -> LighthouseState:
    """``s`` with the view of one replica changed."""
    views = list(s.views)
    views[replica] = replace(views[replica], **changes)  # type: ignore[arg-type]
    return replace(s, views=tuple(views))


def raise_head(s: LighthouseState, state: StateId) -> LighthouseState:
    """The head is the highest committed state ever reported; epochs before it no longer matter."""
    if s.head is not None and not state_id.newer(state, s.head):
        return s
    if s.head is None and state.step == 0:
        return s
    keep = tuple(e for e in s.epochs if s.head is None or e.number >= s.head.commit_epoch)
    return replace(s, head=state, epochs=keep, fruitless=0)


def store_behind(s: LighthouseState, report: Report) -> bool:
    """Whether a replica knows a newer membership or term than the store, which is an older copy then."""
    grant = s.grant
    return grant is not None and (max(report.epoch, report.after) > grant.epoch or report.max_term > s.term)


def begin_anew(s: LighthouseState, report: Report) -> tuple[LighthouseState, Note]:
    """The store is an older copy: what was granted since is unknown, so everybody who may live is heard first.

    That is what an empty store does, too (`rounds.hold`). Exits and the head are facts, and stay. Nothing is
    granted in a term, or in an epoch, that a member may have seen.
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
    s = replace(s, fresh=True, grant=None, epochs=(), settled=0, broken=False, since=None)
    return s, Note("StoreBehind", why, facts)


def member(request: OpenRequest, base: Base) -> Member:
    """The entry of an asking replica in a grant on ``base``."""
    report = request.report
    role = rules.role(report, base)
    return Member(report.replica, report.incarnation, role, request.ring, request.state, report.number)


def new_epoch(
    s: LighthouseState, base: Base, members: tuple[Member, ...], why: str
) -> tuple[LighthouseState, Note]:
    """Number the membership, remember it, and make it the current one."""
    if s.grant is not None and progressed(s):
        s = replace(s, edges=proven(s.edges, s.grant.ring))
    ring = arrange(members, s.edges.avoided)
    grant = rules.grant(s.term, s.epoch + 1, base, ring, total(s, len(members)), why)
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
    facts = {
        "term": grant.term,
        "epoch": grant.epoch,
        "step": base.state.step + 1,
        "base": [base.state.commit_epoch, base.state.step, base.state.lineage],
        "members": list(grant.ring),
        "total": grant.total,
        "roles": {str(m.replica): m.role for m in grant.members},
    }
    return s, Note("EpochGranted", grant.reason, facts)


def progressed(s: LighthouseState) -> bool:
    """Whether a step was committed in the current epoch."""
    return s.grant is not None and s.head is not None and s.head.commit_epoch >= s.grant.epoch


def answer(s: LighthouseState, answers: Mapping[int, Answer]) -> Step:
    """Reply to open asks and close them."""
    replies: list[Effect] = []
    for replica, answer in answers.items():
        ask = s.views[replica].ask
        if ask is not None:
            replies.append(Reply(replica, ask.id, answer))
            s = with_view(s, replica, ask=None)
    return s, tuple(replies)


def alive(s: LighthouseState, incarnation: Incarnation) -> bool:
    """Whether this incarnation is not known to have exited."""
    return incarnation not in s.exited


def wanted(s: LighthouseState, replica: int) -> bool:
    """Whether ``replica`` is to take part: the job has been scaled to it, and nobody has drained it."""
    return replica < s.target and replica not in s.drained


def total(s: LighthouseState, members: int) -> int:
    """What the contributors of a membership of so many are a share of: the target, unless more are still there."""
    return max(s.target, members)


def away(s: LighthouseState, replica: int) -> bool:
    """Whether ``replica`` is not wanted and has gone: it is not started again before it is."""
    view = s.views[replica]
    left = s.grant is not None and s.grant.member(replica, view.incarnation or "") is None
    return not wanted(s, replica) and view.ask is None and (view.down is not False or left)


def over(s: LighthouseState) -> bool:
    """Whether the head is the final state."""
    return s.head is not None and s.head.step >= s.policy.steps


def serve(s: LighthouseState) -> Step:
    """Answer every open ask that the current membership settles."""
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
            answers[replica] = go_on(s, report)
    return answer(s, answers)


def go_on(s: LighthouseState, report: Report) -> Continue:
    """The membership of a grant stands for the step that one of its members asks for."""
    assert s.grant is not None
    return Continue(s.grant.epoch, report.step, not wanted(s, report.replica), s.checkpoint)
