"""What the leader of one replica decides, from its check-in to the final state: `transition`, one rule per event.

FT-HSDP §4.1 and §4.3, with the corrections of docs/protocol.md: states are compared by lineage instead of step
number, a commit token decides instead of each replica for itself, and a record in doubt is kept until it is known
whether it was committed. control/leader.py turns effects into messages and their outcome into events.
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
    StopRing,
    WriteCheckpoint,
)
from ft_hsdp.core.events import (
    Answered,
    CheckpointDue,
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
from ft_hsdp.core.voting import (
    ask,
    ask_again,
    break_ring,
    end_loop,
    leave_job,
    reduce_step,
    reduced,
    run_batch,
    token_arrived,
)


def transition(s: Replica, event: Event) -> Step:
    """Return the replica after `event`, and what its leader has to do, in this order.

    An event that has nothing to say any more (about another epoch, attempt or state) changes nothing and has no
    effects.
    """
    s, effects = _transition(s, event)
    free = s.phase in (Phase.ASKING, Phase.REDUCING, Phase.FETCHING)  # not between its vote and the verdict
    if s.ended and free:
        s, left = end_loop(s)
        effects = (*effects, *left)
    return s, effects


def _transition(s: Replica, event: Event) -> Step:
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
            return (s, ()) if _a_member_left(s) else _proceed(s)
        case LeaseEnded():
            return _lease_ended(s)
        case RingBroken(epoch, suspect, accuser):
            return _ring_broken(s, epoch, suspect, accuser)
        case Reduced(fence, record, digest):
            return reduced(s, fence, record, digest)
        case TokenArrived(token):
            return token_arrived(s, token)
        case Fetched(base):
            return _fetched(s, base)
        case FetchFailed(base, reason):
            if s.fetching != base:
                return s, ()
            if s.phase in (Phase.FETCHING, Phase.FINAL):
                return ask(replace(s, fetching=None), superseded_epoch=0 if s.intact else s.seen[1])
            return replace(s, phase=Phase.DONE), (Exit(75, f"no donor could serve {base}: {reason}"),)
        case CheckpointWritten(state):
            return _report_writer(s, (checkpoint.own_write_ended(s, state, written=True), ()))
        case CheckpointFailed(state):
            return _report_writer(s, (checkpoint.own_write_ended(s, state, written=False), ()))
        case CheckpointOverdue():
            return _report_writer(s, checkpoint.retry_overdue(s))
        case CheckpointDue():
            return replace(s, requested_checkpoint=max(s.requested_checkpoint, s.ring_state.step + 1)), ()
        case LeaveRequested(how):
            by_script = how != "told"
            s = replace(s, departing=True, quits=s.quits or by_script, stops=s.stops or how == "stops")
            if how == "ended":
                return replace(s, ended=True), ()
            return ask(s) if s.grant is None and s.phase is Phase.ASKING else (s, ())
        case LeaveOverdue():
            # No ring forms, so there is no commit at which it could leave. A script may wait for one, and `stop`
            # ends the others, too.
            waits = s.phase is Phase.ASKING and not s.intact and s.verified and s.departing and not s.quits
            return end_loop(s) if waits and s.state.step and s.policy.keep_last else (s, ())


def _leaving(s: Replica, event: Event) -> Step:
    """Exit only after the others have left the ring.

    A member may still need this replica to pass on the last verdict.
    """
    match event:
        case RingBroken() | GrantShown() | LeaveOverdue() if s.intact:
            return leave_job(s)
        case CheckpointWritten(state) | CheckpointFailed(state) if state == s.writing:
            s = checkpoint.own_write_ended(s, state, isinstance(event, CheckpointWritten))
            return (s, ()) if s.intact else leave_job(s)
    return s, ()


def _started(s: Replica) -> Step:
    """Check in.

    A replica that starts with the final state writes the checkpoint that is missing: no step will follow.
    """
    if s.ring_state.step < s.steps or not s.requested_checkpoint:
        return ask(s)
    s, asked = ask(replace(s, writing=s.state, requested_checkpoint=0))
    return s, (WriteCheckpoint(s.state), *asked)


def _report_writer(before: Replica, step: Step) -> Step:
    """Add a request to `step` if, in phase FINAL, this replica began or ended to write.

    The end of the job waits for that.
    """
    s, effects = step
    if before.phase is not Phase.FINAL or (before.writing is None) == (s.writing is None):
        return step
    s, asked = ask(s)
    return s, (*effects, *asked)


def _ring_broken(s: Replica, epoch: int, suspect: int | None, accuser: int | None) -> Step:
    """Handle a broken ring.

    After the last step no ring is needed, but the writer of the final state may be lost.
    """
    over = s.phase is Phase.FINAL and s.verified
    s, effects = break_ring(s, epoch, suspect=suspect, accuser=accuser)
    if not over or not effects:
        return s, effects
    s, written = _report_writer(s, checkpoint.writer_lost(s, suspect))
    return s, (*effects, *written)


def _a_member_left(s: Replica) -> bool:
    """Return whether a member, but not all that are up to date, left the ring at the last commit.

    It cannot go on, lease or not.
    """
    return bool(s.leaving) and not set(s.up_to_date) <= set(s.leaving)


def _lease_ended(s: Replica) -> Step:
    """Leave the ring on purpose when the lease ends between two steps, so that all members stop and ask together.

    A member that waited for this replica in a ring would take it to hang.
    """
    if s.grant is None or s.phase is not Phase.ASKING:
        return s, ()
    return break_ring(s, s.grant.epoch, f"the lease of replica {s.me} has ended: no lighthouse answers it")


def _answered(s: Replica, answer: Answer) -> Step:
    """Handle the lighthouse's answer to the newest request.

    If it does not fit, ask again: nothing else would follow.
    """
    waits = s.phase is Phase.ASKING or (s.phase is Phase.FINAL and s.fetching is None)
    match answer:
        case Grant():
            after, due = _adopt(s, answer)
            if waits and not due:
                return ask_again(
                    s, f"the grant of epoch {answer.epoch} does not fit: this replica knows epoch {s.seen[1]}"
                )
            return after, due
        case Continue(epoch, step, leave, checkpoint):
            s = replace(s, dismissed=leave, requested_checkpoint=max(s.requested_checkpoint, checkpoint))
            stands = s.grant is not None and (epoch, step) == (s.grant.epoch, s.ring_state.step + 1)
            if stands and s.intact and s.phase is not Phase.FINAL:
                return _proceed(s)
            misfit = f"step {step} of epoch {epoch} is not what was asked for in epoch {s.seen[1]}"
            return ask_again(s, misfit) if waits else (s, ())
        case CatchUp(base):
            if base.step >= s.steps or (waits and not state_id.newer(s.state, base)):
                return _catch_up(s, answer)
            return ask_again(s, f"{base} is to be fetched, this replica holds {s.state}") if waits else (s, ())
        case Finish():
            return replace(s, phase=Phase.DONE), (Exit(0, "every replica has the final state"),)
        case Refused(reason, code, forget):
            dropped: tuple[Effect, ...] = (DropSnapshots(),) if forget else ()
            return replace(s, phase=Phase.DONE), (*dropped, Exit(code, reason))


def _proceed(s: Replica) -> Step:
    """Reduce the next step on the ring that stands: the membership is unchanged."""
    if s.phase is not Phase.ASKING or not s.intact:
        return s, ()
    s = replace(s, phase=Phase.REDUCING)
    return s, (reduce_step(s),)


def _adopt(s: Replica, grant: Grant) -> Step:
    """Adopt a newer grant, unless this replica holds something newer than the grant's base.

    A record in doubt that leads to the base was committed, so it is applied. A replica that does not hold the
    base is behind: it relays, and fetches the base from the grant's donors.
    """
    if (grant.term, grant.epoch) <= s.seen or grant.epoch <= (s.grant.epoch if s.grant else 0):
        return s, ()
    mine = grant.member(s.me, s.incarnation)
    if mine is None:
        return break_ring(s, s.grant.epoch) if s.grant and s.intact else (s, ())
    s = s if mine.number <= s.number else replace(s, number=mine.number)
    stopped = (StopRing(s.grant.epoch, grant.reason),) if s.grant and s.intact else ()
    prepared = s.prepared
    may_commit = prepared is not None and not void(prepared.fence, grant.void)
    resolved = prepared is not None and state_id.same(prepared.state_id, grant.base)
    if not resolved and (
        state_id.newer(s.state, grant.base)
        or (prepared is not None and may_commit and state_id.newer(prepared.state_id, grant.base))
    ):
        s = replace(s, seen=(grant.term, grant.epoch), intact=False, ring_suspects=(), edge=None)
        s, asked = ask(s, superseded_epoch=grant.epoch)
        return s, (*stopped, StopRing(grant.epoch, "stale grant: a member holds a newer state"), *asked)
    state = prepared.state_id if resolved and prepared else s.state
    s = checkpoint.grant_adopted(s, grant)
    effects: list[tuple[Effect, ...]] = [stopped]
    if resolved and prepared:
        s, written = checkpoint.write(replace(s, committed=prepared), grant.base, grant.donors)
        effects.append((Commit(prepared), *written))
    behind = not state_id.same(state, grant.base)
    if behind:
        effects.append((DropGradient(f"left behind: holds {state}, epoch {grant.epoch} builds on {grant.base}"),))
    elif s.log:
        effects.append((DropGradient(f"epoch {grant.epoch} builds on {grant.base}, not on what was fetched"),))
    s = replace(
        s,
        phase=Phase.REDUCING,
        state=state,
        ring_state=grant.base,
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
        fed_state=None if behind else s.fed_state,
        fed_places=() if behind else s.fed_places,
        log=(),
        void=None,
        up_to_date=(),
        leaving=(),
        lagging=(),
        minority=(),
        diverged=(),
        ring_suspects=(),
        edge=None,
        requested_checkpoint=min(s.requested_checkpoint, grant.base.step + 1),
        saved=min(s.saved, grant.base.step),
    )
    effects.append((Configure(grant),))
    if behind:
        effects.append((Fetch(grant.base, grant.donors),))
    s, fed = run_batch(s)
    effects.append(fed)
    effects.append((reduce_step(s),))
    return s, sum(effects, ())


def _fetched(s: Replica, base: StateId) -> Step:
    """Install the fetched base and apply what was committed on top of it meanwhile."""
    if s.fetching != base:
        return s, ()
    state = s.log[-1].state_id if s.log else base
    effects: tuple[Effect, ...] = (InstallSnapshot(base), *(Commit(r) for r in s.log))
    s = replace(s, state=state, committed=s.log[-1] if s.log else None, fetching=None, log=())
    if s.phase in (Phase.FETCHING, Phase.FINAL):
        s, asked = ask(
            replace(s, ring_state=state, record=None, forwarded=False),
            superseded_epoch=0 if s.intact else s.seen[1],
        )
        return s, (*effects, *asked)
    if s.phase is Phase.ASKING:  # the open ask says that this state is not here
        s, asked = ask(s, superseded_epoch=s.grant.epoch if s.grant and not s.intact else 0)
        return s, (*effects, *asked)
    return s, effects


def _catch_up(s: Replica, answer: CatchUp) -> Step:
    """Do without a ring for now.

    Apply the record in doubt if it leads to the base, keep the base for others, or fetch it.

    The record is kept until the base is here: if all replicas that hold the base are lost, it is the newest
    state left.
    """
    base, prepared, final = answer.base, s.prepared, answer.base.step >= s.steps
    effects: tuple[Effect, ...] = ()
    if s.grant and s.intact:
        effects = (StopRing(s.grant.epoch, answer.reason),)
    s = replace(s, intact=False, ring_state=base, up_to_date=(), leaving=(), lagging=())
    if prepared is not None and state_id.same(prepared.state_id, base):
        s, written = checkpoint.write(s, base, answer.donors)
        effects = (*effects, Commit(prepared), *written)
        s = replace(s, state=base, committed=prepared, record=None, forwarded=False)
    if s.verified:
        kept = () if final else (Keep(base),)  # the final state is kept anyway, and for longer
        dropped = (DropGradient(f"the others hold {base}, which is older than what was fetched"),) if s.log else ()
        s, asked = ask(replace(s, fetching=None, log=()), superseded_epoch=s.seen[1])
        return s, (*effects, *dropped, *kept, *asked)
    s = replace(s, phase=Phase.FETCHING, fetching=base, log=(), fed_state=None, fed_places=())
    where = f"training ended at {base}" if final else f"holds {s.state}, the others hold {base}"
    return s, (*effects, DropGradient(f"left behind: {where}"), Fetch(base, answer.donors))
