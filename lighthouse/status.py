"""The status of the job: one word per replica for people, with a reason. Pure; no decision is made from it."""

from __future__ import annotations

from collections.abc import Mapping

from ft_hsdp.core.grant import Report, ranks_of
from lighthouse.placement.signs import listed_hosts
from lighthouse.quorum.state import LighthouseState, away, wanted


def describe(s: LighthouseState, replica: int, reports: Mapping[int, Report], waiting: str) -> tuple[str, str]:
    """Return (state, reason) of a replica.

    Args:
        waiting: What open requests wait for.

    Returns:
        The state is booting (runs, has never asked), training, standby, behind, asking, final, drained (and gone),
        down or lost.
    """
    view = s.views[replica]
    if view.lost:
        return "lost", "its supervisor has given it up, or finds no place for it"
    if away(s, replica):
        drained = replica in s.drained
        return "drained", "an operator drained it" if drained else f"the job is scaled to {s.target} replicas"
    gone = view.incarnation is not None and (replica, view.incarnation) in s.exited
    if view.down or gone:
        return "down", "none of its processes runs"
    if view.incarnation is None:
        return "down", "no supervisor and no rank has reported it yet"
    report = reports.get(replica)
    if report is None or report.incarnation != view.incarnation:
        return "booting", "it has not asked for a step yet"
    if report.state.step >= s.policy.steps:
        return "final", "it has the final state"
    if view.ask is not None:
        return "asking", waiting
    member = s.grant.member(replica, view.incarnation) if s.grant else None
    if s.grant is None or member is None:
        return "behind", f"not a member of epoch {s.epoch}"
    leaves = "" if wanted(s, replica) else ", leaves at the next step boundary"
    does = {"contribute": "training", "standby": "standby", "behind": "behind"}[member.role]
    share = f", {member.units} units in each step" if member.role == "contribute" else ""
    ranks, whole = len(member.ring), s.policy.units.data_ranks * s.policy.units.ranks_per_unit
    width = f", {ranks} of {whole} ranks" if 0 < ranks < whole else ""
    return does, f"member of epoch {s.grant.epoch}{width}{share}{leaves}"


def describe_job(
    name: str, s: LighthouseState, reports: Mapping[int, Report], waiting: str, now: float
) -> dict[str, object]:
    """Return the body of GET /v1/status.

    Args:
        waiting: What open requests wait for.
        now: Seconds on the lighthouse's clock.
    """
    return {
        "job": name,
        "term": s.term,
        "epoch": s.epoch,
        "step": s.head.step if s.head else 0,
        "finished": s.finished,
        "target": s.target,
        "members": list(s.grant.ring) if s.grant else [],
        "units": sum(m.units for m in s.grant.members if m.role == "contribute") if s.grant else 0,
        "units_wanted": s.grant.units if s.grant else 0,
        "replicas": [_row(s, replica, reports, waiting) for replica in range(s.policy.slots)],
        "hosts": listed_hosts(s, now),
    }


def _row(s: LighthouseState, replica: int, reports: Mapping[int, Report], waiting: str) -> dict[str, object]:
    state, reason = describe(s, replica, reports, waiting)
    report = reports.get(replica)
    return {
        "replica": replica,
        "incarnation": s.views[replica].incarnation,
        "state": state,
        "step": report.state.step if report else 0,
        "reason": reason,
        "hosts": _hosts(s, replica),
    }


def _hosts(s: LighthouseState, replica: int) -> list[dict[str, object]]:
    """Return the hosts of the newest incarnation of a replica with their ranks; [] if they are not known."""
    view = s.views[replica]
    member = s.grant.member(replica, view.incarnation) if s.grant and view.incarnation else None
    hosts = view.ask.hosts if view.ask else member.hosts if member else ()
    return [{"host": path, "ranks": ranks} for path, ranks in ranks_of(hosts)]
