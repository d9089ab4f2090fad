"""The lighthouse's decisions: ``transition(state, event) -> (state, effects)``, without I/O or a clock.

A membership that works is left alone: the first request for a step settles its grant at once. A round is held
only when the ring of the current epoch is of no more use, or before the first epoch. Silence never counts as
death.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from ft_hsdp.core import lineage
from ft_hsdp.core.assignment import Answer, Continue, Final, Finish, Grant, Member, Refused, Report
from ft_hsdp.core.commit import CommitRecord, Fence
from ft_hsdp.core.lineage import StateId
from lighthouse import quorum
from lighthouse.quorum import Base, Epoch, Incarnation


@dataclass(frozen=True, slots=True)
class Policy:
    """What the operator chose; times in seconds."""

    total: int
    steps: int
    min_replicas: int = 1
    suspect_grace_s: float = 1.0
    evict_s: float = 10.0
    start_wait_s: float | None = None
    final_wait_s: float = 120.0
    on_lost_head: Literal["wait", "halt", "rollback"] = "halt"


@dataclass(frozen=True, slots=True)
class Request:
    """An open ask: the report, where the replica can be reached, and the id that the answer goes to."""

    report: Report
    id: int
    ring: tuple[str, ...] = ()
    state: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class View:
    """What is known of one replica: its newest incarnation, whether it runs, and its open ask.

    ``down`` is None while nobody has said whether a process of this replica runs.
    """

    incarnation: str | None = None
    down: bool | None = None
    lost: bool = False
    ask: Request | None = None


@dataclass(frozen=True, slots=True)
class State:
    """All that the lighthouse knows. What must outlive it: term, epochs, head, grant, exited."""

    policy: Policy
    term: int
    views: tuple[View, ...]
    fresh: bool = True
    head: StateId | None = None
    epoch: int = 0
    epochs: tuple[Epoch, ...] = ()
    exited: frozenset[Incarnation] = frozenset()
    grant: Grant | None = None
    settled: int = 0
    broken: bool = False
    since: float | None = None
    final_since: float | None = None
    finished: bool = False
    halted: str = ""

    @staticmethod
    def empty(policy: Policy, term: int) -> State:
        """A lighthouse that never granted anything."""
        return State(policy, term, (View(),) * policy.total)


# Events.


@dataclass(frozen=True, slots=True)
class Asked:
    """A replica asks for a step at ``now``."""

    request: Request
    now: float


@dataclass(frozen=True, slots=True)
class AskWithdrawn:
    """The replica closed the connection that the answer would have gone to."""

    replica: int
    id: int


@dataclass(frozen=True, slots=True)
class ProcessesReported:
    """A supervisor's full picture: what runs now (None: nothing), what has exited, what is given up."""

    running: Mapping[int, str | None]
    exited: frozenset[Incarnation]
    lost: frozenset[int]
    now: float


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed."""

    now: float


Event = Asked | AskWithdrawn | ProcessesReported | Ticked

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
Step = tuple[State, tuple[Effect, ...]]


def transition(s: State, event: Event) -> Step:
    """One event in, the next state and what to do out. Effects may leave only when the state is durable."""
    match event:
        case Asked(request, now):
            s, effects = _asked(s, request, now)
        case AskWithdrawn(replica, id_):
            ask = s.views[replica].ask
            return (_view(s, replica, ask=None), ()) if ask is not None and ask.id == id_ else (s, ())
        case ProcessesReported():
            s, effects = _processes(s, event)
            now = event.now
        case Ticked(now):
            effects = ()
    s, more = _round(s, now)
    return s, effects + more


def _view(s: State, replica: int, **changes: object) -> State:
    """``s`` with the view of one replica changed."""
    views = list(s.views)
    views[replica] = replace(views[replica], **changes)  # type: ignore[arg-type]
    return replace(s, views=tuple(views))


def _asked(s: State, request: Request, now: float) -> Step:
    """Note the ask; answer at once if the current membership settles it."""
    report = request.report
    me = report.replica
    view = s.views[me]
    if (me, report.incarnation) in s.exited:
        return s, (Reply(me, request.id, Refused("this incarnation is known to have exited", 75)),)
    if view.incarnation not in (None, report.incarnation) and not _superseded(s, me, report.incarnation):
        return s, (Reply(me, request.id, Refused(f"fenced: replica {me} has a newer incarnation", 75)),)
    if s.fresh and report.max_term >= s.term:
        s = replace(s, term=report.max_term + 1)
    epoch = max(s.epoch, report.epoch, report.after)
    s = replace(s, epoch=epoch)
    s = _view(s, me, incarnation=report.incarnation, down=False, lost=False, ask=request)
    s = _raise_head(s, report.state)
    if s.grant is None or report.state.step >= s.policy.steps or s.grant.member(me, report.incarnation) is None:
        return s, ()
    if report.after >= s.grant.epoch:
        return (s, ()) if s.broken else (replace(s, broken=True, settled=0, since=now), ())
    return (s, ()) if s.broken else _settle(s, report)


def _superseded(s: State, replica: int, incarnation: str) -> bool:
    """Whether ``incarnation`` is new: not in any epoch that is still remembered. Newest wins."""
    return all((replica, incarnation) not in e.members for e in s.epochs)


def _raise_head(s: State, state: StateId) -> State:
    """The head is the highest committed state ever reported; epochs before it no longer matter."""
    if s.head is not None and not lineage.newer(state, s.head):
        return s
    if s.head is None and state.step == 0:
        return s
    keep = tuple(e for e in s.epochs if s.head is None or e.number >= s.head.commit_epoch)
    return replace(s, head=state, epochs=keep)


def _settle(s: State, report: Report) -> Step:
    """A member asks on a ring that works: the first request for a step settles its membership."""
    assert s.grant is not None
    grant = s.grant
    holds = report.state.step + 1 == report.step
    if report.epoch < grant.epoch or report.step <= s.settled or not holds:
        return _serve(s)
    joiners = [v.ask for r, v in enumerate(s.views) if v.ask and grant.member(r, v.incarnation or "") is None]
    if any(quorum.ahead(_heard(s, j.report), report.state) for j in joiners):
        return replace(s, broken=True, settled=0), ()
    voids = quorum.fences(_overruled_fences(s, (j.report for j in joiners)))
    base = Base(report.state, None, voids)
    holders = {m.replica for m in grant.members if m.role == "contribute"} | set(report.equal) | {report.replica}
    gone = [m for m in grant.members if (m.replica, m.incarnation) in s.exited or m.replica in report.leaving]
    risen = [m for m in grant.members if m.role == "behind" and m.replica in holders]
    able = sum(m.replica in holders for m in grant.members if m not in gone)
    changed = bool(joiners or gone or risen) and able >= s.policy.min_replicas
    s = replace(s, settled=report.step)
    if not changed:
        return _serve(s)
    stay = (m for m in grant.members if m not in gone)
    members = [replace(m, role="contribute" if m.replica in holders else "behind") for m in stay]
    members += [_member(ask, base) for ask in joiners]
    whys = (
        ("joined", [j.report.replica for j in joiners]),
        ("gone", [m.replica for m in gone]),
        ("caught up", [m.replica for m in risen]),
    )
    why = "; ".join(f"{what}: replica {','.join(map(str, ids))}" for what, ids in whys if ids)
    s, note = _new_epoch(s, base, tuple(members), why)
    s, replies = _serve(s)
    return s, (note, *replies)


def _serve(s: State) -> Step:
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
            answers[replica] = Continue(s.grant.epoch, report.step)
    return _answer(s, answers)


def _member(request: Request, base: Base) -> Member:
    """The entry of an asking replica in a grant on ``base``."""
    report = request.report
    return Member(report.replica, report.incarnation, quorum.role(report, base), request.ring, request.state)


def _new_epoch(s: State, base: Base, members: tuple[Member, ...], why: str) -> tuple[State, Note]:
    """Number the membership, remember it, and make it the current one."""
    grant = quorum.grant(s.term, s.epoch + 1, base, members, s.policy.total, why)
    if base.state.step > 0 and (s.head is None or lineage.newer(base.state, s.head)):
        s = _raise_head(s, base.state)
    epoch = Epoch(grant.epoch, tuple((m.replica, m.incarnation) for m in grant.members))
    s = replace(
        s,
        epoch=grant.epoch,
        epochs=(*s.epochs, epoch),
        grant=grant,
        fresh=False,
        broken=False,
        since=None,
        settled=base.state.step + 1,
    )
    facts = {
        "term": grant.term,
        "epoch": grant.epoch,
        "step": base.state.step + 1,
        "base": [base.state.commit_epoch, base.state.step, base.state.lineage],
        "members": list(grant.ring),
        "roles": {str(m.replica): m.role for m in grant.members},
    }
    return s, Note("EpochGranted", grant.reason, facts)


def _answer(s: State, answers: Mapping[int, Answer]) -> Step:
    """Reply to open asks and close them."""
    replies: list[Effect] = []
    for replica, answer in answers.items():
        ask = s.views[replica].ask
        if ask is not None:
            replies.append(Reply(replica, ask.id, answer))
            s = _view(s, replica, ask=None)
    return s, tuple(replies)


def _processes(s: State, event: ProcessesReported) -> Step:
    """Take a supervisor's word on what runs: the only evidence that counts as death."""
    notes: list[Effect] = []
    for replica, incarnation in sorted(event.exited - s.exited):
        notes.append(
            Note("ExitReported", "its supervisor saw it end", {"replica": replica, "incarnation": incarnation})
        )
    s = replace(s, exited=s.exited | event.exited)
    for replica, running in event.running.items():
        view = s.views[replica]
        gone = view.incarnation is not None and (replica, view.incarnation) in s.exited
        s = _view(
            s,
            replica,
            ask=None if gone else view.ask,
            incarnation=running if running is not None else view.incarnation,
            down=running is None,
            lost=replica in event.lost,
        )
        if running is not None and view.ask is not None and view.ask.report.incarnation != running:
            s = _view(s, replica, ask=None)
    return s, tuple(notes)


