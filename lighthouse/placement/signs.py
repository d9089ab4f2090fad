"""What reports show: which host is lost, whether an incarnation has exited, and what each host is to run. Pure."""

from __future__ import annotations

from operator import or_

from ft_hsdp.core.host_report import AssignedRanks, EndedRank, HostReport
from ft_hsdp.core.restart import LEAVING, Cause, code_of, exit_in_words
from ft_hsdp.core.state_id import digest
from ft_hsdp.errors import EXIT_CONFIG, EXIT_HARDWARE, EXIT_LEFT, EXIT_OK, EXIT_RETRYABLE, EXIT_USAGE
from ft_hsdp.memory.hosts import Host
from ft_hsdp.memory.replacement import Assignment, assign
from lighthouse.placement.state import NO_HOST, PlacedReplica, ReplicaPhase
from lighthouse.quorum.state import LighthouseState, wanted


def is_lost(s: LighthouseState, name: str, now: float) -> bool:
    """Return whether a host is lost: its agent is silent, and the replica there does not ask for steps either."""
    evict_s, present = s.policy.evict_s, s.presence.host(name)
    if not unheard(s, name, now) or is_cut_off(s, now):
        return False
    for replica, me in enumerate(s.placement.replicas):
        incarnation, at, gap = s.presence.asked.get(replica, ("", 0.0, 0.0))
        if name in me.used and me.phase is ReplicaPhase.RUNS and incarnation == me.incarnation:
            if present is not None and present.closed is not None and at <= present.closed:
                return now >= at + 2 * gap
            return now >= at + max(evict_s, 2 * gap)
    return True


def is_cut_off(s: LighthouseState, now: float) -> bool:
    """Return whether the lighthouse is the one that is cut off: all hosts are silent, or most of several."""
    known = known_hosts(s)
    silent = sum(unheard(s, each, now) for each in known)
    return silent == len(known) or (silent > 1 and 2 * silent > len(known))


def is_over(s: LighthouseState, me: PlacedReplica, now: float) -> bool:
    """Return whether an incarnation has exited.

    All its hosts say so; or one of its ranks has ended, and on no host that is heard one is left: it commits
    nothing more.
    """
    gone = [is_gone(s, me, position) for position in range(len(me.used))]
    silent = [is_silent(s, me, position, now) for position in range(len(me.used))]
    return all(gone) or ((any(gone) or bool(me.ended)) and all(map(or_, gone, silent)))


def is_powerless(s: LighthouseState, shadow: PlacedReplica, now: float) -> bool:
    """Return whether no grant of an incarnation that was replaced holds any more: it was silent for so long."""
    policy = s.policy.placing
    assert policy is not None
    heard = [now if shadow.since is None and s.presence.since is None else shadow.since or s.presence.since or 0.0]
    for position, name in enumerate(shadow.used):
        present = s.presence.host(name)
        if present is not None and present.report.life == shadow.lives[position][0]:
            heard.append(present.heard)
    return now >= max(heard) + policy.lease_s + 2 * s.policy.evict_s


def known_hosts(s: LighthouseState) -> list[str]:
    """Return the names of the hosts that are to be heard."""
    used = {name for me in s.placement.replicas if me.phase is not ReplicaPhase.RESTS for name in me.used}
    return sorted(used | {name for name, each in s.presence.hosts.items() if not each.report.leaving})


def unheard(s: LighthouseState, name: str, now: float) -> bool:
    """Return whether the agent of a host is gone, or cut off; after the lighthouse was, all have time to come."""
    present, alone, evict_s, since = s.presence.host(name), s.presence.alone, s.policy.evict_s, s.presence.since
    if present is None or since is None:
        return since is not None and now >= since + evict_s
    return present.silent(now, since, evict_s) and (alone is None or now >= alone + evict_s)


def is_silent(s: LighthouseState, me: PlacedReplica, position: int, now: float) -> bool:
    """Return whether nothing is heard of the agent that started ranks; another machine may have its name now."""
    present = s.presence.host(me.used[position])
    replaced = present is not None and present.report.life != me.lives[position][0]
    return replaced or unheard(s, me.used[position], now)


