"""The counter-examples behind the protocol's rules, played with the production cores."""

from collections.abc import Mapping
from typing import Any

import pytest

from ft_hsdp.core.grant import Report
from ft_hsdp.core.replica_state import Replica
from lighthouse.quorum import membership, rules, witnesses
from lighthouse.quorum.state import LighthouseState
from tests.model.invariants import Violation
from tests.model.mutants import broken
from tests.model.scenario import Scenario
from tests.model.world import Bounds

ADOPT = ("replica 0 gets epoch 1", "replica 1 gets epoch 1", "replica 2 gets epoch 1")
BROKEN = (
    *ADOPT,
    "a link of replica 1 in epoch 1 breaks",
    "replica 0 holds the sum of epoch 1 step 1",
    "replica 2 sees the ring of epoch 1 break",
    "the grace of the silent ends",
)
KILLED = (
    *ADOPT,
    "replica 2 is killed",
    "replica 0 sees the ring of epoch 1",
    "replica 1 sees the ring of epoch 1",
    "the lighthouse learns",
    "replica 0 gets epoch 2",
    "replica 1 gets epoch 2",
    "replica 0 holds",
    "replica 1 gets the token",
)


def scenario(**faults: int) -> Scenario:
    allowed: dict[str, Any] = {"deaths": 0, "pauses": 0, "restarts": 0, **faults}
    return Scenario(Bounds(**allowed))


SOLO_ON_A_LEASE = (
    "replica 0 gets epoch 1",
    "a link of replica 0 in epoch 1 breaks",
    "replica 1 gets epoch 1",
    "the grace of the silent ends",
    "replica 0 gets epoch 2",
    "replica 1 sees the ring of epoch 1 break",
    "replica 0 holds the sum of epoch 2 step 1",
    "replica 0 gets no answer in time",
    "replica 1 gets epoch 3",
    "replica 1 has fetched",
    "a link of replica 1 in epoch 3 breaks",
    "the grace of the silent ends",
    "replica 0 holds the sum of epoch 2 step 2",
)


def test_a_new_epoch_overlaps_with_every_epoch_since_the_head() -> None:
    faults = {"replicas": 2, "steps": 3, "breaks": 2, "pauses": 2, "lapses": 1}
    s = scenario(**faults).play(*SOLO_ON_A_LEASE)
    assert not [o for o in s.options() if "gets epoch 4 on (2, 1" in o]
    s.run_out()
    with broken((rules, "uncovered", lambda *_: None)):
        s = scenario(**faults).play(*SOLO_ON_A_LEASE, "replica 1 gets epoch 4")
        with pytest.raises(Violation, match="two histories"):
            s.play("replica 1 holds the sum of epoch 4 step 2")


# Found by exploring the production cores.


def test_the_last_step_is_decided_like_any_other() -> None:
    s = scenario(steps=1, breaks=2, pauses=2).play(
        *BROKEN,
        "replica 1 gets epoch 2",
        "replica 2 gets epoch 2",
        "replica 1 holds the sum of epoch 2 step 1",
        "a link of replica 1 in epoch 2 breaks",
        "replica 2 gets the token of epoch 2 step 1",
        "replica 2 sees the ring of epoch 2 break",
        "replica 0 sees the ring of epoch 1 break",
        "the grace of the silent ends",
    )
    # 1 and 2 are told to end on their record: 0 must not be told to end on its own.
    assert not s.can("replica 0 gets word")
    s.run_out()


def _all_are_right(_: LighthouseState, reports: Mapping[int, Report], *__: Any) -> witnesses.Judgement:
    return witnesses.Judgement(dict(reports), {})


def test_a_record_that_a_later_decision_passed_over_stays_dead() -> None:
    lines = (
        *BROKEN,
        "replica 0 sees the ring of epoch 1 break",
        "replica 1 gets epoch 2",
        "replica 2 gets epoch 2",
        "replica 1 holds the sum of epoch 2 step 1",
        "a link of replica 2 in epoch 2 breaks",
        "the grace of the silent ends",
        "replica 1 sees the ring of epoch 2 break",
    )
    faults = {"steps": 1, "breaks": 3, "pauses": 3}
    s = scenario(**faults).play(*lines)
    s.run_out()
    assert len(set(s.world.content)) == 1
    with broken((witnesses, "judge", _all_are_right), (membership, "overruled", lambda *_: False)):
        s = scenario(**faults).play(*lines, "the grace of the silent ends")
        with pytest.raises(Violation, match="two histories"):
            s.play("replica 0 gets word to catch up", "replica 1 gets word to catch up")


def test_a_yes_of_one_left_behind_is_not_forgotten() -> None:
    """2 is behind and votes for a step that 0 commits; 1 has the base of it, and asks together with 2."""
    lines = (
        *KILLED,
        "replica 0 gets the token",
        "replica 1 gets the token",
        "a link of replica 0",
        "replica 2 restarts",
        "the grace",
        "replica 0 gets epoch 3",
        "replica 2 gets epoch 3",
        "replica 0 holds",
        "replica 2 gets the token",
        "a link of replica 2",
        "replica 1 sees the ring of epoch 2",
        "the grace",
    )
    faults = {"steps": 3, "deaths": 1, "pauses": 2, "breaks": 2}
    s = scenario(**faults).play(*lines)
    assert not [o for o in s.options() if "gets epoch 4" in o]
    s.run_out()
    with broken((Replica, "in_doubt", None)):
        s = scenario(**faults).play(*lines, "replica 0 gets the token", "replica 1 gets epoch 4")
        s.play("replica 2 gets epoch 4", "replica 1 holds", "replica 2 gets the token of epoch 4")
        with pytest.raises(Violation, match="two histories"):
            s.play("replica 1 gets the token of epoch 4")


# Behind, corrupt, and back again.

REJOINED = (
    *KILLED,
    "replica 2 restarts",
    "replica 0 gets the token",
    "replica 1 gets the token",
    "replica 0 gets epoch 3",
    "replica 1 gets epoch 3",
    "replica 2 gets epoch 3",
    "replica 0 holds",
    "replica 1 gets the token",
    "replica 2 gets the token",
)


def test_without_that_wait_it_joins_later_and_nobody_is_stalled() -> None:
    s = Scenario(Bounds(deaths=1, pauses=0, restarts=0, steps=4)).play(*REJOINED)
    s.play("replica 0 gets the token", "replica 1 gets the token", "replica 2 gets the token")
    two = s.model.replica(s.world, 2)
    assert two is not None
    assert len(two.log) == 1
    s.run_out()
