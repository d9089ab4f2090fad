"""Every unit exactly once, and as many as wanted, however units are dealt and whoever dies on the way."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_hsdp.core import grant as grants
from ft_hsdp.core import units, voting
from ft_hsdp.core.commit import CommitRecord
from ft_hsdp.core.replica_state import Replica
from ft_hsdp.core.units import Places, UnitPolicy
from tests.model import moves
from tests.model.explore import explore
from tests.model.model import Model
from tests.model.mutants import Patch, broken
from tests.model.scenario import FAULTS
from tests.model.world import Bounds, World, ledger

ADAPT, GLOBAL = UnitPolicy(), UnitPolicy(shared=True)
NEXT_STEP = UnitPolicy(accumulate=2, batch="constant", max_accumulate=6)
SAME_STEP = replace(NEXT_STEP, refill="same_step")
CAPPED = replace(SAME_STEP, max_accumulate=2)
POLICIES = [p for each in (ADAPT, NEXT_STEP, SAME_STEP, CAPPED) for p in (each, replace(each, shared=True))]
ONE_DEATH: dict[str, Any] = {"deaths": 1, "pauses": 0, "restarts": 0, "replicas": 2, "steps": 3}


def wander(model: Model, seed: int) -> World:
    """Let anything happen, one thing after another and now and then a fault, until all have ended."""
    rng, world = random.Random(seed), model.initial()
    for _ in range(1500):
        ways = list(moves.successors(model, world)) or list(moves.patience(model, world))
        if model.finished(world) or not ways:
            return world
        faults = [way for way in ways if any(fault in way[0] for fault in FAULTS)]
        quiet = [way for way in ways if way not in faults]
        world = rng.choice(faults if faults and (not quiet or rng.random() < 0.05) else quiet)[1]()
    raise AssertionError("no end within 1500 moves")


@settings(max_examples=80)
@given(st.integers(0, 2**32), st.sampled_from(POLICIES), st.integers(2, 6), st.booleans(), st.booleans())
def test_with_deaths_at_any_point(seed: int, policy: UnitPolicy, steps: int, eager: bool, few: bool) -> None:
    policy = replace(policy, allowed=(2, 3)) if few else policy
    deaths = 1 if few else 3
    bounds = Bounds(4, steps, deaths, pauses=1, restarts=1, breaks=2, units=policy, eager=eager)
    model = Model(bounds)  # looks at each commit
    world = wander(model, seed)
    assert model.finished(world)
    for content in model.held(world):
        trained = [(shard, unit) for step in content for shard, unit, _ in step]
        end = ledger(content, 1 if policy.shared else 4)
        below = {(s, n) for s, cursor in enumerate(end.cursors) for n in range(cursor)}
        assert len(trained) == len(set(trained))
        assert set(trained) == below - {
            (s, n) for s, first, count in end.holes for n in range(first, first + count)
        }


@pytest.mark.parametrize(
    ("policy", "eager", "steps"),
    [
        (GLOBAL, False, 2),
        (NEXT_STEP, True, 2),
        (replace(SAME_STEP, shared=True), False, 2),
        pytest.param(GLOBAL, True, 3, marks=pytest.mark.proof),
        pytest.param(NEXT_STEP, False, 3, marks=pytest.mark.proof),
        pytest.param(replace(SAME_STEP, shared=True), True, 3, marks=pytest.mark.proof),
        pytest.param(GLOBAL, False, 3, marks=pytest.mark.soak),
        pytest.param(NEXT_STEP, True, 3, marks=pytest.mark.soak),
        pytest.param(replace(SAME_STEP, shared=True), False, 3, marks=pytest.mark.soak),
    ],
)
def test_all_orders_with_a_loss_before_during_and_after_a_refill(
    policy: UnitPolicy, eager: bool, steps: int
) -> None:
    bounds = Bounds(**{**ONE_DEATH, "steps": steps}, breaks=1, units=policy, eager=eager)
    result = explore(bounds, limit_s=240)
    assert not result.violation, str(result)
    assert result.exhausted
    assert result.states > 5_000


THREE: dict[str, Any] = {"replicas": 3, "steps": 2, "deaths": 1, "pauses": 0, "restarts": 0}
ALL = replace(SAME_STEP, shared=True)  # of one data shard


@pytest.mark.parametrize(
    ("policy", "faults"),
    [
        pytest.param(replace(ALL, allowed=(1, 2)), {"steps": 1}, id="a standby that is promoted"),
        pytest.param(
            replace(ALL, allowed=(1, 2)), {}, id="a standby that is promoted, two steps", marks=pytest.mark.proof
        ),
        pytest.param(ALL, {"eager": True}, id="two that refill", marks=pytest.mark.proof),
        pytest.param(SAME_STEP, {}, id="data shards of their own", marks=pytest.mark.proof),
        pytest.param(replace(NEXT_STEP, shared=True), {}, id="no refill", marks=pytest.mark.proof),
        pytest.param(replace(ALL, max_accumulate=2), {}, id="a cap", marks=pytest.mark.proof),
        pytest.param(ALL, {"deaths": 2, "steps": 1}, id="a loss in the refill", marks=pytest.mark.proof),
        pytest.param(
            ALL, {"replicas": 2, "steps": 3, "lapses": 1}, id="an unanswered ask", marks=pytest.mark.proof
        ),
    ],
)
def test_all_orders_with_three_replicas(policy: UnitPolicy, faults: dict[str, Any]) -> None:
    result = explore(Bounds(**{**THREE, **faults}, units=policy), limit_s=240)
    assert not result.violation, str(result)
    assert result.exhausted, str(result)
    assert result.states > 5_000


def _the_same_for_all(counts: Any, shared: bool) -> tuple[Places, ...]:
    return tuple(((0, count),) for count in counts)


@pytest.mark.parametrize("checked", [True, False])
def test_two_with_one_unit_never_make_a_step(checked: bool) -> None:
    """Were it ever dealt twice: the lower replica's counts, and only it."""
    unchecked: list[Patch] = [] if checked else [(CommitRecord, "doubled", ())]
    with broken((grants, "deal", _the_same_for_all), *unchecked):
        result = explore(Bounds(**{**ONE_DEATH, "steps": 2}, units=GLOBAL), limit_s=240)
    assert result.exhausted is checked, str(result)
    assert result.violation.startswith("" if checked else "exactly once: ")
    assert bool(result.violation) is not checked


