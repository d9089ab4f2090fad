"""Replica: what the leader of one replica decides, from the first check-in to the final state.

``transition(replica, event) -> (replica, effects)``. The shell (control/leader.py) turns effects into sockets
and feeds their outcome back as events. FT-HSDP §4.1 and §4.3, with the corrections of docs/protocol.md:
lineage instead of step numbers, a commit token instead of independent decisions, and prepared records that
survive doubt.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from ft_hsdp.core import lineage
from ft_hsdp.core.assignment import Answer, Continue, Final, Finish, Grant, Refused, Report, Role
from ft_hsdp.core.commit import CommitRecord, Fence, Token, fenced, void
from ft_hsdp.core.effects import (
    Ask,
    Commit,
    Configure,
    Discard,
    Effect,
    Exit,
    Feed,
    Fetch,
    Install,
    Log,
    Reduce,
    SendToken,
    StopRing,
)
from ft_hsdp.core.events import (
    Answered,
    Event,
    Fetched,
    FetchFailed,
    GrantShown,
    LeaveRequested,
    Reduced,
    RingBroken,
    Started,
    TokenArrived,
    Unanswered,
)
from ft_hsdp.core.lineage import StateId

MAX_ATTEMPTS = 3


class Phase(Enum):
    """Where a replica is in a step."""

    ASKING = "asking"
    REDUCING = "reducing"
    VOTED = "voted"
    FINAL = "final"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Replica:
    """The leader's view of its replica.

    ``state`` is what all ranks hold. ``head`` is the state that the ring builds on: it is above ``state``
    while a fetch of ``fetching`` is under way and ``log`` holds the committed records that are still to be
    applied. ``record`` is there once all ranks hold the reduced gradient, ``forwarded`` once a yes was passed
    on. ``fed`` is the state that the newest batch is fed to.
    """

    me: int
    incarnation: str
    steps: int
    state: StateId
    head: StateId
    phase: Phase = Phase.ASKING
    grant: Grant | None = None
    seen: tuple[int, int] = (0, 0)
    intact: bool = False
    attempt: int = 0
    excluded: tuple[int, ...] = ()
    record: CommitRecord | None = None
    forwarded: bool = False
    token: Token | None = None
    fed: StateId | None = None
    fetching: StateId | None = None
    log: tuple[CommitRecord, ...] = ()
    void: Fence | None = None
    equal: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()
    departing: bool = False

    @property
    def verified(self) -> bool:
        """Whether this replica holds the state that the ring builds on."""
        return lineage.same(self.state, self.head)

    @property
    def prepared(self) -> CommitRecord | None:
        """The record that this replica could apply if it turns out to be committed."""
        return self.record if self.forwarded and self.verified else None

    @property
    def doubt(self) -> StateId | None:
        """The highest state that may be committed although this replica cannot apply it yet."""
        if self.verified:
            return None
        return self.record.state_id if self.record is not None and self.forwarded else self.head

    @property
    def fence(self) -> Fence:
        """The attempt that is under way."""
        return Fence(self.grant.epoch if self.grant else 0, self.head.step + 1, self.attempt)

    @property
    def role(self) -> Role:
        """Contribute only if granted, not poisoned in an earlier attempt, and in possession of the base."""
        mine = self.grant.member(self.me, self.incarnation) if self.grant else None
        granted = mine is not None and mine.role == "contribute" and self.me not in self.excluded
        return "contribute" if granted and self.verified else "behind"


Step = tuple[Replica, tuple[Effect, ...]]


def transition(s: Replica, event: Event) -> Step:
    """One event in, the next replica and what to do out."""
    if s.phase is Phase.DONE:
        return s, ()
    match event:
        case Started():
            return _ask(s)
        case Answered(answer):
            return _answered(s, answer)
        case GrantShown(grant):
            return _adopt(s, grant)
        case Unanswered():
            return _proceed(s)
        case RingBroken(epoch):
            return _broken(s, epoch)
        case Reduced(fence, record):
            return _reduced(s, fence, record)
        case TokenArrived(token):
            return _token(s, token)
        case Fetched(base):
            return _fetched(s, base)
        case FetchFailed(base, reason):
            if s.fetching != base:
                return s, ()
            if s.phase is Phase.FINAL:
                return _ask(s, after=s.grant.epoch if s.grant and not s.intact else 0)
            return replace(s, phase=Phase.DONE), (Exit(75, f"no donor could serve {base}: {reason}"),)
        case LeaveRequested():
            return replace(s, departing=True), ()


def _answered(s: Replica, answer: Answer) -> Step:
    """The lighthouse's word on the newest ask."""
    match answer:
        case Grant():
            return _adopt(s, answer)
        case Continue(epoch, step):
            stands = s.grant is not None and (epoch, step) == (s.grant.epoch, s.head.step + 1)
            return _proceed(s) if stands else (s, ())
        case Final():
            return _finalize(s, answer)
        case Finish():
            return replace(s, phase=Phase.DONE), (Exit(0, "every replica has the final state"),)
        case Refused(reason, code):
            return replace(s, phase=Phase.DONE), (Exit(code, reason),)


