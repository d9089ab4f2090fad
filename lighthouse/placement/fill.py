"""Where replicas run: hosts for those that need some, and their next incarnations. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ft_hsdp.core.incarnation import IncarnationId
from ft_hsdp.memory.hosts import Host
from ft_hsdp.memory.replacement import Assignment, assign
from lighthouse.placement.signs import is_over, is_powerless, usable_hosts
from lighthouse.placement.state import PlacedReplica, Placement, Presence, ReplicaPhase
from lighthouse.quorum.events import PLACEMENT, Effect, Note, ProcessesReported
from lighthouse.quorum.rules import Incarnation
from lighthouse.quorum.rules import replace as change
from lighthouse.quorum.state import LighthouseState, Step, leased_to, wanted
from lighthouse.quorum.transition import transition


def with_replica(s: LighthouseState, replica: int, me: PlacedReplica) -> LighthouseState:
    """Return ``s`` with the record of a replica."""
    replicas = s.placement.replicas
    if replicas[replica] == me:
        return s
    replicas = (*replicas[:replica], me, *replicas[replica + 1 :])
    return with_placement(s, placement=replace(s.placement, replicas=replicas))


def tell(
    s: LighthouseState,
    now: float,
    running: Mapping[int, str | None],
    exited: frozenset[Incarnation] = frozenset(),
    lost: frozenset[int] = frozenset(),
    ended: frozenset[int] = frozenset(),
) -> Step:
    """Tell the quorum what runs, as a supervisor would."""
    return transition(s, ProcessesReported(running, exited, lost, now, PLACEMENT, ended=ended))


def with_placement(
    s: LighthouseState, *, presence: Presence | None = None, placement: Placement | None = None
) -> LighthouseState:
    """Return ``s`` with another presence or placement; the same object if nothing has changed."""
    presence, placement = presence or s.presence, placement or s.placement
    if presence is s.presence and placement == s.placement:
        return s
    return change(s, presence=presence, placement=placement)


# Where replicas run.


def fill(s: LighthouseState, now: float) -> Step:
    """Give hosts to replicas that need some, and start those that are due."""
    policy, effects = s.policy.placing, list[Effect]()
    assert policy is not None
    s, gone = _without_old_shadows(s, now)
    effects += gone
    due = [n for n in range(s.policy.slots) if _may_start(s, n, now)]
    if not due:
        return s, tuple(effects)
    found = _assignments(s, due, now)
    for replica in due:
        me, given = s.placement.replicas[replica], found[replica]
        hosts = given.hosts
        if given.missing:
            waits = now - (me.since if me.since is not None else now)
            s = with_replica(s, replica, me := replace(me, since=now if me.since is None else me.since))
            least = policy.shrink_to and max(policy.shrink_to, me.narrow.least)
            hosts = given.left(policy.each, least) if s.head else ()
            # One that had fewer ranks has waited for hosts already, unless it has lost another one.
            had, too_few = len(me.used), len(me.used) * policy.each < me.narrow.least
            waited = waits >= policy.place_s or _left(s, given)
            if not (waited or (0 < had < policy.hosts and (too_few or len(hosts) == had))):
                continue
            if not hosts and not s.views[replica].lost:
                s, told = tell(s, now, {replica: None}, lost=frozenset({replica}))
                away = ", ".join(given.hosts[n].name or "?" for n in given.missing)
                effects += (
                    *told,
                    Note(
                        "ReplicaUnplaced",
                        f"no host for {len(given.missing)} of its places",
                        {"replica": replica, "missing": away},
                    ),
                )
            if not hosts:
                continue
        else:
            effects += _swaps(s, replica, me, given)
            me = replace(me, places=tuple(map(str, given.hosts)))
        s, more = _start(s, replica, me, hosts, now)
        effects += more
    return s, tuple(effects)


def _may_start(s: LighthouseState, replica: int, now: float) -> bool:
    me = s.placement.replicas[replica]
    over = s.finished or s.halted or me.given_up or me.done
    free = me.phase is ReplicaPhase.RESTS and not leased_to(s, replica, now)
    hosted = me.incarnation or any(each.report.replica in (None, replica) for each in s.presence.hosts.values())
    return bool(free and hosted and not over and wanted(s, replica) and now >= me.due)


def _left(s: LighthouseState, given: Assignment) -> bool:
    """Return whether the hosts that a replica lacks have left on request: others need not wait for it."""
    lacked = [s.presence.host(given.hosts[n].name) for n in given.missing]
    return all(each is not None and each.report.leaving for each in lacked)


def _assignments(s: LighthouseState, due: list[int], now: float) -> dict[int, Assignment]:
    """Return where replicas would run that are to be started: others stay where they are."""
    policy = s.policy.placing
    assert policy is not None
    usable, taken, places = usable_hosts(s, now), set[str](), dict[int, list[Host]]()
    bound = {name: each.report.replica for name, each in s.presence.hosts.items()}
    for replica, me in enumerate(s.placement.replicas):
        if replica in due:
            blank = [Host("", "", f"?{replica}.{n}") for n in range(policy.hosts)]
            own = [host for name, host in usable.items() if bound[name] == replica]
            before = [Host.parse(path) for path in me.places] or blank
            places[replica] = own[:1] if own and before[0].name not in usable else before
        elif me.phase is not ReplicaPhase.RESTS:
            places[replica] = [Host.parse(path) for path in me.places]
            taken |= set(me.used)
    lost = {host.name for hosts in places.values() for host in hosts} - usable.keys() - taken
    held = {host.name for hosts in places.values() for host in hosts}
    free = usable.keys() - (held | taken)
    spares = [host for name, host in usable.items() if name in free and bound[name] is None]
    shrunk = {n: len(s.placement.replicas[n].used) for n in places if n not in due}
    shrunk = {n: count for n, count in shrunk.items() if count < policy.hosts}
    return assign(places, lost, spares, policy.apart, shrunk=shrunk)


def _swaps(s: LighthouseState, replica: int, me: PlacedReplica, given: Assignment) -> tuple[Note, ...]:
    """Return an event for each host that takes the place of another one."""
    notes, policy = [], s.policy.placing
    assert policy is not None
    for position, (before, host) in enumerate(zip(me.names, given.hosts, strict=False)):
        if before != host.name:
            cordoned = dict(s.placement.cordoned)
            why = cordoned.get(before) or f"host {before} is lost or leaves"
            facts = {"replica": replica, "host": host.name, "before": before, "ranks": policy.ranks_at(position)}
            notes.append(Note("HostReplaced", why, facts))
    return tuple(notes)


def _start(s: LighthouseState, replica: int, me: PlacedReplica, hosts: tuple[Host, ...], now: float) -> Step:
    """Assign the next incarnation of a replica to hosts."""
    policy, effects = s.policy.placing, list[Effect]()
    assert policy is not None
    present = [s.presence.host(host.name) for host in hosts]
    reports = [each.report for each in present if each is not None]
    run = me.run or f"{s.admissions + me.first:x}"
    number = me.restart.restarts - me.first
    name = str(IncarnationId(replica, run, number))
    before, after = len(me.used) * policy.each, len(hosts) * policy.each
    if me.used and before != after:
        facts: dict[str, object] = {"replica": replica, "from": before, "to": after}
        effects.append(Note("Shrunk" if after < before else "Grown", f"it has {len(hosts)} hosts", facts))
    runs = replace(
        me,
        phase=ReplicaPhase.RUNS,
        incarnation=name,
        used=tuple(host.name for host in hosts),
        lives=tuple((report.life, report.space) for report in reports),
        run=run,
        start=s.placement.starts + 1,
        master=reports[0].address,
        base=s.head.step if s.head is not None else 0,
        due=now,
        since=None,
        why="",
        buried=(),
        fed=None,
        usable=False,
        blamed=len(s.placement.fatal.blamed),
    )
    s = with_replica(s, replica, runs)
    s = with_placement(s, placement=replace(s.placement, starts=runs.start))
    s, told = tell(s, now, {replica: name})
    facts = {"replica": replica, "incarnation": name, "restarts": number, "hosts": list(runs.used)}
    return s, (*effects, Note("ReplicaStarted", me.why or "first start", facts), *told)


def _without_old_shadows(s: LighthouseState, now: float) -> Step:
    """Tell the quorum of replaced incarnations that have exited since, and forget them."""
    left, effects = [], list[Effect]()
    for replica, me in s.placement.shadows:
        if is_over(s, me, now) or is_powerless(s, me, now):
            s, told = tell(s, now, {}, frozenset({(replica, me.incarnation)}))
            effects += told
        else:
            left.append((replica, me))
    return with_placement(s, placement=replace(s.placement, shadows=tuple(left))), tuple(effects)