def _twice(self: UnitPolicy, widths: Sequence[int]) -> tuple[int, ...]:
    return tuple(2 * self.accumulate * width for width in widths)


SUM = Model.sum


def _as_granted(self: Model, w: World, me: Replica) -> CommitRecord | None:
    """The units are those of the grant, whatever was trained."""
    record = SUM(self, w, me)
    if record is None or me.grant is None:
        return None
    due = me.grant.places(record.step)
    parts = (replace(c, units=units.size(due[c.replica])) for c in record.contributions)
    return replace(record, contributions=tuple(parts))


def _by_quota(self: Model, w: World, me: Replica) -> CommitRecord | None:
    """The units are those in the ring, the weights those of the grant."""
    record = SUM(self, w, me)
    if record is None or me.grant is None:
        return None
    parts = (replace(c, weight=c.units) for c in record.contributions)
    return replace(record, contributions=tuple(parts))


MUTANTS: list[tuple[str, Any, str, Callable[..., Any], UnitPolicy, str]] = [
    ("a quota is counted twice", UnitPolicy, "shares", _twice, NEXT_STEP, "too many units"),
    ("a refill without a fence", voting, "head", lambda *_: (), replace(SAME_STEP, shared=True), "other units"),
    ("units from the grant", Model, "sum", _as_granted, SAME_STEP, "other units"),
    ("a weight from the grant", Model, "sum", _by_quota, SAME_STEP, "other weights"),
]


@pytest.mark.parametrize(
    ("place", "name", "fault", "policy", "found"),
    [
        pytest.param(*m[1:], id=m[0], marks=[pytest.mark.proof] if m[0] == "units from the grant" else [])
        for m in MUTANTS
    ],
)
def test_mutants_are_caught(place: Any, name: str, fault: Any, policy: UnitPolicy, found: str) -> None:
    bounds = Bounds(**ONE_DEATH, wipes=1, units=policy, eager=True)
    with broken((place, name, fault)):
        result = explore(bounds, limit_s=240)
    assert result.violation.startswith(found), str(result)