def _alive(s: State, incarnation: Incarnation) -> bool:
    """Whether this incarnation is not known to have exited."""
    return incarnation not in s.exited


def _round(s: State, now: float) -> Step:
    """Form a new epoch if one is needed and possible; else say what is waited for."""
    finished, effects = _final(s, now)
    if effects or finished.finished:
        return finished, effects
    s = finished
    asks = {
        r: v.ask
        for r, v in enumerate(s.views)
        if v.ask is not None and (v.ask.report.state.step < s.policy.steps or not _over(s))
    }
    members = {(m.replica, m.incarnation) for m in s.grant.members} if s.grant else set()
    orphaned = s.grant is not None and not any(_alive(s, m) for m in members)
    if s.grant is not None and not s.broken and not orphaned:
        return s, ()
    if not asks:
        return s, ()
    if s.since is None:
        s = replace(s, since=now)
    assert s.since is not None
    silent = _silent(s, members, asks)
    patience = s.policy.start_wait_s if s.grant is None else s.policy.suspect_grace_s
    if silent and (patience is None or now < s.since + patience):
        return _wait(s, f"waiting for replica {','.join(str(r) for r, _ in silent)}")
    s, granted = _form(s, {r: a for r, a in asks.items() if a is not None}, silent)
    late = (
        [(r, i) for r, i in silent if i is not None]
        if s.grant and s.since is not None and now >= s.since + s.policy.evict_s
        else []
    )
    evictions = tuple(Evict(r, i, f"silent for {s.policy.evict_s} s while its ring is broken") for r, i in late)
    return s, (*granted, *evictions)


