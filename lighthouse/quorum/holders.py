"""Where a replica that starts may find the newest state in memory, and whether it needs it at all. Pure.

A replica that comes back while others train fetches their state once it is behind. If nobody trains any more, the
newest state may still be whole in the memory of several hosts: the replica asks their state agents.
"""

from __future__ import annotations

from collections.abc import Mapping

from ft_hsdp.core.grant import Holders, Hosts, paths
from lighthouse.quorum.state import LighthouseState, alive

StateAgents = tuple[tuple[str, ...], Hosts]
"""The addresses of the state agents of a replica, of each rank, and its hosts."""


def holders(
    s: LighthouseState, replica: int | None = None, heard: Mapping[int, StateAgents] | None = None
) -> Holders:
    """Return what a ``replica`` that recovers, and of which nothing runs any more, has to know.

    No agent is named after states differed and no majority told which is right: copies that have not been
    dropped yet must not spread. The state agents are those that each replica has told last (``heard``).
    """
    grant = s.grant
    members = grant.members if grant else ()
    others = [m for m in members if m.replica != replica]
    # Also while their ring is broken: they hold the head, and form the next epoch in a moment. One that is behind
    # does not hold it: if it lives alone, the head is what the replica that recovers finds.
    stands = any(m.holds_base and alive(s, (m.replica, m.incarnation)) for m in others)
    if s.rewinding or s.diverged:
        return Holders(stands, s.head)
    told: list[tuple[int, StateAgents]] = list((heard or {}).items())
    told += [(m.replica, (m.state, m.hosts)) for m in members]
    told += [(who, (view.ask.state, view.ask.hosts)) for who, view in enumerate(s.views) if view.ask is not None]
    agents: dict[int, dict[str, None]] = {}
    hosts: dict[str, str] = {}
    for who, (addresses, where) in told:
        agents.setdefault(who, {}).update(dict.fromkeys(addresses))
        hosts.update(zip(addresses, paths(where), strict=False))  # () if they are not known
    return Holders(stands, s.head, {who: tuple(agents[who]) for who in sorted(agents)}, hosts)
