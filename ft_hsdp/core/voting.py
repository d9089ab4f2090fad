"""From the reduced gradient to the verdict on it, and what a replica does next: apply, retry, leave, or ask again.

FT-HSDP §4.1 lets each replica decide for itself whether a step succeeded. Here only the commit token decides: the
leaders pass it round their ring twice. Pass 1 collects the votes, pass 2 carries the verdict.
"""

from __future__ import annotations

from dataclasses import replace

from ft_hsdp.core import checkpoint, state_id
from ft_hsdp.core.commit import AttemptId, CommitRecord, CommitToken
from ft_hsdp.core.effects import (
    BufferUpdate,
    Commit,
    DropCopies,
    DropGradient,
    DropSnapshots,
    Effect,
    Exit,
    Reduce,
    RequestGrant,
    RunBatch,
    SendToken,
    StopRing,
)
from ft_hsdp.core.grant import Member, Report
from ft_hsdp.core.replica_state import Phase, Replica, Step
from ft_hsdp.core.units import head, size


def ask(s: Replica, superseded_epoch: int = 0, pause: bool = False) -> Step:
    """Report the state and return the `RequestGrant` for the next step, in phase ASKING, or FINAL at the end.

    The ring of `superseded_epoch` (0: none) is over for this replica, so that only a larger epoch helps. A
    `pause` comes before the request is sent (see `effects.RequestGrant`).
    """
    final = s.ring_state.step >= s.steps
    report = Report(
        replica=s.me,
        incarnation=s.incarnation,
        state=s.state,
        step=s.ring_state.step + 1,
        epoch=s.grant.epoch if s.grant else 0,
        after=superseded_epoch,
        max_term=s.seen[0],
        prepared=s.prepared,
        void=s.void,
        doubt=s.in_doubt,
        equal=s.up_to_date,
        leaving=s.leaving,
        lagging=s.lagging,
        diverged=s.diverged,
        suspects=s.ring_suspects if superseded_epoch else (),
        edge=s.edge if superseded_epoch else None,
        saved=s.saved,
        departs=s.departing,
        number=s.number,
        writing=s.writing is not None and final,
        committed=s.committed if superseded_epoch or s.leaving or final or (s.grant and _size(s) == 1) else None,
    )
    return replace(s, phase=Phase.FINAL if final else Phase.ASKING), (RequestGrant(report, pause),)