def _ask(s: Replica, after: int = 0) -> Step:
    """Report the true state and ask for the next step."""
    report = Report(
        replica=s.me,
        incarnation=s.incarnation,
        state=s.state,
        step=s.head.step + 1,
        epoch=s.grant.epoch if s.grant else 0,
        after=after,
        max_term=s.seen[0],
        prepared=s.prepared,
        void=s.void,
        doubt=s.doubt,
        equal=s.equal,
        leaving=s.leaving,
    )
    return replace(s, phase=Phase.FINAL if s.head.step >= s.steps else Phase.ASKING), (Ask(report),)


def _proceed(s: Replica) -> Step:
    """The membership stands: reduce the next step on the ring that is there."""
    if s.phase is not Phase.ASKING or not s.intact:
        return s, ()
    s = replace(s, phase=Phase.REDUCING)
    return s, (Reduce(s.fence, s.role, s.head.lineage),)


def _adopt(s: Replica, grant: Grant) -> Step:
    """Take a newer grant, unless this replica holds something newer than the grant's base."""
    if (grant.term, grant.epoch) <= s.seen or grant.epoch <= (s.grant.epoch if s.grant else 0):
        return s, ()
    if grant.member(s.me, s.incarnation) is None:
        return _broken(s, s.grant.epoch) if s.grant and s.intact else (s, ())
    leaves = (StopRing(s.grant.epoch, grant.reason),) if s.grant and s.intact else ()
    held, doubtful = s.prepared, not void(s.fence, grant.void)
    resolved = held is not None and lineage.same(held.state_id, grant.base)
    if not resolved and (
        lineage.newer(s.state, grant.base)
        or (held is not None and doubtful and lineage.newer(held.state_id, grant.base))
    ):
        s = replace(s, seen=(grant.term, grant.epoch), intact=False)
        s, asked = _ask(s, after=grant.epoch)
        return s, (*leaves, StopRing(grant.epoch, "stale grant: a member holds a newer state"), *asked)
    state = held.state_id if resolved and held else s.state
    effects: list[tuple[Effect, ...]] = [leaves]
    if resolved and held:
        effects.append((Commit(held),))
    behind = not lineage.same(state, grant.base)
    if behind:
        effects.append((Discard(f"left behind: holds {state}, epoch {grant.epoch} builds on {grant.base}"),))
    s = replace(
        s,
        phase=Phase.REDUCING,
        state=state,
        head=grant.base,
        grant=grant,
        seen=(grant.term, grant.epoch),
        intact=True,
        attempt=0,
        excluded=(),
        record=None,
        forwarded=False,
        token=None,
        fetching=grant.base if behind else None,
        fed=None if behind else s.fed,
        log=(),
        void=None,
        equal=(),
        leaving=(),
    )
    effects.append((Configure(grant),))
    if behind:
        effects.append((Fetch(grant.base, grant.donors),))
    s, feed = _feed(s) if s.role == "contribute" else (s, ())
    effects.append(feed)
    effects.append((Reduce(s.fence, s.role, s.head.lineage),))
    return s, sum(effects, ())


