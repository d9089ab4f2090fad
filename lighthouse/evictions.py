"""The orders to kill silent members, kept beside the decisions' state; `lighthouse.placement` carries them out."""

from __future__ import annotations

from lighthouse.quorum.events import Asked, Event, ProcessesReported
from lighthouse.quorum.rules import Incarnation
from lighthouse.quorum.state import LighthouseState, alive


class Evictions:
    """Orders to SIGKILL an incarnation, and members that get such an order if they stay silent.

    Bounded by the number of incarnations that may live: an order ends with the exit of its incarnation.
    """

    def __init__(self) -> None:
        self.orders: set[Incarnation] = set()
        self._suspects: dict[Incarnation, float] = {}  # when to evict them, if they stay silent

    @property
    def pending(self) -> bool:
        """Whether the passing of time can lead to an order."""
        return bool(self._suspects)

    def suspect(self, before: LighthouseState, replica: object, now: float) -> None:
        """Note that a member of ``before``'s grant was left out for its silence: it is evicted if that lasts."""
        since = now if before.since is None else before.since
        for member in before.grant.members if before.grant else ():
            if member.replica == replica:
                self._suspects[member.replica, member.incarnation] = since + before.policy.evict_s

    def order(self, s: LighthouseState, who: Incarnation) -> bool:
        """Order the eviction of ``who`` unless it has exited; return whether this is a new order."""
        self._suspects.pop(who, None)
        if who in self.orders or not alive(s, who):
            return False
        self.orders.add(who)
        return True

    def settle(self, s: LighthouseState, event: Event, now: float) -> list[tuple[Incarnation, str]]:
        """Drop what ``event`` has settled; return what is silent for too long, with the reasons to evict it."""
        match event:
            case Asked(request):
                self._suspects.pop((request.report.replica, request.report.incarnation), None)
            case ProcessesReported():
                for who in [*self.orders, *self._suspects]:
                    if s.views[who[0]].incarnation not in (None, who[1]) or not alive(s, who):
                        self.orders.discard(who)
                        self._suspects.pop(who, None)
        late = [who for who, due in self._suspects.items() if now >= due]
        return [(who, f"silent for {s.policy.evict_s:g} s since its ring broke") for who in late]