def is_gone(s: LighthouseState, me: PlacedReplica, position: int) -> bool:
    """Return whether no process of an incarnation is left on a host, by the word of its agent."""
    name, (life, space) = me.used[position], me.lives[position]
    present = s.presence.host(name)
    if name in me.buried:
        return True
    if present is None:
        return False
    if present.report.life != life:
        return present.report.space == space  # it has taken the place of the agent with which they have ended
    mine = present.ranks(me.incarnation)
    if mine is not None:
        return not mine.living
    return me.phase is not ReplicaPhase.RUNS and present.report.seen == seen(s, name)


def says(rank: EndedRank) -> str:
    """Return in one line how a rank ended."""
    return f"rank {rank.rank} ended with {exit_in_words(rank.code)}" + (f": {rank.why}" if rank.why else "")


def bereft(rank: EndedRank) -> bool:
    """Return whether a rank may have ended for no more than the loss of its peers."""
    return code_of(rank) == EXIT_RETRYABLE and rank.cause in ("", Cause.TEMPORARY)


def telling(me: PlacedReplica, ranks: int) -> tuple[str, EndedRank | None, str]:
    """Return how an incarnation ended, the rank that shows why, and its host.

    The order in which ends are heard of says nothing. A rank that lost its peers ends with 75, so any other code
    comes before that one.
    """
    own = list(me.ended)
    if len(own) == ranks and all(rank.code in LEAVING for _, rank in own):
        kind = "done" if me.done else "left" if any(r.code == EXIT_LEFT for _, r in own) else "exit 0"
        return kind, None, ""
    if not any(rank.code for _, rank in own):
        return "not started" if me.failed else "evicted", None, ""
    host, rank = max(
        own,
        key=lambda each: (
            each[1].code in (EXIT_CONFIG, EXIT_USAGE),
            code_of(each[1]) == EXIT_HARDWARE,
            each[1].code not in (*LEAVING, EXIT_RETRYABLE),
            each[1].cause not in ("", Cause.TEMPORARY),
            each[1].code != EXIT_OK,
        ),
    )
    return exit_in_words(rank.code), rank, host


def assigned(s: LighthouseState, name: str) -> tuple[AssignedRanks, ...]:
    """Return all that a host is to run."""
    present, policy = s.presence.host(name), s.policy.placing
    found = []
    for replica, me in enumerate(s.placement.replicas):
        if me.phase is not ReplicaPhase.RUNS or name not in me.used or present is None or policy is None:
            continue
        each, position = policy.each, me.used.index(name)
        if me.lives[position][0] == present.report.life:
            ranks = tuple(policy.ranks_at(position))
            hosts = tuple(host for host in me.used for _ in range(each))
            fatal = s.placement.fatal.blamed[: me.blamed]
            now = leaves(s, replica, me), fatal, me.contributed
            found.append(AssignedRanks(me.incarnation, ranks, hosts, me.master, *now))
    return tuple(found)


def placed(s: LighthouseState, name: str) -> tuple[int, ...]:
    """Return the replicas that have a place on a host, whether they run or wait for other hosts."""
    return tuple(n for n in active_replicas(s) if name in s.placement.replicas[n].names)


def fate(s: LighthouseState, report: HostReport) -> tuple[bool, str]:
    """Return whether the job has ended for a host, and why it cannot go on there; "": it can."""
    if report.replica is None or not s.placement.replicas:
        return is_finished(s), s.halted
    me, cordoned = s.placement.replicas[report.replica], dict(s.placement.cordoned)
    halted = s.halted or me.given_up or cordoned.get(Host.parse(report.path).name, "")
    return s.finished or (me.done and me.phase is ReplicaPhase.RESTS), halted


def is_finished(s: LighthouseState) -> bool:
    """Return whether the job has ended, or the scripts of all replicas have ended their part of it.

    Those that are lost do not count.
    """
    wants = [me for n, me in enumerate(s.placement.replicas) if wanted(s, n)]
    over = all(me.given_up or (me.done and me.phase is ReplicaPhase.RESTS) for me in wants)
    return s.finished or (over and any(me.done for me in wants))