def _broken(s: Replica, epoch: int) -> Step:
    """The ring is of no more use: say so, keep what is in doubt, ask for a larger epoch.

    A replica that has not passed on a yes never will, so its attempt is void: nobody can have committed it.
    """
    if s.grant is None or s.grant.epoch != epoch or not s.intact:
        return s, ()
    working = s.phase in (Phase.REDUCING, Phase.VOTED)
    undecided = working and not s.forwarded
    s = replace(
        s,
        intact=False,
        void=s.fence if undecided else s.void,
        record=s.record if s.forwarded else None,
        token=None,
    )
    stopped = StopRing(epoch, "the ring broke")
    if s.phase is Phase.FINAL and s.verified:
        return s, (stopped,)
    s, asked = _ask(s, after=epoch)
    return s, (stopped, *asked)


def _reduced(s: Replica, fence: Fence, record: CommitRecord) -> Step:
    """All own ranks hold the sum: vote, if the token is here or starts here."""
    if s.phase is not Phase.REDUCING or not fenced(s.fence, fence):
        return s, ()
    s = replace(s, phase=Phase.VOTED, record=record)
    if _position(s) == 0:
        yes, reason = _vote(s)
        token = Token(fence, False, yes, record.state_id.lineage, reason=reason)
        return _pass_on(s, token)
    if s.token is not None:
        return _token(replace(s, token=None), s.token)
    return s, ()


def _vote(s: Replica) -> tuple[bool, str]:
    """This replica's vote on the record that it holds."""
    assert s.record is not None
    if s.record.poisoned:
        return False, f"gradient of replicas {list(s.record.poisoned)} is not finite"
    if not s.record.contributions:
        return False, "nobody contributed"
    return True, ""


def _token(s: Replica, token: Token) -> Step:
    """Pass 1: add the own vote. Pass 2, or pass 1 back at its start: the verdict."""
    if s.phase not in (Phase.REDUCING, Phase.VOTED) or not fenced(s.fence, token.fence):
        return s, ()
    if token.verdict and s.record is None:
        return s, ()
    if token.verdict:
        passed = () if _position(s) == _size(s) - 1 else (SendToken(token),)
        return _decide(s, token, passed)
    if s.phase is Phase.REDUCING:
        return replace(s, token=token), ()
    if _position(s) == 0:
        return _decide(s, replace(token, verdict=True), (SendToken(replace(token, verdict=True)),))
    assert s.record is not None
    yes, reason = _vote(s)
    if yes and s.record.state_id.lineage != token.lineage:
        yes, reason = (
            False,
            f"replica {s.me} holds another sum than replica {s.grant.ring[0] if s.grant else '?'}",
        )
    return _pass_on(s, replace(token, yes=token.yes and yes, reason=token.reason or reason))


def _pass_on(s: Replica, token: Token) -> Step:
    """Pass 1 goes on with this replica's say in it; a ring of one decides at once."""
    token = replace(
        token,
        equal=(*token.equal, s.me) if s.verified else token.equal,
        leaving=(*token.leaving, s.me) if s.departing else token.leaving,
    )
    s = replace(s, forwarded=token.yes)
    if _size(s) == 1:
        return _decide(s, replace(token, verdict=True), ())
    return s, (SendToken(token),)


