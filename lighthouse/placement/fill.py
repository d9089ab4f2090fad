"""Where replicas run: hosts for those that need some, and their next incarnations. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ft_hsdp.core.restart import IncarnationId
from ft_hsdp.memory.hosts import Host
from ft_hsdp.memory.replacement import Assignment
from lighthouse.placement.signs import assignments, due_replicas, is_over, is_powerless, usable_hosts
from lighthouse.placement.state import NO_HOST, PlacedReplica, Placement, Presence, ReplicaPhase
from lighthouse.quorum.events import PLACEMENT, Effect, Note, ProcessesReported
from lighthouse.quorum.rules import Incarnation
from lighthouse.quorum.rules import replace as change
from lighthouse.quorum.state import LighthouseState, Step, wanted
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
    due = due_replicas(s, now)
    if not due:
        return s, tuple(effects)
    found = assignments(s, due, now)
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
            s, swaps = _take(s, replica, given, now)
            effects += swaps
            me = s.placement.replicas[replica]
        s, more = _start(s, replica, me, hosts, now)
        effects += more
    return s, tuple(effects)


def _left(s: LighthouseState, given: Assignment) -> bool:
    """Return whether the hosts that a replica lacks have left on request: others, if any stay, need not wait."""
    lacked = [s.presence.host(given.hosts[n].name) for n in given.missing]
    stays = any(not each.report.leaving for each in s.presence.hosts.values())
    return stays and all(each is not None and each.report.leaving for each in lacked)


def _take(s: LighthouseState, replica: int, given: Assignment, now: float) -> Step:
    """Give hosts to a replica. One that had a place in another replica leaves the lost one there instead."""
    policy, me, notes = s.policy.placing, s.placement.replicas[replica], list[Effect]()
    assert policy is not None
    for position, host in enumerate(given.hosts):
        before = me.hosts[position] if me.places else NO_HOST
        if before.name == host.name:
            continue
        lost = f"host {before.name} is lost or leaves"
        moves = f"all its ranks wait on host {host.name}"
        lacks = before.name not in usable_hosts(s, now)
        why = dict(s.placement.cordoned).get(before.name) or (lost if lacks else moves)
        facts = {"replica": replica, "host": host.name, "before": before.name, "ranks": policy.ranks_at(position)}
        notes += [Note("HostReplaced", why, facts)] if before.name else []
        for n, other in enumerate(s.placement.replicas):
            if n != replica and host.name in other.names:
                places = tuple(str(before if each.name == host.name else each) for each in other.hosts)
                s = with_replica(s, n, replace(other, places=places))
                lends = wanted(s, n) and other.phase is ReplicaPhase.RESTS
                notes += [Note("HostLent", why, {"replica": n, "host": host.name, "to": replica})] if lends else []
    return with_replica(s, replica, replace(me, places=tuple(map(str, given.hosts)))), tuple(notes)


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
        why = f"it has {len(hosts)} hosts"
        effects.append(Note("Shrunk", why, facts) if after < before else Note("Grown", why, facts))
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
        reason=me.why or "first start",
        how="",
        buried=(),
        fed=None,
        usable=False,
        blamed=len(s.placement.fatal.blamed),
    )
    s = with_replica(s, replica, runs)
    s = with_placement(s, placement=replace(s.placement, starts=runs.start))
    s, told = tell(s, now, {replica: name})
    return s, (*effects, *told)


def _without_old_shadows(s: LighthouseState, now: float) -> Step:
    """Tell the quorum of replaced incarnations that have exited since, and forget them."""
    left, effects = [], list[Effect]()
    for replica, me in s.placement.shadows:
        if is_over(s, me, now) or is_powerless(s, me, now):
            last = s.placement.replicas[replica].incarnation == me.incarnation and not s.views[replica].down
            exited = frozenset({(replica, me.incarnation)})
            s, told = tell(s, now, {replica: None} if last else {}, exited)
            effects += told
        else:
            left.append((replica, me))
    return with_placement(s, placement=replace(s.placement, shadows=tuple(left))), tuple(effects)
