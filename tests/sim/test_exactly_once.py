"""Every batch exactly once, however batches are dealt and whoever dies on the way."""

from __future__ import annotations

import contextlib
import random
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_hsdp.core.commit import CommitRecord
from ft_hsdp.core.ledger import Assignment, BatchAssigner, Ledger
from ft_hsdp.sim import moves
from ft_hsdp.sim.explore import explore
from ft_hsdp.sim.model import Model
from ft_hsdp.sim.world import Bounds, World, ledger
from tests.support.core.sim_helpers import FAULTS

ASSIGNMENTS: tuple[Assignment, ...] = ("per_replica", "global")
ONE_DEATH: dict[str, Any] = {"deaths": 1, "pauses": 0, "restarts": 0, "replicas": 2, "steps": 3}


def wander(model: Model, seed: int) -> World:
    """Let anything happen, one thing after another and now and then a fault, until everybody has ended."""
    rng, world = random.Random(seed), model.initial()
    for _ in range(1500):
        ways = list(moves.successors(model, world)) or list(moves.patience(model, world))
        if model.finished(world) or not ways:
            return world
        faults = [way for way in ways if any(fault in way[0] for fault in FAULTS)]
        quiet = [way for way in ways if way not in faults]
        world = rng.choice(faults if faults and (not quiet or rng.random() < 0.05) else quiet)[1]()
    raise AssertionError("no end within 1500 moves")


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), assignment=st.sampled_from(ASSIGNMENTS), steps=st.integers(2, 6))
def test_with_deaths_at_any_point(seed: int, assignment: Assignment, steps: int) -> None:
    bounds = Bounds(replicas=4, steps=steps, deaths=3, pauses=1, restarts=1, breaks=2, assignment=assignment)
    model = Model(bounds)  # looks at each commit
    world = wander(model, seed)
    assert model.finished(world)
    for content in model._held(world):
        batches = [(shard, index) for step in content for shard, index, _ in step]
        end = ledger(content, BatchAssigner(assignment, 4).shards)
        all_below = {(s, i) for s, cursor in enumerate(end.cursors) for i in range(cursor)}
        assert len(batches) == len(set(batches))
        assert set(batches) == all_below - set(end.holes)


def test_all_orders_with_one_sequence_for_all() -> None:
    result = explore(Bounds(**ONE_DEATH, breaks=1, assignment="global"), limit_s=60)
    assert not result.violation, str(result)
    assert result.exhausted
    assert result.states > 5_000


def _everybody_takes_the_same(_: BatchAssigner, ledger: Ledger, me: int) -> tuple[int, int]:
    return 0, ledger.untrained(0, 0)


@pytest.mark.parametrize("checked", [True, False])
def test_two_with_one_batch_never_make_a_step(checked: bool) -> None:
    """Were it ever dealt twice: the lower replica's counts, and only it."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(BatchAssigner, "assign", _everybody_takes_the_same))
        if not checked:
            stack.enter_context(mock.patch.object(CommitRecord, "doubled", ()))
        result = explore(Bounds(**{**ONE_DEATH, "steps": 2}, assignment="global"), limit_s=60)
    assert result.exhausted is checked, str(result)
    assert result.violation.startswith("" if checked else "exactly once: ")
    assert bool(result.violation) is not checked