def break_ring(
    s: Replica,
    epoch: int,
    why: str = "the ring broke",
    suspect: int | None = None,
    accuser: int | None = None,
) -> Step:
    """Leave the ring of `epoch`, keep what is in doubt, and return the request for a larger epoch.

    A replica that has not passed on a yes never will, so its attempt is void: no member can have committed it.
    Nothing happens if the ring does not stand here; one that holds the final state requests nothing.

    Args:
        s: the replica.
        epoch: the epoch of the ring that broke.
        why: the reason that the other members are told.
        suspect: the replica that is held responsible, if there is one.
        accuser: the neighbour of the suspect that blames it.
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
        ring_suspects=() if suspect in (None, s.me) else (suspect,),
        edge=None if suspect is None or accuser in (None, suspect) else (accuser, suspect),
    )
    stopped = StopRing(epoch, why)
    if s.phase is Phase.FINAL and s.verified:
        return s, (stopped,)
    s, asked = ask(s, superseded_epoch=epoch)
    return s, (stopped, *asked)


def ask_again(s: Replica, why: str) -> Step:
    """Leave the ring and return a request for a larger epoch: an answer does not fit what is known here.

    It is sent after a pause. The other members are told `why`. To ignore the answer would leave this replica
    without an open request: it would wait for ever.
    """
    epoch = s.seen[1]
    left = (StopRing(epoch, why),) if s.intact else ()
    s, asked = ask(replace(s, intact=False, ring_suspects=(), edge=None), superseded_epoch=epoch, pause=True)
    return s, (*left, *asked)


def run_batch(s: Replica) -> Step:
    """Return `RunBatch` for the next batch, unless its gradient is computed or being computed already.

    What is computed already counts if it begins with the same units as what is due; then only the rest is
    missing. If another one was started, `DropGradient` comes first.
    """
    places = s.places
    if not places:
        return s, ()
    started = s.fed_state is not None and state_id.same(s.fed_state, s.state)
    common = min(size(places), size(s.fed_places))
    if started and head(places, common) == head(s.fed_places, common):
        return replace(s, fed_places=max(places, s.fed_places, key=size)), ()
    dropped = (DropGradient("the grant deals other units than those that were started"),) if started else ()
    assert s.grant is not None
    step = s.state.step + 1
    fed = RunBatch(step, places, s.grant.following(step, s.me))
    return replace(s, fed_state=s.state, fed_places=places), (*dropped, fed)


def reduce_step(s: Replica) -> Reduce:
    """Return the order to reduce the attempt that is under way."""
    return Reduce(s.fence, s.role, s.ring_state.lineage, s.places if s.role == "contribute" else ())


LEFT = "left on request"
QUIT = "its script has ended its part of the job"
MAX_ATTEMPTS = 3  # at one step in one epoch; then a larger epoch is asked for
# Steps in a row without a finite sum, after which the replica ends; fewer than refill the budget of restarts.
MAX_SKIPS = 8


def reduced(s: Replica, fence: AttemptId, record: CommitRecord, digest: str) -> Step:
    """Return the vote on the sum that all own ranks hold, if the token is here or starts here.

    The `record` is that of the attempt `fence`, which is ignored if it is not the current one. The `digest` is
    the hash of the compared slice of the base state; "" if this replica does not hold it.
    """
    if s.phase is not Phase.REDUCING or fence != s.fence:
        return s, ()
    if s.spoiled:
        record = replace(record, spoiled=s.spoiled, retries=s.policy.poison_retries)
    s = replace(s, phase=Phase.VOTED, record=record, digest=digest if s.verified else "")
    if _position(s) == 0:
        yes, reason = _vote(s)
        token = CommitToken(fence, False, yes, record.state_id.lineage, reason=reason)
        return _pass_on(s, token)
    if s.token is not None:
        return token_arrived(replace(s, token=None), s.token)
    return s, ()


def _vote(s: Replica) -> tuple[bool, str]:
    """Return this replica's vote on the record that it holds, and the reason if it is a no."""
    assert s.record is not None
    if s.record.poisoned and not _skips(s, s.record):
        return False, s.record.fault
    if not s.record.contributions:
        return False, "no replica contributed"
    if wrong := s.record.impossible(s.grant is not None and s.grant.shared):
        return False, wrong
    if s.record.doubled:
        return False, s.record.fault
    return True, ""


def _skips(s: Replica, record: CommitRecord) -> bool:
    """Return whether a yes commits the record as a step that changes no weight.

    The operator chose that, or no contributor is left.
    """
    return s.policy.poison == "skip_step" or set(record.contributors) <= set(record.poisoned)


def token_arrived(s: Replica, token: CommitToken) -> Step:
    """Handle the commit token from the left neighbour, and return what follows from the vote or the verdict.

    In pass 1 the own vote is added and the token passed on; if the own sum is not complete, the token waits
    here. Pass 1 that is back at the first member, and pass 2, carry the verdict. A `token` about another attempt
    is ignored.
    """
    if s.phase not in (Phase.REDUCING, Phase.VOTED) or token.fence != s.fence:
        return s, ()
    if token.verdict and s.record is None:
        return s, ()
    if token.verdict:
        forward = () if _position(s) == _size(s) - 1 else (SendToken(token),)
        return _decide(s, token, forward)
    if s.phase is Phase.REDUCING:
        return replace(s, token=token), ()
    if _position(s) == 0:
        return _decide(s, replace(token, verdict=True), (SendToken(replace(token, verdict=True)),))
    assert s.record is not None
    yes, reason = _vote(s)
    if s.digest and any(digest != s.digest for _, digest in token.digests):
        yes, reason = False, f"replica {s.me} holds another state than replica {token.digests[0][0]}"
    if yes and s.record.state_id.lineage != token.lineage:
        yes, reason = (
            False,
            f"replica {s.me} holds another sum than replica {s.grant.ring[0] if s.grant else '?'}",
        )
    return _pass_on(s, replace(token, yes=token.yes and yes, reason=token.reason or reason))


