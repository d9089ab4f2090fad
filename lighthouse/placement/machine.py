"""One event in: what the quorum decides, and then what follows for the replicas that are placed on hosts. Pure.

`decide` takes the place of `quorum.transition` where there are hosts. What placement does about a failure is
DeadPool's Table II (`memory.replacement.decide`); which host takes the place of another is
`memory.replacement.assign`; when a replica starts again is `core.restart`.
"""

from __future__ import annotations

from dataclasses import replace

from ft_hsdp.core import restart
from ft_hsdp.core.host_report import HostReport
from ft_hsdp.core.restart import LEAVING, OWN_FAULT, REFILL_STEPS, Cause, GiveUp, Restart
from ft_hsdp.errors import EXIT_CONFIG, EXIT_HARDWARE, EXIT_UNREACHABLE, EXIT_USAGE
from ft_hsdp.memory.hosts import Host
from ft_hsdp.memory.replacement import Action, Evidence
from ft_hsdp.memory.replacement import decide as judge
from lighthouse.placement.fill import fill, tell, with_placement, with_replica
from lighthouse.placement.signs import (
    active_replicas,
    bereft,
    free_hosts,
    is_cut_off,
    is_gone,
    is_lost,
    is_over,
    is_silent,
    leaves,
    says,
    telling,
)
from lighthouse.placement.state import (
    FORMER,
    PlacedReplica,
    Placement,
    Presence,
    PresentHost,
    ReplicaPhase,
    at_rest,
    tried_again,
)
from lighthouse.quorum.events import (
    Asked,
    Commanded,
    Effect,
    Event,
    HostClosed,
    Note,
    ProcessesReported,
    Ticked,
    Withdrawn,
)
from lighthouse.quorum.rules import replace as change
from lighthouse.quorum.state import LighthouseState, Step, training_is_over, wanted
from lighthouse.quorum.transition import transition

FORGOTTEN = 10  # times evict_s: a spare host that is silent for so long is forgotten
HEARD_LATE = 8  # commits that may have been made, and not been heard of, when a rank ends
ENDED = "a rank of it has ended"
REFUSED = "another agent of this host has been started since"


def decide(s: LighthouseState, event: Event) -> Step:
    """Return the state after ``event``, and the effects: those of the quorum, then those of placement."""
    s, effects = transition(s, event)
    if s.policy.placing is None or not (s.presence.since is not None or _concerns(event)):
        return s, effects
    now = getattr(event, "now", None)
    if now is None:
        return s, effects
    before, s = s.presence, _hear(s, event, now)
    if isinstance(event, Asked) or _says_nothing_new(before, event):
        return s, effects  # the path of each step, and of each sign of life: what time changes is seen in a moment
    for replica in range(s.policy.slots):
        s, more = _advance(s, replica, event, now)
        effects += more
    s, more = fill(s, now)
    return s, effects + more


def refusal(s: LighthouseState, report: HostReport) -> str:
    """Return why the agent of a host has to end; "": it goes on."""
    if report.replica is not None and s.policy.placing is not None and s.policy.placing.hosts > 1:
        return "hosts.per_replica of the job is not 1: start `host` on each machine of a replica"
    lives = dict(s.placement.lives).get(Host.parse(report.path).name, ())
    return REFUSED if report.life in lives[:-1] else ""


# What is heard.


def _concerns(event: Event) -> bool:
    orders = isinstance(event, Commanded) and event.action in ("drain-host", "undrain-host")
    return orders or (isinstance(event, ProcessesReported) and event.host is not None)


def _says_nothing_new(before: Presence, event: Event) -> bool:
    """Return whether the report of a host is as its last one."""
    report = event.host if isinstance(event, ProcessesReported) else None
    there = before.host(Host.parse(report.path).name) if report is not None else None
    if report is None or there is None or there.closed is not None:
        return False
    return replace(there.report, number=report.number, address=report.address) == report