def _decide(s: Replica, token: Token, passed: tuple[Effect, ...]) -> Step:
    """The verdict is known here. Yes: apply, or log it if the base is not here. No: nobody applies."""
    assert s.record is not None
    if not token.yes:
        return _again(s, token, passed)
    record = s.record
    applied = (Commit(record),) if s.verified else (Log(record),)
    s = replace(
        s,
        state=record.state_id if s.verified else s.state,
        log=s.log if s.verified else (*s.log, record),
        head=record.state_id,
        attempt=0,
        excluded=(),
        record=None,
        forwarded=False,
        void=None,
        equal=tuple(sorted(token.equal)),
        leaving=tuple(sorted(token.leaving)),
    )
    if s.departing and s.verified:
        left = StopRing(s.fence.epoch, f"replica {s.me} leaves")
        return replace(s, phase=Phase.DONE), (*passed, *applied, left, Exit(0, "left on request"))
    s, feed = _feed(s) if s.verified and s.head.step < s.steps else (s, ())
    s, asked = _ask(s)
    return s, (*passed, *applied, *asked, *feed)


def _feed(s: Replica) -> Step:
    """Start on the next batch, unless its gradient is there or under way already."""
    if s.fed is not None and lineage.same(s.fed, s.state):
        return s, ()
    return replace(s, fed=s.state), (Feed(s.state.step + 1),)


def _again(s: Replica, token: Token, passed: tuple[Effect, ...]) -> Step:
    """No verdict on an intact ring: once more without the poisoned, or under a larger epoch."""
    assert s.record is not None
    excluded = tuple(sorted({*s.excluded, *s.record.poisoned}))
    if s.record.contributions and set(s.record.contributors) <= set(excluded):
        return replace(s, phase=Phase.DONE), (*passed, Exit(75, "no contributor has a finite gradient"))
    if s.attempt + 1 < MAX_ATTEMPTS:
        s = replace(
            s,
            phase=Phase.REDUCING,
            attempt=s.attempt + 1,
            excluded=excluded,
            record=None,
            forwarded=False,
            token=None,
        )
        return s, (*passed, Reduce(s.fence, s.role, s.head.lineage))
    s = replace(s, forwarded=False)
    s, effects = _broken(s, s.fence.epoch)
    return s, (*passed, *effects)


def _fetched(s: Replica, base: StateId) -> Step:
    """The base is here and verified: apply what was committed on top of it meanwhile."""
    if s.fetching != base:
        return s, ()
    state = s.log[-1].state_id if s.log else base
    effects: tuple[Effect, ...] = (Install(base), *(Commit(r) for r in s.log))
    s = replace(s, state=state, fetching=None, log=())
    if s.phase is Phase.FINAL:
        s, asked = _ask(replace(s, head=state))
        return s, (*effects, *asked)
    if s.phase is Phase.ASKING:  # the open ask says that this state is not here
        s, asked = _ask(s, after=s.grant.epoch if s.grant and not s.intact else 0)
        return s, (*effects, *asked)
    return s, effects


def _finalize(s: Replica, final: Final) -> Step:
    """Training is over elsewhere: apply the record in doubt if it leads to the end, else fetch the end."""
    held = s.prepared
    left = (StopRing(s.grant.epoch, "training is over"),) if s.grant and s.intact else ()
    s = replace(s, intact=False)
    if held is not None and lineage.same(held.state_id, final.base):
        s = replace(s, state=held.state_id, head=held.state_id, record=None, forwarded=False)
        s, asked = _ask(s)
        return s, (*left, Commit(held), *asked)
    s = replace(s, phase=Phase.FINAL, head=final.base, record=None, forwarded=False, log=())
    s = replace(s, fetching=final.base, fed=None)
    return s, (
        *left,
        Discard(f"left behind: training ended at {final.base}"),
        Fetch(final.base, final.donors),
    )


def _position(s: Replica) -> int:
    """Own position in the ring."""
    assert s.grant is not None
    return s.grant.ring.index(s.me)


def _size(s: Replica) -> int:
    """Members of the ring."""
    assert s.grant is not None
    return len(s.grant.members)