def _pass_on(s: Replica, token: CommitToken) -> Step:
    """Send pass 1 on with this replica's part in it. A ring of one decides at once."""
    token = replace(
        token,
        equal=(*token.equal, s.me) if s.verified else token.equal,
        leaving=(*token.leaving, s.me) if s.departing or s.dismissed else token.leaving,
        digests=(*token.digests, (s.me, s.digest)) if s.digest else token.digests,
        lagging=(*token.lagging, s.me) if s.lags else token.lagging,
        unwritable=(*token.unwritable, s.me) if s.checkpoint_failed else token.unwritable,
        writing=(*token.writing, s.me) if s.writing is not None else token.writing,
        checkpoint=max(token.checkpoint, s.requested_checkpoint if s.requested_checkpoint > s.saved else 0),
        stop=token.stop or s.stops,
    )
    s = replace(s, forwarded=token.yes, requested_checkpoint=max(s.requested_checkpoint, token.checkpoint))
    if _size(s) == 1:
        return _decide(s, replace(token, verdict=True), ())
    return s, (SendToken(token),)


def _decide(s: Replica, token: CommitToken, forward: tuple[Effect, ...]) -> Step:
    """Act on the verdict. Yes: apply the record, or buffer it if its base is not here. No: retry."""
    assert s.record is not None
    if state_id.differ(token.digests):
        return _diverged(s, token, forward)
    if not token.yes:
        return _retry(s, token, forward)
    record, grant, s = s.record, s.grant, checkpoint.token_decided(s, token)
    assert grant is not None
    if token.stop:
        token, s = replace(token, leaving=grant.ring), replace(s, departing=True, quits=True, stops=True)
    applied: tuple[Effect, ...] = (Commit(record),)
    staying = tuple(r for r in token.equal if r not in token.leaving)
    # A replica that was told to leave after its vote stays for another step: the others must know before they
    # go on. A dismissed one stays if it is the last that holds the state.
    leaves = s.me in token.leaving and (s.departing or bool(staying))
    able = [m for m in grant.members if m.replica in (staying or token.equal)]
    last = s.policy.keep_last and (record.step >= s.steps or (s.departing and not staying))
    s, written = checkpoint.write(s, record.state_id, able, token.unwritable, token.checkpoint > 0 or last)
    if s.verified:
        applied = (*applied, *written)
        skips = s.skips_in_a_row + 1 if record.skipped else 0
        s = replace(s, state=record.state_id, committed=record, skips_in_a_row=skips)
    else:
        s, applied = _buffer(s, record)
    s = replace(
        s,
        ring_state=record.state_id,
        attempt=0,
        excluded=(),
        spoiled=(),
        record=None,
        forwarded=False,
        void=None,
        up_to_date=tuple(sorted(token.equal)),
        leaving=tuple(sorted(token.leaving)),
        lagging=tuple(sorted(token.lagging)),
        unwritable=tuple(sorted(token.unwritable)),
        saved=record.step if token.checkpoint else s.saved,
    )
    if leaves:
        gone: tuple[Effect, ...] = ()
        s = replace(s, phase=Phase.LEAVING)
        if not staying and _position(s) == _size(s) - 1:  # all leave; the last one to hear the verdict goes first
            s, gone = leave_job(s)
        return s, (*forward, *applied, *gone)
    if s.skips_in_a_row >= MAX_SKIPS:
        left = StopRing(s.fence.epoch, f"replica {s.me} leaves")
        end = Exit(75, f"{s.skips_in_a_row} steps in a row had no finite gradient")
        return replace(s, phase=Phase.DONE), (*forward, *applied, left, end)
    s, fed = run_batch(s) if s.verified and s.ring_state.step < s.steps else (s, ())
    s, asked = ask(s)
    return s, (*forward, *applied, *asked, *fed)