def _hear(s: LighthouseState, event: Event, now: float) -> LighthouseState:
    """Take note of a report of a host, of the end of its connection, or of a request of a replica."""
    presence, placement = s.presence, s.placement
    if presence.since is None:
        presence = replace(presence, since=now)
    if isinstance(event, Ticked):
        presence = _without_old(s, presence, now)
    if (missing := s.policy.slots - len(placement.replicas)) > 0:  # before the first grant their number may grow
        placement = replace(placement, replicas=(*placement.replicas, *(PlacedReplica(),) * missing))
    match event:
        case ProcessesReported(host=HostReport() as report) if not refusal(s, report):
            name, known = Host.parse(report.path).name, dict(placement.lives)
            if (lives := known.get(name, ()))[-1:] != (report.life,):
                known[name] = (*lives, report.life)[-FORMER:]
                placement = replace(placement, lives=tuple(sorted(known.items())))
                placement = _tried_again(placement, report.replica)
            there = presence.host(name)
            if there is not None and there.report.life == report.life and report.number <= there.report.number:
                return s
            evict_s, alone = s.policy.evict_s, presence.alone
            returns = there is not None and there.silent(now, presence.since or now, evict_s)
            if returns and (is_cut_off(s, now) or (alone is not None and now < alone + evict_s)):
                presence = replace(presence, alone=now)
            presence = replace(presence, hosts={**presence.hosts, name: PresentHost(report, now)})
        case HostClosed(report):  # another one may have come before the end of its connection was seen
            name = Host.parse(report.path).name
            there = presence.host(name)
            if there is not None and there.report is report:
                presence = replace(presence, hosts={**presence.hosts, name: replace(there, closed=now)})
        case Commanded(action="host-lost", host=name):
            placement = _bury(placement, name)
            presence = replace(presence, hosts={n: each for n, each in presence.hosts.items() if n != name})
        case Commanded(action="drain-host" | "undrain-host" as action, host=name, reason=reason):
            cordoned = {host: why for host, why in placement.cordoned if host != name}
            cordoned |= {name: reason} if action == "drain-host" else {}
            placement = replace(placement, cordoned=tuple(sorted(cordoned.items())))
        case Asked(request):
            who, incarnation = request.report.replica, request.report.incarnation
            before, at, _ = presence.asked.get(who, ("", now, 0.0))
            gap = now - at if before == incarnation else 0.0
            presence = replace(presence, asked={**presence.asked, who: (incarnation, now, gap)})
    return with_placement(s, presence=presence, placement=placement)


def _without_old(s: LighthouseState, presence: Presence, now: float) -> Presence:
    """Return a presence without the spare hosts that are silent for long."""
    used, gone = {name for me in s.placement.replicas for name in me.used}, now - FORGOTTEN * s.policy.evict_s
    old = {name for name, each in presence.hosts.items() if each.heard < gone} - used
    hosts = {name: each for name, each in presence.hosts.items() if name not in old}
    return replace(presence, hosts=hosts) if old else presence


def _tried_again(placement: Placement, replica: int | None) -> Placement:
    """Return a placement in which a replica whose own host was started counts again if it was given up."""
    if replica is None or not placement.replicas[replica].given_up:
        return placement
    replicas = list(placement.replicas)
    replicas[replica] = tried_again(replicas[replica])
    return replace(placement, replicas=tuple(replicas))


def _bury(placement: Placement, name: str) -> Placement:
    """Return a placement in which no process of what was started on a host is left."""

    def without(me: PlacedReplica) -> PlacedReplica:
        return replace(me, buried=(*me.buried, name)) if name in me.used else me

    shadows = tuple((replica, without(me)) for replica, me in placement.shadows)
    return replace(placement, replicas=tuple(map(without, placement.replicas)), shadows=shadows)


# How an incarnation fares.


