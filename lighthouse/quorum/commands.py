"""What an operator can order: when an order is possible (`plan`), and what it changes (`execute`). Pure.

- evict: the incarnation is killed, and the replica starts again unless it is drained.
- drain and undrain: the replica leaves at a step boundary, and stays away until it is undrained.
- scale: the job goes on with the replicas of the lowest ids.
- checkpoint: a replica writes the state of the next step, or of the one after it.
- host-lost: the ranks on a host have ended, by the operator's word, although nobody there can say so.
- drain-host and undrain-host: the ranks on a host move to a spare one at a step boundary, and it gets no others
  until it is undrained (`lighthouse.placement`).

The lighthouse itself evicts a replica that a diagnosis names, or moves it, within narrow bounds (`plan_culprit`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

from ft_hsdp.core.host_report import MachineRanks
from ft_hsdp.memory.hosts import Host
from lighthouse.placement.signs import has_host, listed_hosts, spare_hosts
from lighthouse.placement.state import ReplicaPhase
from lighthouse.quorum.events import Commanded, Effect, Evict
from lighthouse.quorum.rules import Incarnation
from lighthouse.quorum.state import LighthouseState, Step, alive, wanted


@dataclass(frozen=True, slots=True)
class CommandPlan:
    """What a possible command will do."""

    detail: str  # one line for the operator
    due: bool = True  # False: nothing is left to do
    host: str = ""  # of `plan_culprit`: it is drained; "": the replica is evicted


@dataclass(frozen=True, slots=True)
class Impossible:
    """A command that cannot be carried out."""

    status: int  # of HTTP
    detail: str  # one line that says why


def plan(
    s: LighthouseState, command: Commanded, condemned: Collection[Incarnation] = (), force: bool = False
) -> CommandPlan | Impossible:
    """Return what ``command`` would do now, or why it is impossible. Nothing changes.

    The incarnations that are ``condemned`` are to be killed already. With ``force`` an order may leave fewer than
    `Policy.min_replicas` replicas, but none may lose the newest state.
    """
    r = command.replica
    if not 0 <= r < s.policy.slots:
        return Impossible(404, f"there is no replica {r}; possible: 0 to {s.policy.slots - 1}")
    if s.finished or s.halted:
        return Impossible(409, s.halted or "the job has ended")
    match command.action:
        case "evict":
            return _evict(s, r, condemned)
        case "drain":
            return _drain(s, r, force)
        case "undrain":
            return _undrain(s, r)
        case "checkpoint":
            return _checkpoint(s)
        case "scale":
            return _scale(s, command.target, force)
        case "host-lost":
            return _host_lost(s, command.host)
        case "drain-host":
            return _drain_host(s, command.host, command.now, force)
        case "undrain-host":
            return _undrain_host(s, command.host)


EVICTED = ("absent", "stuck", "silent")  # kinds of findings; others but `SLOW` blame no single replica
SLOW = "slow"
WITNESSES = 2  # one may be wrong
CULPRIT_S = 600.0  # at most one eviction of a culprit in so long, whatever an analysis says


class Culprit(NamedTuple):
    """The replica that by a finding keeps the job waiting, or is slow."""

    replica: int
    kind: str  # as in `ft_hsdp.analysis.culprits.Finding`, like the next two
    witnesses: int
    epoch: int
    why: str
    rank: int | None = None  # of it; None: it is not known which


def takes(s: LighthouseState, found: Culprit) -> bool:
    """Return whether the operator wants that something is done about what was ``found``."""
    policy = s.policy
    return policy.on_straggler == "demote" if found.kind == SLOW else policy.on_culprit == "evict"


def plan_culprit(
    s: LighthouseState, found: Culprit, now: float, since_s: float, condemned: Collection[Incarnation] = ()
) -> CommandPlan | Impossible:
    """Return what is to be done about a culprit now, or why there is nothing. Nothing changes.

    A finding is made from what workers tell, and tells of a moment that may be over. So it counts only with two
    witnesses, and about a member that contributes to the grant in force, while no round for another one is held.
    With two replicas there are no two witnesses, and nobody is evicted. One that is slow leaves at a step boundary
    for a spare host, if there is one: its own host gets no ranks any more.

    Args:
        s: What the lighthouse knows.
        found: Whom a finding names.
        now: Seconds on the lighthouse's clock.
        since_s: Seconds since the last culprit was evicted or moved.
        condemned: Incarnations that are to be killed already.
    """
    r, grant = found.replica, s.grant
    view = s.views[r]
    member = grant.member(r, view.incarnation or "") if grant is not None else None
    if found.kind not in (*EVICTED, SLOW) or found.witnesses < WITNESSES:
        return Impossible(409, f"a finding ({found.kind}) with {found.witnesses} witnesses is not enough")
    if grant is None or grant.epoch != found.epoch or s.broken or s.since is not None or s.finished or s.halted:
        return Impossible(409, f"epoch {found.epoch} is over, or about to be")
    if member is None or member.role != "contribute" or not wanted(s, r) or not _runs(s, r):
        return Impossible(409, f"replica {r} does not contribute, or leaves")
    left = {m.replica for m in grant.donors if alive(s, (m.replica, m.incarnation))} - {r}
    if len(left) < s.policy.min_replicas:
        return Impossible(409, f"fewer than {s.policy.min_replicas} replicas would be left (quorum.min_replicas)")
    if since_s < CULPRIT_S:
        return Impossible(409, f"a culprit was evicted or moved {since_s:.0f} s ago")
    if found.kind == SLOW and (host := _host_of(s, r, found.rank)):
        moved = _drain_host(s, host, now, force=False)
        if isinstance(moved, CommandPlan) and moved.due:
            return replace(moved, host=host)
    return _evict(s, r, condemned)


def _host_of(s: LighthouseState, r: int, rank: int | None) -> str:
    """Return the name of the host with a rank, as its agent says it: ranks may have another one; "": not known."""
    placed, placing = s.placement.replicas[r : r + 1], s.policy.placing
    used = next((me.used for me in placed if me.incarnation == s.views[r].incarnation), ())
    if len(used) > 1 and placing is not None:
        used = () if rank is None else used[rank // placing.each :]
    return used[0] if used else ""


def execute(s: LighthouseState, command: Commanded) -> Step:
    """Return the state after a ``command`` that `plan` found possible, and its effects; a checkpoint has none."""
    r = command.replica
    effects: tuple[Effect, ...] = ()
    match command.action:
        case "evict":
            effects = (Evict(r, s.views[r].incarnation or "", f"by the operator: {command.reason}"),)
        case "drain":
            s = replace(s, drained=s.drained | {r})
        case "undrain":
            s = replace(s, drained=s.drained - {r})
        case "checkpoint":
            s = replace(s, checkpoint=_next_step(s))
        case "scale":
            s = replace(s, target=command.target)
    return s, effects


def _next_step(s: LighthouseState) -> int:
    return s.head.step + 1 if s.head else 1


def _runs(s: LighthouseState, r: int) -> bool:
    """Return whether a process of replica ``r`` may run."""
    view = s.views[r]
    return view.incarnation is not None and view.down is not True and (r, view.incarnation) not in s.exited


def _evict(s: LighthouseState, r: int, condemned: Collection[Incarnation]) -> CommandPlan | Impossible:
    incarnation = s.views[r].incarnation
    if not _runs(s, r) or incarnation is None:
        return Impossible(409, f"replica {r} does not run")
    if (r, incarnation) in condemned:
        return CommandPlan(f"{incarnation} is to be killed already", due=False)
    if not has_host(s, r):
        return Impossible(409, f"no host agent reports of replica {r}: an operator must end its processes")
    after = "keeps it away: it is drained" if r in s.drained else f"starts replica {r} again"
    return CommandPlan(f"its host agents kill {incarnation}; the lighthouse {after}")


def _drain(s: LighthouseState, r: int, force: bool) -> CommandPlan | Impossible:
    if r in s.drained:
        return CommandPlan(f"replica {r} is drained already", due=False)
    able, needed = _able(s), s.policy.min_replicas
    if able == {r}:
        return Impossible(409, f"replica {r} cannot be spared: no other one holds the newest state")
    left = _left(s, {r})
    if left < needed and r in _possible(s) and not force:
        why = f"that would leave {left} replicas, quorum.min_replicas is {needed}"
        return Impossible(409, f'{why}; {{"force": true}} drains replica {r} all the same')
    how = "leaves at the next step boundary" if _runs(s, r) else "does not run"
    back = "stays away until it is undrained" if has_host(s, r) else "no supervisor starts it again"
    waits = (
        f"; no step is made before {needed} replicas can take part again, {left} are left" if left < needed else ""
    )
    return CommandPlan(f"replica {r} {how}, and {back}{waits}")


def _possible(s: LighthouseState) -> set[int]:
    """Return the replicas that take part or will when they are started again: neither sent away nor given up."""
    return {r for r, v in enumerate(s.views) if wanted(s, r) and not v.lost}


def _able(s: LighthouseState) -> set[int]:
    """Return the replicas that hold the newest state; one of them must stay.

    These are the living holders of the current grant's base; if none lives, those that may bring it back; before
    the first grant, all that could start the job.
    """
    if s.grant is None:
        return _possible(s)
    alive = {
        m.replica for m in s.grant.donors if (m.replica, m.incarnation) not in s.exited and wanted(s, m.replica)
    }
    return alive or {m.replica for m in s.grant.donors} & _possible(s)


def _left(s: LighthouseState, gone: set[int]) -> int:
    """Return how many replicas remain without ``gone``.

    If one of ``gone`` can go on at once, only the replicas that can go on at once count.
    """
    able = _able(s)
    return len((able if able & gone else _possible(s)) - gone)


def _scale(s: LighthouseState, target: int, force: bool) -> CommandPlan | Impossible:
    slots = s.policy.slots
    if not 1 <= target <= slots:
        return Impossible(409, f"the job cannot have {target} replicas; max_replicas allows 1 to {slots}")
    if target == s.target:
        return CommandPlan(f"the job is scaled to {target} replicas already", due=False)
    able, gone = _able(s), set(range(target, s.target))
    if able and able <= gone:
        kept = ",".join(map(str, sorted(able)))
        return Impossible(409, f"replica {kept} cannot be spared: no other one holds the newest state")
    left = _left(s, gone)
    if gone and left < s.policy.min_replicas and not force:
        why = f"that would leave {left} replicas, quorum.min_replicas is {s.policy.min_replicas}"
        return Impossible(409, f'{why}; {{"force": true}} scales all the same')
    if target < s.target:
        names = ",".join(map(str, range(target, s.target)))
        return CommandPlan(f"replica {names} leaves at the next step boundary, if it runs, and stays away")
    comers = [r for r in range(s.target, target) if r not in s.drained]
    alone = [str(r) for r in comers if not has_host(s, r)]
    who = "their supervisors start them" + (f"; none reports for {','.join(alone)}: start it" if alone else "")
    return CommandPlan(f"replica {','.join(map(str, comers)) or 'none'} may take part: {who}")


def _undrain(s: LighthouseState, r: int) -> CommandPlan | Impossible:
    if r not in s.drained:
        beyond = f"; the job is scaled to {s.target} replicas" if r >= s.target else ""
        return CommandPlan(f"replica {r} is not drained{beyond}", due=False)
    who = "its supervisor starts it" if has_host(s, r) else "it has no supervisor that reports: start it"
    return CommandPlan(f"replica {r} may take part again: {who}")


def on_host(s: LighthouseState, host: str) -> tuple[MachineRanks, ...]:
    """Return for each living incarnation with ranks on ``host`` that those have ended."""
    known = {(m.replica, m.incarnation): m.hosts for m in (s.grant.members if s.grant else ())}
    known |= {(r, v.incarnation or ""): v.ask.hosts for r, v in enumerate(s.views) if v.ask is not None}
    places = {who: {Host.parse(path).name for path, _ in hosts} for who, hosts in known.items()}
    spread = {each.who: each for each in s.spread}
    for who, each in spread.items():
        places.setdefault(who, set()).update(said.machine for _, said in each.heard)
    return tuple(
        MachineRanks(who[1], host, max(len(names), spread[who].machines if who in spread else 0), gone=True)
        for who, names in sorted(places.items())
        if host in names and who not in s.exited
    )


def _host_lost(s: LighthouseState, host: str) -> CommandPlan | Impossible:
    found, replicas = on_host(s, host), s.placement.replicas
    placed = {me.incarnation for me in replicas if host in me.used and me.phase is not ReplicaPhase.RESTS}
    if not (found or placed) and s.presence.host(host) is not None:
        return CommandPlan(f"host {host} has no ranks, and is forgotten")
    if not found and not placed:
        return Impossible(404, f"no rank is known to run on host {host!r}; `status` lists the hosts")
    names = ", ".join(sorted(placed | {each.incarnation for each in found}))
    also = "" if all(each.machines == 1 for each in found) else ", once their ranks on other hosts have ended, too"
    return CommandPlan(f"{names} count as exited{also}; a host that was only cut off must end its ranks")


def _drain_host(s: LighthouseState, host: str, now: float, force: bool) -> CommandPlan | Impossible:
    row = next((row for row in listed_hosts(s, now) if row["host"] == host), None)
    if row is None:
        return Impossible(404, f"no agent of a host {host!r} reports; `status` lists the hosts")
    if row["why"]:
        return CommandPlan(f"host {host} gets no ranks already: {row['why']}", due=False)
    stays = "gets no ranks until it is undrained"
    replica = row["replica"]
    if not isinstance(replica, int):
        return CommandPlan(f"host {host} {stays}")
    spare, whose = spare_hosts(s, replica, now), f"replica {replica}"
    present = s.presence.host(host)
    given = present is not None and bool(present.report.only)  # its launcher gives another one
    if spare < 1 and not given and not force:
        why = f"no spare host can take the ranks of {whose} on host {host}: start an agent on another machine"
        return Impossible(409, f'{why}; {{"force": true}} drains it all the same, and {whose} waits')
    moves = "goes on with a spare host" if spare > 0 else "waits for a host"
    return CommandPlan(f"{whose} leaves at the next step boundary and {moves}; host {host} {stays}")


def _undrain_host(s: LighthouseState, host: str) -> CommandPlan | Impossible:
    why = dict(s.placement.cordoned).get(host)
    if why is None:
        return CommandPlan(f"host {host} is not drained", due=False)
    return CommandPlan(f"host {host} may get ranks again, which it did not because {why}")


def _checkpoint(s: LighthouseState) -> CommandPlan | Impossible:
    if s.grant is None:
        return Impossible(409, "nothing has been granted yet: there is nothing to write")
    if s.head is not None and s.head.step >= s.policy.steps:
        return Impossible(409, "training is over: there is no next step")
    if s.checkpoint >= _next_step(s):
        told = f"a checkpoint of step {s.checkpoint}, or the one after it, has been ordered already"
        return CommandPlan(told, due=False)
    return CommandPlan(f"one replica writes the state of step {_next_step(s)}, or of the one after it")
