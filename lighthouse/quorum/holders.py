"""Where a replica that starts may find the newest state in memory, and whether it needs it at all. Pure.

A replica that comes back while others train fetches their state once it is behind. If nobody trains any more, the
newest state may still be whole in the memory of several hosts: the replica asks their state agents.
"""

from __future__ import annotations

from collections.abc import Mapping

from ft_hsdp.core.grant import Holders
from lighthouse.quorum.state import LighthouseState, alive


def holders(
    s: LighthouseState, replica: int | None = None, heard: Mapping[int, tuple[str, ...]] | None = None
) -> Holders:
    """Return what a replica that recovers has to know.

    No agent is named after states differed and no majority told which is right: copies that have not been dropped
    yet must not spread.

    Args:
        s: What the lighthouse knows.
        replica: The one that recovers: what ran of it before has ended. None: not said.
        heard: The addresses of the state agents that each replica has told last.
    """
    grant = s.grant
    others = [m for m in grant.members if m.replica != replica] if grant else []
    stands = not s.broken and any(alive(s, (m.replica, m.incarnation)) for m in others)
    if s.rewinding or s.diverged:
        return Holders(stands, s.head, {})
    known: dict[int, dict[str, None]] = {}
    for who, addresses in (heard or {}).items():
        known.setdefault(who, {}).update(dict.fromkeys(addresses))
    for member in grant.members if grant else ():
        known.setdefault(member.replica, {}).update(dict.fromkeys(member.state))
    for who, view in enumerate(s.views):
        if view.ask is not None:
            known.setdefault(who, {}).update(dict.fromkeys(view.ask.state))
    return Holders(stands, s.head, {who: tuple(known[who]) for who in sorted(known)})