def _advance(s: LighthouseState, replica: int, event: Event, now: float) -> Step:
    """Look after the newest incarnation of a replica."""
    me, policy, effects = s.placement.replicas[replica], s.policy.placing, list[Effect]()
    if me.phase is ReplicaPhase.RESTS or policy is None:
        return s, ()
    me = _with_ends(s, me, now)
    if not me.how and (found := _started(s, me)) is not None:
        how, pids = found
        facts = {"replica": replica, "incarnation": me.incarnation, "restarts": me.restart.restarts - me.first}
        started = {**facts, "hosts": list(me.used), "how": how, "pids": pids}
        effects.append(Note("ReplicaStarted", me.reason, started))
        me = replace(me, how=how)
    me = _with_commits(s, replica, me)
    if me.contributed and not s.placement.trained:
        s = with_placement(s, placement=replace(s.placement, trained=True))
    if me.prevented and _joined(s, replica, me):
        me = replace(me, prevented="", restart=restart.on_start(me.restart))
        facts = {"replica": replica, "incarnation": me.incarnation, "over": True}
        effects.append(Note("StartPrevented", "what prevented it is over", facts))
    if me.phase is ReplicaPhase.RUNS and (why := _trouble(s, replica, me, event, now)):
        me = replace(me, phase=ReplicaPhase.ENDS, why=why)
    s = with_replica(s, replica, me)
    if is_over(s, me, now):
        who = (replica, me.incarnation)
        done = me.done and telling(me, len(me.used) * policy.each)[0] == "done"
        s, told = tell(s, now, {replica: None}, frozenset({who}), ended=frozenset({replica} if done else ()))
        s, more = _judge(s, replica, me, now)
        return s, (*effects, *told, *more)
    places = range(len(me.used))
    if me.phase is ReplicaPhase.ENDS and all(is_gone(s, me, n) or is_silent(s, me, n, now) for n in places):
        # Others take its place, and it is fenced. What it may have committed is not known.
        shadows = (*s.placement.shadows, (replica, replace(me, since=now)))
        s = with_placement(s, placement=replace(s.placement, shadows=shadows))
        s, more = _judge(s, replica, me, now, exited=False)
        return s, (*effects, *more)
    return s, tuple(effects)


def _with_ends(s: LighthouseState, me: PlacedReplica, now: float) -> PlacedReplica:
    """Return a record with what its hosts say of ranks that ended by themselves."""
    known = {(host, rank.rank): rank for host, rank in me.ended}
    failed, done, fed, usable = me.failed, me.done, me.fed, me.usable
    for name, (life, _) in zip(me.used, me.lives, strict=True):
        present = s.presence.host(name)
        said = present.ranks(me.incarnation) if present is not None and present.report.life == life else None
        if said is not None and (said.ended or said.failed or said.done):
            known |= {(name, rank.rank): rank for rank in said.ended if not rank.killed}
            failed, done = failed or said.failed, done or said.done
            fed, usable = fed or said.fed, usable or said.usable
    ended = tuple((host, rank) for (host, _), rank in sorted(known.items()))
    since = me.since if me.since is not None or not ended else now
    after = replace(me, ended=ended, failed=failed, done=done, fed=fed, usable=usable, since=since)
    return me if after == me else after


def _with_commits(s: LighthouseState, replica: int, me: PlacedReplica) -> PlacedReplica:
    """Return a record that counts the steps whose base an incarnation held; others show no progress."""
    grant = s.grant
    if grant is None or s.head is None or s.head.commit_epoch != grant.epoch:
        return me
    member, begun = grant.member(replica, me.incarnation), grant.base.step
    if member is None or not member.holds_base:
        return replace(me, until=me.until or begun) if me.contributed else me
    if me.contributed and not me.until:
        return me
    before = me.until - me.base if me.contributed else 0
    return replace(me, contributed=True, base=begun - before, until=0)


def _started(s: LighthouseState, me: PlacedReplica) -> tuple[str, list[int]] | None:
    """Return how the ranks of an incarnation were started, and their pids; None: not all are known to be."""
    how, pids = "", list[int]()
    for name, (life, _) in zip(me.used, me.lives, strict=True):
        present = s.presence.host(name)
        said = present.ranks(me.incarnation) if present is not None and present.report.life == life else None
        if said is None or not said.how:
            return None
        how, pids = max(how, said.how), [*pids, *said.pids]
    return how, pids