def leave_job(s: Replica) -> Step:
    """Leave the ring, if it stands, and return `Exit`, unless the state is still being written to a checkpoint."""
    left = (StopRing(s.grant.epoch, f"replica {s.me} leaves"),) if s.grant is not None and s.intact else ()
    s = replace(s, intact=False)
    if s.writing is not None and state_id.same(s.writing, s.state):
        return s, left
    done = s.quits and s.verified
    return replace(s, phase=Phase.DONE), (*left, Exit(0, QUIT if done else LEFT, done, done and s.stops))


def end_loop(s: Replica) -> Step:
    """Leave at once, with the state that the ranks hold: they train no further step.

    The replica is not between its vote and the verdict. The others repeat the step under way without it, unless
    their loops end, too. The lowest one that holds the state writes it, if it is to be kept and was not due
    anyway, and returns `Exit` after that. Without a ring each one writes: it is not known who lives.
    """
    able = [Member(s.me, s.incarnation, "contribute")]
    if s.grant is not None and s.intact:
        members = s.grant.members
        able = [m for m in members if (m.replica in s.up_to_date if s.up_to_date else m.holds_base)]
    written: tuple[Effect, ...] = ()
    state, every = s.state, s.policy.checkpoint_every
    if s.policy.keep_last and s.verified and state.step and not checkpoint.due(state.step, every, s.steps):
        s, written = checkpoint.write(s, state, able, demanded=True)
    s, gone = leave_job(replace(s, phase=Phase.LEAVING))
    return s, (*written, *gone)


def _buffer(s: Replica, record: CommitRecord) -> Step:
    """Keep the record until its base is here.

    A full log is dropped, and the next request asks for a newer base.
    """
    if s.lags:
        return s, ()
    if len(s.log) < s.policy.catchup_log_steps:
        return replace(s, log=(*s.log, record)), (BufferUpdate(record),)
    why = f"{len(s.log)} steps were committed before {s.fetching} was here: a newer base is needed"
    return replace(s, log=(), fetching=None), (DropGradient(why),)


def _diverged(s: Replica, token: CommitToken, forward: tuple[Effect, ...]) -> Step:
    """Handle members that hold different states under one name: commit nothing on them.

    A minority ends. The majority stays in the ring until that has happened: a member that left at once could
    keep the minority from hearing the verdict. What its hosts keep of the minority's shards has the name of the
    right state, so it is dropped before anybody looks for a source. Without a majority all leave the ring, and
    the lighthouse halts the job.
    """
    minority, why = state_id.minority(token.digests), state_id.describe(token.digests, s.ring_state)
    s = replace(s, record=None, forwarded=False, minority=minority)
    if not minority:
        s = replace(s, diverged=tuple(sorted(r for r, _ in token.digests)))
        s, effects = break_ring(s, s.fence.epoch, why)
        return s, (*forward, *effects)
    if s.me not in minority:
        return s, (*forward, DropCopies(minority))
    return replace(s, phase=Phase.DONE), (*forward, StopRing(s.fence.epoch, why), DropSnapshots(), Exit(75, why))


def _retry(s: Replica, token: CommitToken, forward: tuple[Effect, ...]) -> Step:
    """Reduce once more after a no.

    On the same ring without the poisoned or doubled, at last under a larger epoch.
    """
    assert s.record is not None
    poisoned = () if _skips(s, s.record) else s.record.poisoned
    excluded = tuple(sorted({*s.excluded, *(poisoned or s.record.doubled)}))
    spoiled = {c.run for c in s.record.contributions if c.replica in poisoned}
    if s.attempt + 1 < MAX_ATTEMPTS:
        s = replace(
            s,
            phase=Phase.REDUCING,
            attempt=s.attempt + 1,
            excluded=excluded,
            spoiled=tuple(sorted(spoiled.union(s.spoiled))),
            record=None,
            forwarded=False,
            token=None,
        )
        return s, (*forward, reduce_step(s))
    s = replace(s, forwarded=False)
    s, effects = break_ring(s, s.fence.epoch)
    return s, (*forward, *effects)


def _position(s: Replica) -> int:
    assert s.grant is not None
    return s.grant.ring.index(s.me)


def _size(s: Replica) -> int:
    assert s.grant is not None
    return len(s.grant.members)
