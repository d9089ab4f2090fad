"""Asking: what a replica's leader does whenever a step ends or breaks: report, feed.

Voting: from the sum that a replica holds to the verdict on it, and what follows from that.

FT-HSDP §4.1 has each replica decide for itself. Here no verdict is drawn from anything but the commit token.
"""

from __future__ import annotations

from dataclasses import replace

from ft_hsdp.core import checkpoint, state_id
from ft_hsdp.core.commit import AttemptId, CommitRecord, CommitToken, fenced
from ft_hsdp.core.effects import (
    BufferUpdate,
    Commit,
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
from ft_hsdp.core.grant import Report
from ft_hsdp.core.replica_state import Phase, Replica, Step


def ask(s: Replica, after: int = 0, pause: bool = False) -> Step:
    """Report the true state and ask for the next step; ``pause``: see `Ask`."""
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
        lagging=s.lagging,
        diverged=s.diverged,
        suspects=s.silent if after else (),
        edge=s.edge if after else None,
        saved=s.saved,
        departs=s.departing,
        number=s.number,
        writing=s.writing is not None and s.head.step >= s.steps,
    )
    return replace(s, phase=Phase.FINAL if s.head.step >= s.steps else Phase.ASKING), (
        RequestGrant(report, pause),
    )


def broken(
    s: Replica,
    epoch: int,
    why: str = "the ring broke",
    suspect: int | None = None,
    accuser: int | None = None,
) -> Step:
    """The ring is of no more use: say so and whom it suspects, keep what is in doubt, ask for a larger epoch.

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
        silent=() if suspect in (None, s.me) else (suspect,),
        edge=None if suspect is None or accuser in (None, suspect) else (accuser, suspect),
    )
    stopped = StopRing(epoch, why)
    if s.phase is Phase.FINAL and s.verified:
        return s, (stopped,)
    s, asked = ask(s, after=epoch)
    return s, (stopped, *asked)


def again(s: Replica, why: str) -> Step:
    """An answer does not fit what this replica knows: leave the ring, if there is one, and ask for a larger epoch.

    Whoever ignored it would have no open request, and would wait for ever.
    """
    epoch = s.seen[1]
    left = (StopRing(epoch, why),) if s.intact else ()
    s, asked = ask(replace(s, intact=False, silent=(), edge=None), after=epoch, pause=True)
    return s, (*left, *asked)


def feed(s: Replica) -> Step:
    """Start on the next batch, unless its gradient is there or under way already."""
    if s.fed is not None and state_id.same(s.fed, s.state):
        return s, ()
    return replace(s, fed=s.state), (RunBatch(s.state.step + 1),)


LEFT = "left on request"
MAX_ATTEMPTS = 3
MAX_SKIPS = 8  # steps in a row without a finite sum; fewer than refill the budget of restarts


def reduced(s: Replica, fence: AttemptId, record: CommitRecord, digest: str) -> Step:
    """All own ranks hold the sum: vote, if the token is here or starts here."""
    if s.phase is not Phase.REDUCING or not fenced(s.fence, fence):
        return s, ()
    if s.spoiled:
        record = replace(record, spoiled=s.spoiled, retries=s.rules.poison_retries)
    s = replace(s, phase=Phase.VOTED, record=record, digest=digest if s.verified else "")
    if _position(s) == 0:
        yes, reason = _vote(s)
        token = CommitToken(fence, False, yes, record.state_id.lineage, reason=reason)
        return _pass_on(s, token)
    if s.token is not None:
        return token_came(replace(s, token=None), s.token)
    return s, ()


def _vote(s: Replica) -> tuple[bool, str]:
    """This replica's vote on the record that it holds."""
    assert s.record is not None
    if s.record.poisoned and not _skips(s, s.record):
        return False, f"gradient of replicas {list(s.record.poisoned)} is not finite"
    if not s.record.contributions:
        return False, "nobody contributed"
    if s.record.doubled:
        return False, f"replicas {list(s.record.doubled)} brought batches that others bring"
    return True, ""


def _skips(s: Replica, record: CommitRecord) -> bool:
    """Whether the record is committed as a step that changes no weight: by choice, or nobody is left."""
    return s.rules.poison == "skip_step" or set(record.contributors) <= set(record.poisoned)


def token_came(s: Replica, token: CommitToken) -> Step:
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
    if s.digest and any(digest != s.digest for _, digest in token.digests):
        yes, reason = False, f"replica {s.me} holds another state than replica {token.digests[0][0]}"
    if yes and s.record.state_id.lineage != token.lineage:
        yes, reason = (
            False,
            f"replica {s.me} holds another sum than replica {s.grant.ring[0] if s.grant else '?'}",
        )
    return _pass_on(s, replace(token, yes=token.yes and yes, reason=token.reason or reason))


def _pass_on(s: Replica, token: CommitToken) -> Step:
    """Pass 1 goes on with this replica's say in it; a ring of one decides at once."""
    token = replace(
        token,
        equal=(*token.equal, s.me) if s.verified else token.equal,
        leaving=(*token.leaving, s.me) if s.departing or s.dismissed else token.leaving,
        digests=(*token.digests, (s.me, s.digest)) if s.digest else token.digests,
        lagging=(*token.lagging, s.me) if s.lags else token.lagging,
        unwritable=(*token.unwritable, s.me) if s.failing else token.unwritable,
        writing=(*token.writing, s.me) if s.writing is not None else token.writing,
        checkpoint=max(token.checkpoint, s.wanted if s.wanted > s.saved else 0),
    )
    s = replace(s, forwarded=token.yes, wanted=max(s.wanted, token.checkpoint))
    if _size(s) == 1:
        return _decide(s, replace(token, verdict=True), ())
    return s, (SendToken(token),)


