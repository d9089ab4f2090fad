"""Asking: what a replica's leader does whenever a step ends or breaks: report, feed."""

from __future__ import annotations

from dataclasses import replace

from ft_hsdp.core import lineage
from ft_hsdp.core.assignment import Report
from ft_hsdp.core.effects import Ask, Effect, Feed, StopRing
from ft_hsdp.core.standing import Phase, Replica

Step = tuple[Replica, tuple[Effect, ...]]


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
    return replace(s, phase=Phase.FINAL if s.head.step >= s.steps else Phase.ASKING), (Ask(report, pause),)


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
    if s.fed is not None and lineage.same(s.fed, s.state):
        return s, ()
    return replace(s, fed=s.state), (Feed(s.state.step + 1),)
