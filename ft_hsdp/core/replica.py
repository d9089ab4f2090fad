"""Replica: what the leader of one replica decides, from the first check-in to the final state.

``transition(replica, event) -> (replica, effects)``. The shell (control/leader.py) turns effects into sockets
and feeds their outcome back as events. FT-HSDP §4.1 and §4.3, with the corrections of docs/protocol.md:
lineage instead of step numbers, a commit token instead of independent decisions, and prepared records that
survive doubt.
"""

from __future__ import annotations

from dataclasses import replace

from ft_hsdp.core import checkpoint, state_id
from ft_hsdp.core.commit import void
from ft_hsdp.core.effects import (
    Commit,
    Configure,
    DropGradient,
    DropSnapshots,
    Effect,
    Exit,
    Fetch,
    InstallSnapshot,
    Keep,
    Reduce,
    StopRing,
    WriteCheckpoint,
)
from ft_hsdp.core.events import (
    Answered,
    CheckpointFailed,
    CheckpointOverdue,
    CheckpointWritten,
    Event,
    Fetched,
    FetchFailed,
    GrantShown,
    LeaseEnded,
    LeaveOverdue,
    LeaveRequested,
    Reduced,
    RingBroken,
    Started,
    TokenArrived,
    Unanswered,
)
from ft_hsdp.core.grant import Answer, CatchUp, Continue, Finish, Grant, Refused
from ft_hsdp.core.replica_state import Phase, Replica, Step
from ft_hsdp.core.state_id import StateId
from ft_hsdp.core.voting import again, ask, broken, feed, go, reduced, token_came


def transition(s: Replica, event: Event) -> Step:
    """One event in, the next replica and what to do out."""
    if s.phase is Phase.DONE:
        return s, ()
    if s.phase is Phase.LEAVING:
        return _leaving(s, event)
    match event:
        case Started():
            return _started(s)
        case Answered(answer):
            return _answered(s, answer)
        case GrantShown(grant):
            return _adopt(s, grant)
        case Unanswered():
            return (s, ()) if _waned(s) else _proceed(s)
        case LeaseEnded():
            return _stop_all(s)
        case RingBroken(epoch, suspect, accuser):
            return _torn(s, epoch, suspect, accuser)
        case Reduced(fence, record, digest):
            return reduced(s, fence, record, digest)
        case TokenArrived(token):
            return token_came(s, token)
        case Fetched(base):
            return _fetched(s, base)
        case FetchFailed(base, reason):
            if s.fetching != base:
                return s, ()
            if s.phase in (Phase.FETCHING, Phase.FINAL):
                return ask(replace(s, fetching=None), after=0 if s.intact else s.seen[1])
            return replace(s, phase=Phase.DONE), (Exit(75, f"no donor could serve {base}: {reason}"),)
        case CheckpointWritten(state):
            return _told(s, (checkpoint.ended(s, state, written=True), ()))
        case CheckpointFailed(state):
            return _told(s, (checkpoint.ended(s, state, written=False), ()))
        case CheckpointOverdue():
            return _told(s, checkpoint.overdue(s))
        case LeaveRequested():
            s = replace(s, departing=True)
            return ask(s) if s.grant is None and s.phase is Phase.ASKING else (s, ())
        case LeaveOverdue():
            return s, ()


def _leaving(s: Replica, event: Event) -> Step:
    """Go when the others have left the ring: until then some may not have heard the verdict on the last step."""
    match event:
        case RingBroken() | GrantShown() | LeaveOverdue() if s.intact:
            return go(s)
        case CheckpointWritten(state) | CheckpointFailed(state) if state == s.writing:
            s = checkpoint.ended(s, state, isinstance(event, CheckpointWritten))
            return (s, ()) if s.intact else go(s)
    return s, ()


def _started(s: Replica) -> Step:
    """Check in. Who begins with the final state writes the checkpoint that is missing: no step will follow."""
    if s.head.step < s.steps or not s.wanted:
        return ask(s)
    s, asked = ask(replace(s, writing=s.state, wanted=0))
    return s, (WriteCheckpoint(s.state), *asked)


def _told(before: Replica, step: Step) -> Step:
    """``step`` from ``before`` on; the lighthouse hears who writes the final state, for the end waits for that."""
    s, effects = step
    if before.phase is not Phase.FINAL or (before.writing is None) == (s.writing is None):
        return step
    s, asked = ask(s)
    return s, (*effects, *asked)


def _torn(s: Replica, epoch: int, suspect: int | None, accuser: int | None) -> Step:
    """The ring broke. After the last step it is of no use, but the writer of the final state may be lost."""
    over = s.phase is Phase.FINAL and s.verified
    s, effects = broken(s, epoch, suspect=suspect, accuser=accuser)
    if not over or not effects:
        return s, effects
    s, written = _told(s, checkpoint.bereft(s, suspect))
    return s, (*effects, *written)


def _waned(s: Replica) -> bool:
    """Whether members of the ring have left it at the last commit: then it cannot go on, lease or not."""
    return bool(s.leaving) and not set(s.equal) <= set(s.leaving)


def _stop_all(s: Replica) -> Step:
    """The lease is over between two steps: leave the ring on purpose, so that all members stop and ask together.

    Whoever waited for this replica in a ring would hold it to hang.
    """
    if s.grant is None or s.phase is not Phase.ASKING:
        return s, ()
    return broken(s, s.grant.epoch, f"the lease of replica {s.me} has ended: no lighthouse answers it")