def _trouble(s: LighthouseState, replica: int, me: PlacedReplica, event: Event, now: float) -> str:
    """Return why an incarnation that runs has to end; "": it goes on."""
    policy = s.policy.placing
    assert policy is not None
    match event:
        case Withdrawn(who, reason) if who == (replica, me.incarnation):
            return reason
        case Commanded("evict", n, reason) if (n, s.views[n].incarnation) == (replica, me.incarnation):
            return f"by the operator: {reason}"
    if me.failed:
        return me.failed
    # One that was left out for its silence, by a lighthouse that has ended since, does not ask either.
    heard = _takes_part(s, replica, me) or (me.contributed and me.done)
    if not heard and now >= max(me.due, s.presence.since or 0.0) + policy.start_s:
        return f"it has not asked for a step within {policy.start_s:g} s (timeouts.start_s)"
    if any(rank.code not in LEAVING for _, rank in me.ended):
        return ENDED
    late = now >= (me.since or now) + policy.together_s and not s.finished  # then a script may go on
    if late and me.ended and len(me.ended) < len(me.used) * policy.each:
        return f"only {len(me.ended)} of its ranks have ended"
    for position, name in enumerate(me.used):
        present = s.presence.host(name)
        if present is not None and present.report.life != me.lives[position][0]:
            return f"the agent of host {name} was started again"
        if name in me.buried or is_lost(s, name, now):
            return f"host {name} is lost"
    return ""


def _joined(s: LighthouseState, replica: int, me: PlacedReplica) -> bool:
    """Return whether an incarnation has asked for a step."""
    return me.contributed or _takes_part(s, replica, me)


def _takes_part(s: LighthouseState, replica: int, me: PlacedReplica) -> bool:
    """Return whether an incarnation has asked in this term, or is a member of the grant."""
    asked = s.presence.asked.get(replica, ("",))[0] == me.incarnation
    return asked or (s.grant is not None and s.grant.member(replica, me.incarnation) is not None)