def lost_replicas(s: LighthouseState) -> tuple[int, ...]:
    """Return the replicas that were given up, and all that are not done once the job is halted."""
    halted = bool(s.halted)
    placed = enumerate(s.placement.replicas)
    return tuple(n for n, me in placed if me.given_up or (halted and wanted(s, n) and not me.done))


def seen(s: LighthouseState, name: str) -> str:
    """Return the digest of what a host is to run, which it repeats in its next report.

    No two are equal between which something was started there: a host that has seen this one knows of all before.
    """
    known = (*s.placement.replicas, *(me for _, me in s.placement.shadows))
    newest = max((me.start for me in known if name in me.used), default=0)
    return digest(str(newest), *map(repr, assigned(s, name)))


def leaves(s: LighthouseState, replica: int, me: PlacedReplica) -> bool:
    """Return whether an incarnation is to leave: it is not wanted, or has to leave a host, or can grow."""
    ends = any(ends_on(s, name) for name in me.used)
    return ends or not wanted(s, replica) or (me.contributed and could_grow(s, replica, me))


def ends_on(s: LighthouseState, name: str) -> bool:
    """Return whether ranks have to leave a host: its agent was told to end, or it was drained."""
    present = s.presence.host(name)
    return name in dict(s.placement.cordoned) or (present is not None and present.report.leaving)


def active_replicas(s: LighthouseState) -> list[int]:
    """Return the replicas that take part in the job."""
    placed = enumerate(s.placement.replicas)
    return [n for n, me in placed if wanted(s, n) and not me.given_up and not me.done]


def usable_hosts(s: LighthouseState, now: float) -> dict[str, Host]:
    """Return the hosts that may get ranks, by name."""
    return {
        name: each.host
        for name, each in s.presence.hosts.items()
        if not ends_on(s, name) and not unheard(s, name, now)
    }


def spare_hosts(s: LighthouseState, replica: int, now: float) -> int:
    """Return how many hosts could take ranks of a replica, beyond those for which others wait already."""
    policy, usable = s.policy.placing, usable_hosts(s, now).keys()
    active = [s.placement.replicas[n] for n in active_replicas(s)]
    places = {name for me in active for name in me.names}
    free = free_hosts(s, replica, now) - places
    own = sum(s.presence.hosts[name].report.replica == replica for name in free)  # no other one may have them
    unplaced = sum(policy.hosts for me in active if policy is not None and not me.places)
    return own or len(free) - len(places - usable) - unplaced


def free_hosts(s: LighthouseState, replica: int, now: float) -> set[str]:
    """Return the usable hosts without ranks that a replica could have."""
    used = {n for each in s.placement.replicas if each.phase is not ReplicaPhase.RESTS for n in each.used}
    own = {n for n, each in s.presence.hosts.items() if each.report.serves(replica)}
    return (usable_hosts(s, now).keys() & own) - used - kept_hosts(s)


def kept_hosts(s: LighthouseState) -> set[str]:
    """Return the hosts that are kept for replicas which have them first and were never started."""
    homes = {name: each.report.home for name, each in s.presence.hosts.items()}
    return {name for name, home in homes.items() if home and not s.placement.replicas[home[0]].incarnation}


def listed_hosts(s: LighthouseState, now: float) -> list[dict[str, object]]:
    """Return each host with its state, the replica and the ranks that it has, and why it gets none, for people.

    It is used, spare, or silent; or waiting, because its replica lacks another host; or leaving, until its ranks
    have left; or cordoned, which it was because of failures, or by an operator.
    """
    policy, cordoned = s.policy.placing, dict(s.placement.cordoned)
    replicas = s.placement.replicas
    on = {name: n for n, me in enumerate(replicas) if me.phase is ReplicaPhase.RUNS for name in me.used}
    awaited = {name for n, me in enumerate(replicas) if wanted(s, n) and n not in on.values() for name in me.names}
    rows: list[dict[str, object]] = []
    for name in sorted({*known_hosts(s), *cordoned}):
        replica = on.get(name)
        state = "silent" if unheard(s, name, now) else "spare" if replica is None else "used"
        if name in cordoned and replica is None:
            state = "cordoned"
        elif state == "spare" and name in awaited:
            state = "waiting"
        elif state == "used" and ends_on(s, name):
            state = "leaving"
        row: dict[str, object] = {"host": name, "state": state, "replica": replica, "why": cordoned.get(name, "")}
        if replica is not None and policy is not None:
            row["ranks"] = policy.ranks_at(replicas[replica].used.index(name))
        rows.append(row)
    return rows