def _answered(s: Replica, answer: Answer) -> Step:
    """The lighthouse's word on the newest ask. One that does not fit is asked again: nothing else would follow."""
    waits = s.phase is Phase.ASKING or (s.phase is Phase.FINAL and s.fetching is None)
    match answer:
        case Grant():
            after, due = _adopt(s, answer)
            if waits and not due:
                return again(
                    s, f"the grant of epoch {answer.epoch} does not fit: this replica knows epoch {s.seen[1]}"
                )
            return after, due
        case Continue(epoch, step, leave, checkpoint):
            s = replace(s, dismissed=leave, wanted=max(s.wanted, checkpoint))
            stands = s.grant is not None and (epoch, step) == (s.grant.epoch, s.head.step + 1)
            if stands and s.intact and s.phase is not Phase.FINAL:
                return _proceed(s)
            misfit = f"step {step} of epoch {epoch} is not what was asked for in epoch {s.seen[1]}"
            return again(s, misfit) if waits else (s, ())
        case CatchUp(base):
            if base.step >= s.steps or (waits and not state_id.newer(s.state, base)):
                return _catch_up(s, answer)
            return again(s, f"{base} is to be fetched, this replica holds {s.state}") if waits else (s, ())
        case Finish():
            return replace(s, phase=Phase.DONE), (Exit(0, "every replica has the final state"),)
        case Refused(reason, code, forget):
            dropped: tuple[Effect, ...] = (DropSnapshots(),) if forget else ()
            return replace(s, phase=Phase.DONE), (*dropped, Exit(code, reason))


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
    mine = grant.member(s.me, s.incarnation)
    if mine is None:
        return broken(s, s.grant.epoch) if s.grant and s.intact else (s, ())
    s = s if mine.number <= s.number else replace(s, number=mine.number)
    leaves = (StopRing(s.grant.epoch, grant.reason),) if s.grant and s.intact else ()
    held = s.prepared
    doubtful = held is not None and not void(held.fence, grant.void)
    resolved = held is not None and state_id.same(held.state_id, grant.base)
    if not resolved and (
        state_id.newer(s.state, grant.base)
        or (held is not None and doubtful and state_id.newer(held.state_id, grant.base))
    ):
        s = replace(s, seen=(grant.term, grant.epoch), intact=False, silent=(), edge=None)
        s, asked = ask(s, after=grant.epoch)
        return s, (*leaves, StopRing(grant.epoch, "stale grant: a member holds a newer state"), *asked)
    state = held.state_id if resolved and held else s.state
    s = checkpoint.granted(s, grant)
    effects: list[tuple[Effect, ...]] = [leaves]
    if resolved and held:
        s, written = checkpoint.write(s, grant.base, grant.donors)
        effects.append((Commit(held), *written))
    behind = not state_id.same(state, grant.base)
    if behind:
        effects.append((DropGradient(f"left behind: holds {state}, epoch {grant.epoch} builds on {grant.base}"),))
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
        spoiled=(),
        record=None,
        forwarded=False,
        token=None,
        fetching=grant.base if behind else None,
        fed=None if behind else s.fed,
        log=(),
        void=None,
        equal=(),
        leaving=(),
        lagging=(),
        suspects=(),
        diverged=(),
        silent=(),
        edge=None,
        wanted=min(s.wanted, grant.base.step + 1),
        saved=min(s.saved, grant.base.step),
    )
    effects.append((Configure(grant),))
    if behind:
        effects.append((Fetch(grant.base, grant.donors),))
    s, fed = feed(s) if s.role == "contribute" else (s, ())
    effects.append(fed)
    effects.append((Reduce(s.fence, s.role, s.head.lineage),))
    return s, sum(effects, ())


def _fetched(s: Replica, base: StateId) -> Step:
    """The base is here and verified: apply what was committed on top of it meanwhile."""
    if s.fetching != base:
        return s, ()
    state = s.log[-1].state_id if s.log else base
    effects: tuple[Effect, ...] = (InstallSnapshot(base), *(Commit(r) for r in s.log))
    s = replace(s, state=state, fetching=None, log=())
    if s.phase in (Phase.FETCHING, Phase.FINAL):
        s, asked = ask(replace(s, head=state, record=None, forwarded=False), after=0 if s.intact else s.seen[1])
        return s, (*effects, *asked)
    if s.phase is Phase.ASKING:  # the open ask says that this state is not here
        s, asked = ask(s, after=s.grant.epoch if s.grant and not s.intact else 0)
        return s, (*effects, *asked)
    return s, effects


def _catch_up(s: Replica, answer: CatchUp) -> Step:
    """No ring for now: apply the record in doubt if it leads to the base, keep the base for others, or fetch it.

    Until the base is here the record is kept: if all that hold the base are lost, it is the newest that is left.
    """
    base, held, final = answer.base, s.prepared, answer.base.step >= s.steps
    effects: tuple[Effect, ...] = ()
    if s.grant and s.intact:
        effects = (StopRing(s.grant.epoch, answer.reason),)
    s = replace(s, intact=False, head=base, equal=(), leaving=(), lagging=())
    if held is not None and state_id.same(held.state_id, base):
        s, written = checkpoint.write(s, base, answer.donors)
        effects = (*effects, Commit(held), *written)
        s = replace(s, state=base, record=None, forwarded=False)
    if s.verified:
        kept = () if final else (Keep(base),)  # the final state is kept anyway, and for longer
        s, asked = ask(s, after=s.seen[1])
        return s, (*effects, *kept, *asked)
    s = replace(s, phase=Phase.FETCHING, fetching=base, log=(), fed=None)
    where = f"training ended at {base}" if final else f"holds {s.state}, the others hold {base}"
    return s, (*effects, DropGradient(f"left behind: {where}"), Fetch(base, answer.donors))