def _silent(s: State, members: set[Incarnation], asks: Mapping[int, Request]) -> list[tuple[int, str | None]]:
    """Who should have asked: at first every replica not known to be down, later the living members."""
    if s.grant is None:
        return [
            (r, v.incarnation)
            for r, v in enumerate(s.views)
            if r not in asks and not v.lost and (v.down is not True)
        ]
    return sorted(m for m in members if _alive(s, m) and m[0] not in asks)


def _wait(s: State, why: str) -> Step:
    """Nothing can be decided yet; the shell journals a reason once."""
    return s, (Note("Waiting", why),)


def _form(s: State, asks: dict[int, Request], silent: list[tuple[int, str | None]]) -> Step:
    """Grant a new epoch to all that ask, if nobody absent and alive could hold something newer."""
    reports = {r: a.report for r, a in asks.items()}
    base = quorum.highest(_heard(s, r) for r in reports.values())
    base = replace(base, voids=quorum.fences([*base.voids, *_overruled_fences(s, reports.values())]))
    present = frozenset((r, report.incarnation) for r, report in reports.items())
    notes: list[Effect] = []
    missing = _unheard(s, present)
    doubts = [r.doubt for r in reports.values() if r.doubt and lineage.newer(r.doubt, base.state)]
    if doubts and missing:
        return _wait(s, f"{doubts[0]} may be committed; replica {missing[0][0]} may hold it")
    if s.head is not None and lineage.newer(s.head, base.state):
        if missing:
            return _wait(s, f"head {s.head} is above {base.state}; replica {missing[0][0]} may hold it")
        lost = s.head.step - base.state.step
        if lost != 1 and s.policy.on_lost_head != "rollback":
            why = f"no copy of the head {s.head} is left; the highest state is {base.state}"
            if s.policy.on_lost_head == "wait":
                return _wait(s, why)
            s, replies = _answer(replace(s, halted=why), {r: Refused(why, 75) for r in asks})
            return s, (Note("JobHalted", why), *replies)
        why = f"every holder of {s.head} has exited; back by {lost} to {base.state}"
        notes.append(Note("HeadRolledBack", why, {"steps": lost}))
        s = replace(s, head=base.state if base.state.step else None)
    blocked = quorum.uncovered(s.epochs, s.exited, present)
    if blocked is not None:
        return _wait(s, f"epoch {blocked.number} has living members, none of them asks")
    members = tuple(_member(a, base) for a in asks.values())
    if base.state.step >= s.policy.steps:
        s = _raise_head(s, base.state)
        donors = tuple(m for m in members if m.role == "contribute")
        s, replies = _answer(s, {r: Final(base.state, donors) for r in asks})
        return s, (*notes, *replies)
    able = sum(m.role == "contribute" for m in members)
    if able < s.policy.min_replicas:
        return _wait(s, f"{able} replicas hold {base.state}, min_replicas is {s.policy.min_replicas}")
    why = "first epoch" if s.grant is None else f"the ring of epoch {s.grant.epoch} broke"
    if silent:
        why += f"; without replica {','.join(str(r) for r, _ in silent)}: silent"
        notes += [Note("ReplicaExcluded", "silent beyond its grace", {"replica": r}) for r, _ in silent]
    s, note = _new_epoch(s, base, members, why)
    s, replies = _serve(s)
    return s, (*notes, note, *replies)