def could_grow(s: LighthouseState, replica: int, me: PlacedReplica) -> bool:
    """Return whether there are hosts for all ranks of a replica that runs with fewer."""
    policy, hosts = s.policy.placing, s.presence.hosts.values()
    if policy is None or len(me.used) == policy.hosts or not hosts:
        return False
    now = max(each.heard for each in hosts)
    given = assignments(s, due_replicas(s, now), now)[replica]
    return len(given.hosts) == policy.hosts and not given.missing


def has_host(s: LighthouseState, replica: int) -> bool:
    """Return whether a host is there that takes ranks of a replica."""
    here = [each.report for each in s.presence.hosts.values()]
    return any(report.serves(replica) and not report.leaving for report in here)


def due_replicas(s: LighthouseState, now: float) -> list[int]:
    """Return the replicas that are to be started now."""
    if s.finished or s.halted:
        return []
    found = []
    for n in active_replicas(s):
        me = s.placement.replicas[n]
        hosted = me.incarnation or has_host(s, n)
        if me.phase is ReplicaPhase.RESTS and hosted and now >= me.due:
            found.append(n)
    return found


def assignments(s: LighthouseState, due: list[int], now: float) -> dict[int, Assignment]:
    """Return where replicas would run: those that are due come first, and others stay where they are.

    A replica that waits to be started again keeps its hosts. One that has waited for hosts in vain lends its own.
    """
    policy, active = s.policy.placing, active_replicas(s)
    assert policy is not None
    usable, kept, places = usable_hosts(s, now), set[str](), dict[int, list[Host]]()
    reports = {name: s.presence.hosts[name].report for name in usable}
    homes = {report.home: usable[name] for name, report in reports.items() if report.home is not None}
    for replica, me in enumerate(s.placement.replicas):
        if replica in due:
            own = [host for name, host in usable.items() if reports[name].replica == replica]
            before = list(me.hosts) or [homes.get((replica, n), NO_HOST) for n in range(policy.hosts)]
            places[replica] = own[:1] if own and before[0].name not in usable else before
        elif me.phase is not ReplicaPhase.RESTS or replica in active:
            mine = me.names if me.phase is ReplicaPhase.RESTS else me.used
            places[replica] = [host if host.name in mine else NO_HOST for host in me.hosts]
            kept |= set(mine)
    # Where the ranks of a replica wait, it starts at once, but only its own host may have the newest state.
    held = {host.name for hosts in places.values() for host in hosts}
    for replica in due if policy.hosts == 1 else ():
        at, free = places[replica][0].name, sorted(free_hosts(s, replica, now) - held)
        warm = [usable[name] for name in free if reports[name].warm]
        others = any(n != replica and me.contributed for n, me in enumerate(s.placement.replicas))
        if warm and others and not (at in usable and reports[at].warm):
            places[replica] = warm[:1]
            held.add(warm[0].name)
    held = {host.name for hosts in places.values() for host in hosts}
    gone = held | kept_hosts(s)
    spares = [host for n, host in usable.items() if n not in gone and reports[n].replica is None]
    shrunk = {n: len(s.placement.replicas[n].used) for n in places if n not in due}
    shrunk = {n: count for n, count in shrunk.items() if count < policy.hosts}
    lenders = [n for n in due if s.views[n].lost]
    lost = held - usable.keys() - kept
    return assign(
        places,
        lost,
        spares,
        policy.apart,
        shrunk=shrunk,
        lenders=lenders,
        serves=lambda name, replica: name not in reports or reports[name].serves(replica),
    )
