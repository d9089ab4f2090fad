"""Replicas of two widths: hosts that are lost without a spare, and come back, in every order."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from ft_hsdp.core import events, voting
from ft_hsdp.core import replica as core
from ft_hsdp.core.grant import Grant, Member
from ft_hsdp.core.replica_state import Replica, Step
from ft_hsdp.core.units import UnitPolicy
from lighthouse.quorum import membership, rules, state
from lighthouse.quorum import units as apportioning
from lighthouse.quorum.events import OpenRequest
from tests.model.explore import explore
from tests.model.model import Model
from tests.model.mutants import broken
from tests.model.world import Bounds, World

CONSTANT = UnitPolicy(accumulate=2, batch="constant", max_accumulate=6)
SHARED = UnitPolicy(accumulate=1, batch="constant", max_accumulate=6, refill="same_step", shared=True)


def hosts(**allowed: Any) -> Bounds:
    """Two replicas of two ranks, each on a host of its own; only what is named may go wrong."""
    nothing = {"replicas": 2, "steps": 2, "deaths": 0, "pauses": 0, "restarts": 0, "ranks": 2, "recovery": True}
    return Bounds(**{**nothing, **allowed})


def soak(**allowed: Any) -> Any:
    """A space that takes longer than a test may."""
    return pytest.param(hosts(**allowed), marks=pytest.mark.soak)


@pytest.mark.parametrize(
    "space",
    [
        hosts(losses=1),
        hosts(losses=1, returns=1, units=SHARED),
        hosts(losses=1, returns=1, patient=True),
        hosts(started_with=(1, 2), returns=1, steps=3, units=CONSTANT),
        hosts(replicas=1, losses=2, returns=1, ranks=3, steps=3, copied=True),
        soak(losses=2, ranks=3),
        soak(losses=2, ranks=3, returns=1),
        soak(losses=1, deaths=1),
        soak(losses=1, returns=1, deaths=1),
        soak(losses=1, returns=1, breaks=1),
        soak(losses=1, returns=1, restarts=1),
        soak(losses=1, pauses=1, breaks=1),
        soak(losses=1, returns=1, breaks=1, steps=3, eager=True, units=replace(CONSTANT, shared=True)),
        soak(replicas=3, losses=1),
        soak(replicas=3, losses=1, returns=1),
        soak(replicas=3, ranks=3, started_with=(3, 2, 1), losses=1),
    ],
    ids=str,
)
def test_no_violation_with_replicas_of_two_widths(space: Bounds) -> None:
    result = explore(space, limit_s=400)
    assert not result.violation, str(result)
    assert result.exhausted
    assert result.states >= (200 if space.replicas == 1 else 500)


def test_a_host_is_lost_and_comes_back_at_all_times() -> None:
    """Also in a fetch, and while a replica starts again with fewer ranks."""
    seen: set[tuple[str, str]] = set()

    def note(name: str, happen: Callable[[Model, World, int], World]) -> Callable[[Model, World, int], World]:
        def noted(model: Model, w: World, r: int) -> World:
            me = model.replica(w, r)
            seen.add((name, "starts" if me is None else "fetches" if me.fetching is not None else "trains"))
            return happen(model, w, r)

        return noted

    with broken(*((Model, name, note(name, getattr(Model, name))) for name in ("lose_host", "get_host"))):
        result = explore(hosts(steps=1, started_with=(3, 1), ranks=3, losses=2, returns=1), limit_s=240)
    assert result.exhausted, str(result)
    lost = {("lose_host", "trains"), ("lose_host", "fetches"), ("lose_host", "starts")}
    assert seen >= lost | {("get_host", "trains"), ("get_host", "starts")}


# Each rule of widths is there because the world breaks without it.


def _as_wide_as_at_first(request: OpenRequest, base: rules.Base) -> Member:
    """The lighthouse believes that each replica has all its ranks."""
    found = MEMBER(request, base)
    return replace(found, ring=tuple(f"{found.replica}:{rank}" for rank in range(2)))


def _as_much_for_all(self: UnitPolicy, widths: Sequence[int]) -> tuple[int, ...]:
    """A replica with fewer ranks trains as many units as the others."""
    return tuple(self.accumulate * max(widths) for _ in widths)


def _the_first_take_over(self: UnitPolicy, widths: Sequence[int]) -> tuple[int, ...]:
    """What is missing to a constant batch goes to whoever comes first in the ring."""
    wanted = self.replicas * self.accumulate * self.data_ranks
    each = max(1, wanted // sum(widths))
    missing, found = wanted - each * sum(widths), []
    for width in widths:
        found.append((each + (width <= missing)) * width)
        missing -= width * (width <= missing)
    return tuple(found)


def _keep_all_places(grant: Grant, before: Grant | None, dealt: Any, refill: bool) -> Grant:
    """A replica with another number of ranks keeps its places."""
    if before is not None:
        ring = {m.replica: m.ring for m in grant.members}
        before = replace(before, members=tuple(replace(m, ring=ring.get(m.replica, ())) for m in before.members))
    return KEEP_PLACES(grant, before, dealt, refill)


def _leave_at_once(s: Replica, event: events.Event) -> Step:
    """Whoever is told to leave does so in the middle of a step."""
    after, due = TRANSITION(s, event)
    return voting.leave_job(after) if isinstance(event, events.LeaveRequested) and after.intact else (after, due)


MEMBER, KEEP_PLACES, TRANSITION = state.member, apportioning._keep_places, core.transition
GROWS = hosts(started_with=(1, 2), returns=1)
TAKES_OVER = hosts(losses=1, units=CONSTANT)
MUTANTS: dict[str, tuple[Any, str, Any, Bounds, str]] = {
    "widths are not in the grant": (Grant, "widths", property(lambda _: ()), hosts(losses=1), "other widths: "),
    "an old width counts": (membership, "member", _as_wide_as_at_first, hosts(losses=1), "other widths: "),
    "a commit names no width": (Grant, "narrower", lambda *_: {}, hosts(losses=1), "other widths: "),
    "as many units for fewer ranks": (UnitPolicy, "shares", _as_much_for_all, hosts(losses=1), "waits: "),
    "fewer ranks take over": (UnitPolicy, "shares", _the_first_take_over, TAKES_OVER, "takes over: "),
    "places stay at another width": (apportioning, "_keep_places", _keep_all_places, GROWS, "idle ranks: "),
    "a replica grows at once": (core, "transition", _leave_at_once, GROWS, "repeated: "),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_without_the_rule_of_widths_there_is_a_counter_example(name: str) -> None:
    place, attribute, mutant, space, kind = MUTANTS[name]
    with broken((place, attribute, mutant)):
        result = explore(space, limit_s=240)
    assert result.violation.startswith(kind), str(result)