def _unheard(s: State, present: frozenset[Incarnation]) -> list[Incarnation]:
    """Who may live and does not ask: members of remembered epochs, and replicas of which nothing is known."""
    asking = {r for r, _ in present}
    members = [i for e in s.epochs for i in e.members if _alive(s, i) and i not in present]
    return members + [
        (r, "") for r, v in enumerate(s.views) if r not in asking and v.down is not True and not v.lost
    ]


def _overruled(s: State, record: CommitRecord | None) -> bool:
    """Whether a later decision was made without ``record``, so that it never committed and never will.

    The current grant, or the end, was decided with a member of every epoch before it. Had that one known a
    record to be in doubt, its state would be the one that was built on.
    """
    if s.grant is None or record is None or record.state_id in (s.grant.base, s.head):
        return False
    return record.epoch < s.grant.epoch or _over(s)


def _heard(s: State, report: Report) -> Report:
    """``report`` as far as it counts."""
    return replace(report, prepared=None) if _overruled(s, report.prepared) else report


def _overruled_fences(s: State, reports: Iterable[Report]) -> list[Fence]:
    return [r.prepared.fence for r in reports if r.prepared is not None and _overruled(s, r.prepared)]


def _over(s: State) -> bool:
    """Whether the head is the final state."""
    return s.head is not None and s.head.step >= s.policy.steps


def _ending(s: State, report: Report) -> Answer:
    """The job is over: whoever comes back now lost a state that every replica had."""
    if s.head is not None and lineage.same(report.state, s.head):
        return Finish()
    return Refused(f"the job has ended: every replica had {s.head}", 0)


def _final(s: State, now: float) -> Step:
    """Training is over: help those behind to the final state, end when every replica has it."""
    if not _over(s) or s.finished:
        if s.finished:
            return _answer(s, {r: _ending(s, v.ask.report) for r, v in enumerate(s.views) if v.ask is not None})
        return s, ()
    head = s.head
    assert head is not None
    have = {r: v.ask for r, v in enumerate(s.views) if v.ask and lineage.same(v.ask.report.state, head)}
    if not have:
        return s, ()
    if s.final_since is None:
        s = replace(s, final_since=now)
    assert s.final_since is not None
    late = now >= s.final_since + s.policy.final_wait_s
    if late or all(r in have or v.lost for r, v in enumerate(s.views)):
        s, replies = _answer(replace(s, finished=True), {r: Finish() for r in have})
        return s, (Note("JobFinished", f"final state {head}"), *replies)
    donors = tuple(replace(_member(a, Base(head, None, ())), role="contribute") for a in have.values())
    rest = {r: Final(head, donors) for r, v in enumerate(s.views) if v.ask and r not in have}
    return _answer(s, rest)
