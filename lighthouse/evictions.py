"""Evictions: who is to be killed, and who will be if it stays silent; no more than incarnations that may live."""

from __future__ import annotations

from collections.abc import Container

from ft_hsdp.protocol import Eviction
from lighthouse.quorum import Incarnation
from lighthouse.state import Asked, Event, ProcessesReported, State, alive


class Evictions:
    """Orders to SIGKILL an incarnation, by incarnation, and members that were left out for their silence."""

    def __init__(self) -> None:
        self.orders: dict[Incarnation, Eviction] = {}
        self._suspects: dict[Incarnation, float] = {}  # when to evict them, if they stay silent

    @property
    def pending(self) -> bool:
        """Whether the passing of time can lead to an order."""
        return bool(self._suspects)

    def of(self, replicas: Container[int]) -> tuple[Eviction, ...]:
        """The orders for the supervisor of ``replicas``."""
        return tuple(order for order in self.orders.values() if order.replica in replicas)

    def suspect(self, before: State, replica: object, now: float) -> None:
        """A member of ``before``'s grant was left out for its silence: evict it too if it stays silent."""
        since = now if before.since is None else before.since
        for member in before.grant.members if before.grant else ():
            if member.replica == replica:
                self._suspects[member.replica, member.incarnation] = since + before.policy.evict_s

    def order(self, s: State, who: Incarnation, reason: str) -> bool:
        """Whether this is a new order; there is none for who is known to have exited."""
        self._suspects.pop(who, None)
        if who in self.orders or not alive(s, who):
            return False
        self.orders[who] = Eviction(*who, reason)
        return True

    def settle(self, s: State, event: Event, now: float) -> list[tuple[Incarnation, str]]:
        """Drop what ``event`` has settled; whom to evict now, and why."""
        match event:
            case Asked(request):
                self._suspects.pop((request.report.replica, request.report.incarnation), None)
            case ProcessesReported():
                for who in [*self.orders, *self._suspects]:
                    if s.views[who[0]].incarnation not in (None, who[1]) or not alive(s, who):
                        self.orders.pop(who, None)
                        self._suspects.pop(who, None)
        late = [who for who, due in self._suspects.items() if now >= due]
        return [(who, f"silent for {s.policy.evict_s:g} s since its ring broke") for who in late]