def _judge(s: LighthouseState, replica: int, me: PlacedReplica, now: float, *, exited: bool = True) -> Step:
    """Decide what follows the end of an incarnation: DeadPool's Table II, and when the replica starts again."""
    policy = s.policy.placing
    assert policy is not None
    ranks = len(me.used) * policy.each
    kind, rank, host = telling(me, ranks)
    lost = [name for n, name in enumerate(me.used) if not is_gone(s, me, n)]
    silent = any(is_silent(s, me, n, now) for n in range(len(me.used)))
    kind = "host lost" if lost and rank is None else kind
    if me.why not in ("", ENDED) and not lost and not silent and rank is not None and bereft(rank):
        kind = "evicted"  # all were to be killed, and this one saw another one go
    step = s.head.step if s.head is not None else 0
    committed = (me.until or step) - me.base if me.contributed else 0
    shows = rank is not None and (me.why in ("", ENDED) or restart.code_of(rank) == EXIT_HARDWARE)
    why = says(rank) if rank is not None and shows else me.why or f"all ranks ended: {kind}"
    facts: dict[str, object] = {"replica": replica, "incarnation": me.incarnation}
    codes = {str(r.rank): r.code for _, r in me.ended}
    effects: list[Effect] = [Note("ReplicaExited", why, {**facts, "kind": kind, "codes": codes})]
    rests = at_rest(replace(me, ended=(), failed="", why=why, since=None, contributed=False), policy.hosts)
    if not exited:
        rests = replace(rests, run="", first=me.restart.restarts + 1)
    again = replace(me.restart, restarts=me.restart.restarts + 1)
    if kind == "done":
        return with_replica(s, replica, replace(rests, places=())), tuple(effects)
    if kind in ("left", "exit 0", "SIGTERM") and (leaves(s, replica, me) or s.finished or training_is_over(s)):
        return with_replica(s, replica, replace(rests, restart=again, done=False)), tuple(effects)
    code, cause = restart.code_of(rank) if rank is not None else None, f"{kind}: {why}"
    narrow, too_few = me.narrow.after_run(
        ranks,
        policy.ranks,
        began=not me.failed,
        contributed=me.contributed,
        elsewhere=bool(lost or silent) or kind in ("left", "exit 0") or code in (EXIT_HARDWARE, EXIT_UNREACHABLE),
    )
    rests = replace(rests, narrow=narrow)
    then: Restart | GiveUp
    if too_few:
        if ranks < narrow.least:
            effects.append(Note("TooFewRanks", f"{restart.TOO_FEW}; {cause}", {**facts, "ranks": ranks}))
        state, then = restart.on_narrow_end(me.restart, policy.restart, cause)
        return _again(s, replica, replace(rests, restart=state), then, now, effects)
    said = rank.cause if rank is not None else ""
    # A first start has the wrong script: that is an error of the operator.
    changed = said == Cause.CHANGED and me.restart.restarts > 0
    if me.failed or ((changed or said == Cause.SHORTAGE) and not _joined(s, replica, me)):
        state, then = restart.on_shortage(me.restart, policy.restart, cause, now, bounded=not changed)
        prevents = Cause.CHANGED if changed else Cause.SHORTAGE
        late = changed and isinstance(then, Restart) and then.delay_s >= restart.SHORTAGE_S[1]
        if me.prevented != prevents or late:  # a changed script is named again
            effects.append(Note("StartPrevented", cause, {**facts, "cause": prevents}))
        rests = replace(rests, restart=state, prevented=prevents)
        return _again(s, replica, rests, then, now, effects, prevented=True)
    s, blamed = _blame(s, replica, me, why, code in OWN_FAULT or said not in ("", Cause.TEMPORARY, Cause.HARDWARE))
    effects += blamed
    if code in (EXIT_CONFIG, EXIT_USAGE) and not me.contributed and not step:
        return _give_up(s, replica, rests, why, now, effects, wrong=why)
    own_fault = code is not None and restart.own_fault(code) and not (lost or (rank is not None and bereft(rank)))
    counts = dict(me.failed_on) if committed < REFILL_STEPS else {}
    fatal = (
        (step + 1, me.fatal[1] + 1 if me.fatal[0] == step + 1 else 1)
        if own_fault and (me.fed is not None or _joined(s, replica, me))
        else me.fatal
    )
    if blamed:  # the units have ended it, and not the step
        fatal = (0, 0)
    if own_fault:
        counts[host] = counts.get(host, 0) + 1
    rests = replace(rests, failed_on=tuple(sorted(counts.items())), fatal=fatal)
    others = [s.placement.replicas[n].fatal for n in active_replicas(s) if n != replica]
    times = min([fatal[1], *(times if at == fatal[0] else 0 for at, times in others)])
    beside = [s.placement.replicas[n].contributed for n in active_replicas(s) if n != replica]
    trains = step > me.base and (committed == 0 or any(beside))
    found = judge(Evidence(code, bool(lost), counts.get(host, 0), trains, times if own_fault else 0))
    if found.action is Action.HALT:
        halted = f"step {fatal[0]}: {found.reason}; the last time {why}"
        effects.append(Note("JobGivenUp", halted, {**facts, "step": fatal[0]}))
        s, told = _halt(s, halted)
        effects += told
    free, there = free_hosts(s, replica, now), s.presence.host(host)
    given = there is not None and bool(there.report.only)  # its launcher gives another one
    vain = not free and not given and (policy.hosts == 1 or not any(beside))
    if code == EXIT_HARDWARE and vain and any(each.report.home for each in s.presence.hosts.values()):
        # No other machine comes (`up`), and none is lent to it, or nobody trains meanwhile.
        return _give_up(s, replica, rests, why, now, effects)
    replaceable = code == EXIT_HARDWARE or given or bool(free)
    if found.cordoned and replaceable and host not in dict(s.placement.cordoned):
        cordoned = tuple(sorted({**dict(s.placement.cordoned), host: found.reason}.items()))
        s = with_placement(s, placement=replace(s.placement, cordoned=cordoned))
        effects.append(Note("HostCordoned", f"{found.reason}: {why}", {"replica": replica, "host": host}))
    if lost and not own_fault:
        state, then = again, Restart(0.0, f"{cause}; a lost host costs none of the budget")
    else:
        error = restart.essence(rank.why) if rank is not None and said else ""
        unreached = code == EXIT_UNREACHABLE and me.restart.restarts > 0
        state, then = restart.on_loss(me.restart, policy.restart, max(committed, 0), cause, unreached, error)
        active = [state, *(s.placement.replicas[n].restart for n in active_replicas(s) if n != replica)]
        alike = restart.ends_all((each.error, each.same) for each in active)
        if said == Cause.SCRIPT and not s.placement.trained and alike:
            wrong = f"each replica ends with the same error before the first step: {why}"
            return _give_up(s, replica, rests, why, now, effects, wrong=wrong)
    return _again(s, replica, replace(rests, restart=state), then, now, effects)