def _decide(s: Replica, token: CommitToken, passed: tuple[Effect, ...]) -> Step:
    """The verdict is known here. Yes: apply, or log it if the base is not here. No: nobody applies."""
    assert s.record is not None
    if state_id.differ(token.digests):
        return _diverged(s, token, passed)
    if not token.yes:
        return _again(s, token, passed)
    record, s = s.record, checkpoint.heard(s, token)
    applied: tuple[Effect, ...] = (Commit(record),)
    stay = tuple(r for r in token.equal if r not in token.leaving)
    # Who was asked to leave after its vote stays for another step: the others must know before they go on. Who is
    # not wanted stays as the last that holds the state.
    leaves = s.me in token.leaving and (s.departing or bool(stay))
    assert s.grant is not None
    able = [m for m in s.grant.members if m.replica in (stay or token.equal)]
    last = s.rules.keep_last and s.departing and not stay
    s, written = checkpoint.write(s, record.state_id, able, token.unwritable, token.checkpoint > 0 or last)
    if s.verified:
        applied = (*applied, *written)
        s = replace(s, state=record.state_id, skips=s.skips + 1 if record.skipped else 0)
    else:
        s, applied = _log(s, record)
    s = replace(
        s,
        head=record.state_id,
        attempt=0,
        excluded=(),
        spoiled=(),
        record=None,
        forwarded=False,
        void=None,
        equal=tuple(sorted(token.equal)),
        leaving=tuple(sorted(token.leaving)),
        lagging=tuple(sorted(token.lagging)),
        unwritable=tuple(sorted(token.unwritable)),
        saved=record.step if token.checkpoint else s.saved,
    )
    if leaves:
        gone: tuple[Effect, ...] = ()
        s = replace(s, phase=Phase.LEAVING)
        if not stay and _position(s) == _size(s) - 1:  # all leave, and the last to hear the verdict begins
            s, gone = go(s)
        return s, (*passed, *applied, *gone)
    if s.skips >= MAX_SKIPS:
        left = StopRing(s.fence.epoch, f"replica {s.me} leaves")
        end = Exit(75, f"{s.skips} steps in a row had no finite gradient")
        return replace(s, phase=Phase.DONE), (*passed, *applied, left, end)
    s, fed = feed(s) if s.verified and s.head.step < s.steps else (s, ())
    s, asked = ask(s)
    return s, (*passed, *applied, *asked, *fed)


def go(s: Replica) -> Step:
    """Leave the ring, if it stands, and end; but not before the checkpoint of its last state, if it writes it."""
    left = (StopRing(s.grant.epoch, f"replica {s.me} leaves"),) if s.grant is not None and s.intact else ()
    s = replace(s, intact=False)
    if s.writing is not None and state_id.same(s.writing, s.state):
        return s, left
    return replace(s, phase=Phase.DONE), (*left, Exit(0, LEFT))


def _log(s: Replica, record: CommitRecord) -> Step:
    """The base is not here: keep the record for later. A full log is dropped, and a newer base is asked for."""
    if s.lags:
        return s, ()
    if len(s.log) < s.rules.catchup_log_steps:
        return replace(s, log=(*s.log, record)), (BufferUpdate(record),)
    why = f"{len(s.log)} steps were committed before {s.fetching} was here: a newer base is needed"
    return replace(s, log=(), fetching=None), (DropGradient(why),)


def _diverged(s: Replica, token: CommitToken, passed: tuple[Effect, ...]) -> Step:
    """Members hold different states under one name: nothing is committed on them.

    A minority ends, and the others wait for that: whoever left the ring first could keep it from hearing the
    verdict. Without a majority the lighthouse has to halt the job.
    """
    few, why = state_id.minority(token.digests), state_id.describe(token.digests, s.head)
    s = replace(s, record=None, forwarded=False, suspects=few)
    if not few:
        s = replace(s, diverged=tuple(sorted(r for r, _ in token.digests)))
        s, effects = broken(s, s.fence.epoch, why)
        return s, (*passed, *effects)
    if s.me not in few:
        return s, passed
    return replace(s, phase=Phase.DONE), (*passed, StopRing(s.fence.epoch, why), DropSnapshots(), Exit(75, why))


def _again(s: Replica, token: CommitToken, passed: tuple[Effect, ...]) -> Step:
    """No verdict on an intact ring: once more without the poisoned or doubled, or under a larger epoch."""
    assert s.record is not None
    poisoned = () if _skips(s, s.record) else s.record.poisoned
    excluded = tuple(sorted({*s.excluded, *(poisoned or s.record.doubled)}))
    spoiled = {(c.shard, c.index) for c in s.record.contributions if c.replica in poisoned}
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
        return s, (*passed, Reduce(s.fence, s.role, s.head.lineage))
    s = replace(s, forwarded=False)
    s, effects = broken(s, s.fence.epoch)
    return s, (*passed, *effects)


def _position(s: Replica) -> int:
    """Own position in the ring."""
    assert s.grant is not None
    return s.grant.ring.index(s.me)


def _size(s: Replica) -> int:
    """Members of the ring."""
    assert s.grant is not None
    return len(s.grant.members)