def _blame(s: LighthouseState, replica: int, me: PlacedReplica, why: str, own_error: bool) -> Step:
    """Blame the units that were in flight, if they have ended processes again and again."""
    known, step = s.placement.fatal, s.head.step + 1 if s.head is not None else 1
    others = [s.placement.replicas[n].fatal for n in active_replicas(s) if n != replica]
    # Each replica has other units: what ends all of them, about as often, is the step. Commits may be heard of
    # between their ends.
    mine = me.fatal[1] if me.fatal[0] == step else 0
    first = max(0, step - HEARD_LATE)
    all_end = others and all(first < at <= step and times + 1 >= mine for at, times in others)
    units = me.fed if own_error and not all_end else None
    after = known.after_end(replica, units, me.usable)
    s = with_placement(s, placement=replace(s.placement, fatal=after))
    if units is None or after.blamed == known.blamed:
        return s, ()
    facts = dict(zip(("shard", "index", "units"), units, strict=True), replica=replica, incarnation=me.incarnation)
    return s, (Note("BatchBlamed", f"it ended its process again: {why}", facts),)


def _again(
    s: LighthouseState,
    replica: int,
    rests: PlacedReplica,
    then: Restart | GiveUp,
    now: float,
    effects: list[Effect],
    **facts: object,
) -> Step:
    """Start a replica again after a pause, or give it up; ``facts`` are told of the restart."""
    if isinstance(then, GiveUp):
        return _give_up(s, replica, rests, then.reason, now, effects)
    facts |= {"replica": replica, "incarnation": rests.incarnation, "delay_s": then.delay_s}
    rests = replace(rests, due=now + then.delay_s, why=then.reason, done=False)
    return with_replica(s, replica, rests), (*effects, Note("RestartScheduled", then.reason, facts))


def _give_up(
    s: LighthouseState,
    replica: int,
    rests: PlacedReplica,
    why: str,
    now: float,
    effects: list[Effect],
    *,
    wrong: str = "",
) -> Step:
    """Never start a replica again. The job is halted if no other one is left, or if what it runs is ``wrong``."""
    s = with_replica(s, replica, replace(rests, given_up=why, places=()))
    if not wrong:  # else the others wait for it until they leave
        s, told = tell(s, now, {replica: None}, lost=frozenset({replica}))
        effects = [*effects, *told]
    effects = [*effects, Note("ReplicaLost", why, {"replica": replica})]
    if wrong:
        s = with_placement(s, placement=replace(s.placement, wrong=True))
    bound = any(each.report.replica is not None for each in s.presence.hosts.values())  # it may be started again
    lost = not bound and all(me.given_up for n, me in enumerate(s.placement.replicas) if wanted(s, n))
    if wrong or lost:
        s, more = _halt(s, wrong or f"every replica is lost: {why}")
        effects += more
    return s, tuple(effects)


def _halt(s: LighthouseState, why: str) -> Step:
    return (s, ()) if s.halted else (change(s, halted=why), (Note("JobHalted", why),))
