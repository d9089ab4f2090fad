from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.config import parse
from ft_hsdp.core.grant import Grant, Member, Role
from ft_hsdp.core.state_id import StateId
from ft_hsdp.core.units import Places, UnitPolicy, size
from lighthouse.quorum.rules import Base
from lighthouse.quorum.state import LighthouseState, Policy, new_epoch
from lighthouse.quorum.units import apportion
from lighthouse.runtime import policy
from lighthouse.status import describe_job
from tests.support.lighthouse.lighthouse_helpers import Script, at, name, report

BASE, LATER = at(1, 5), at(2, 6)  # LATER: committed in epoch 2
RING = ("10.0.0.1:1", "10.0.0.1:2")  # two ranks
OWN = UnitPolicy(accumulate=3, batch="constant", max_accumulate=12)
SHARED = replace(OWN, shared=True)
FEW = replace(SHARED, allowed=(1, 2, 4))


def grant(
    contribute: str = "", behind: str = "", *, total: int = 4, base: StateId = BASE, epoch: int = 2
) -> Grant:
    """A membership in which nothing is shared out yet; each digit is the id of a replica."""
    roles: dict[int, Role] = {int(r): "contribute" for r in contribute} | {int(r): "behind" for r in behind}
    members = tuple(Member(r, name(r), roles[r], RING) for r in sorted(roles))
    return Grant(1, epoch, base, members, total, "")


def units(of: Grant) -> dict[int, int]:
    return {m.replica: m.units for m in of.members if m.role == "contribute"}


def places(of: Grant) -> dict[int, Places]:
    return of.places(of.base.step + 1)


def standby(of: Grant) -> list[int]:
    return [m.replica for m in of.members if m.role == "standby"]


def test_all_together_take_the_wanted_units_in_ring_order() -> None:
    whole = apportion(grant("0123"), None, SHARED, refill=False)
    assert units(whole) == dict.fromkeys(range(4), 6)
    assert (whole.units, whole.shared, whole.dealt) == (24, True, 0)
    assert places(whole) == {r: ((6 * r, 6),) for r in range(4)}
    assert not any(m.places for m in whole.members), "the usual places need no words"
    own = apportion(grant("0123"), None, OWN, refill=False)
    assert places(own) == dict.fromkeys(range(4), ((0, 6),))


def test_ranks_that_train_one_unit_together_take_it_once() -> None:
    pairs = replace(SHARED, ranks_per_unit=2)
    whole = apportion(grant("0123"), None, pairs, refill=False)
    assert units(whole) == dict.fromkeys(range(4), 3)
    assert (whole.units, places(whole)[3]) == (12, ((9, 3),))
    three = apportion(grant("013", "2"), whole, pairs, refill=True)
    assert sum(units(three).values()) == three.units == 12
    assert next(m.units for m in three.members if m.role == "behind") == 3


@pytest.mark.parametrize("refill", [False, True])
def test_the_rest_of_a_constant_batch_goes_to_those_that_are_left(refill: bool) -> None:
    """In the step of the loss only if the step is to be refilled; in the step after it in any case."""
    whole = apportion(grant("0123"), None, SHARED, refill=False)
    three = apportion(grant("013", epoch=3), whole, SHARED, refill)
    assert units(three) == dict.fromkeys((0, 1, 3), 8)
    taken = places(three)
    assert sum(map(size, taken.values())) == (24 if refill else 18)
    assert taken[0] == (((0, 6), (12, 2)) if refill else ((0, 6),)), "it goes on where it was"
    assert taken[3] == (((18, 6), (16, 2)) if refill else ((18, 6),))
    assert three.dealt == 24
    assert {r: size(p) for r, p in three.places(7).items()} == dict.fromkeys((0, 1, 3), 8)


def test_between_two_steps_the_batch_stays_whole() -> None:
    """The next step may have begun under the old membership: its places are kept, too."""
    whole = apportion(grant("0123"), None, SHARED, refill=False)
    three = apportion(grant("023", base=LATER, epoch=3), whole, SHARED, refill=True)
    assert sum(map(size, places(three).values())) == 24
    assert places(three)[2][0] == (12, 6)
    fewer = apportion(grant("023", base=at(2, 7), epoch=3), whole, SHARED, refill=True)
    assert places(fewer)[2][0] == (12, 6), "any later step of the epoch is dealt alike"
    other = apportion(grant("023", base=at(9, 7), epoch=10), whole, SHARED, refill=True)
    assert places(other) == {0: ((0, 8),), 2: ((8, 8),), 3: ((16, 8),)}, "on another state nothing was dealt"


@pytest.mark.parametrize(
    ("batch", "now", "later"), [("adapt", {0: 12, 1: 12}, 9), ("constant", {0: 20, 1: 16}, 12)]
)
def test_a_narrower_one_that_is_behind_will_take_a_share_of_its_width(batch, now, later) -> None:
    """Three replicas of 4 data ranks are wanted, with 3 micro-batches each: 36 units. Replica 2 has 3 ranks."""
    policy = UnitPolicy(accumulate=3, batch=batch, max_accumulate=12, shared=True, data_ranks=4)
    made = grant("01", behind="2", total=3)
    wide = tuple(replace(m, ring=RING * 2 if m.replica < 2 else (*RING, *RING)[:3]) for m in made.members)
    shared_out = apportion(replace(made, members=wide), None, policy, refill=False)
    assert units(shared_out) == now
    assert shared_out.units == 36
    assert next(m.units for m in shared_out.members if m.role == "behind") == later
    whole = apportion(
        replace(made, members=tuple(replace(m, role="contribute") for m in wide)), None, policy, False
    )
    assert units(whole)[2] == later, "what it was told"


def test_one_that_is_behind_takes_nothing_until_it_has_the_state() -> None:
    whole = apportion(grant("0123"), None, SHARED, refill=False)
    three = apportion(grant("012", base=LATER, epoch=3), whole, SHARED, refill=True)
    back = apportion(grant("012", behind="3", base=at(3, 7), epoch=4), three, SHARED, refill=True)
    assert units(back) == dict.fromkeys(range(3), 8)
    (behind,) = [m for m in back.members if m.role == "behind"]
    assert behind.units == 6, "what it takes once it contributes"
    assert 3 not in places(back)
    again = apportion(grant("0123", base=at(4, 8), epoch=5), back, SHARED, refill=True)
    assert units(again) == dict.fromkeys(range(4), 6)
    assert sum(map(size, places(again).values())) == 24
    assert places(again)[0] == ((0, 6),), "it may have begun with its old quota"


def test_the_surplus_stands_by_and_is_promoted_when_a_contributor_is_lost() -> None:
    """Of 4 with one lost, 2 contribute; the one that stood by comes next, before others change places."""
    whole = apportion(grant("0123"), None, FEW, refill=False)
    assert not standby(whole)
    two = apportion(grant("123", epoch=3), whole, FEW, refill=True)
    assert (units(two), standby(two)) == ({1: 12, 2: 12}, [3])
    promoted = apportion(grant("23", epoch=4), two, FEW, refill=True)
    assert units(promoted) == {2: 12, 3: 12}
    assert places(promoted)[2] == places(two)[2]
    assert size(places(promoted)[3]) == 12
    alone = apportion(grant("3", epoch=5), promoted, FEW, refill=True)
    assert units(alone) == {3: 24}
    assert not standby(alone)


def test_those_that_contribute_go_on_when_another_one_comes() -> None:
    """A lower id alone makes nobody a contributor."""
    two = apportion(grant("23"), None, FEW, refill=False)
    three = apportion(grant("023", base=LATER, epoch=3), two, FEW, refill=True)
    assert (units(three), standby(three)) == ({2: 12, 3: 12}, [0])
    whole = apportion(grant("0123", base=LATER, epoch=4), three, FEW, refill=True)
    assert units(whole) == dict.fromkeys(range(4), 6)
    behind = apportion(grant("23", behind="0", base=LATER, epoch=3), two, FEW, refill=True)
    caught_up = apportion(grant("023", base=at(3, 8), epoch=4), behind, FEW, refill=True)
    assert (units(caught_up), standby(caught_up)) == ({2: 12, 3: 12}, [0])


def test_the_operator_s_number_of_replicas_is_what_counts() -> None:
    """After a scale the wanted units are those of the new number."""
    whole = apportion(grant("0123"), None, SHARED, refill=False)
    for total in (2, 6):
        ids = "".join(map(str, range(total)))
        scaled = apportion(grant(ids, total=total, base=LATER, epoch=3), whole, SHARED, refill=True)
        assert (scaled.units, sum(units(scaled).values())) == (6 * total, 6 * total)
        assert sum(map(size, places(scaled).values())) == 6 * total


def test_one_whose_addresses_are_not_known_counts_as_one_rank() -> None:
    bare = replace(grant("01"), members=(Member(0, name(0), "contribute"), Member(1, name(1), "contribute")))
    assert apportion(bare, None, OWN, refill=False).units == 12


memberships = st.lists(
    st.tuples(st.sets(st.integers(0, 5), min_size=1), st.sets(st.integers(0, 5)), st.booleans()),
    min_size=1,
    max_size=6,
)


@given(memberships, st.sampled_from([OWN, SHARED, FEW, replace(SHARED, max_accumulate=4)]), st.integers(1, 3))
def test_through_any_memberships_no_unit_is_dealt_twice(history, policy, accumulate) -> None:
    """Some of them on the same state, with or without a refill, with some that are behind."""
    policy = replace(policy, accumulate=accumulate)
    before, step, held = None, 5, dict[int, set[int]]()
    for epoch, (able, away, advances) in enumerate(history, start=2):
        if advances:
            step, held = step + 1, {}
        base = at(epoch - 1, step) if advances else (before.base if before else BASE)
        bare = grant("".join(map(str, able)), "".join(map(str, away - able)), total=6, base=base, epoch=epoch)
        got = apportion(bare, before, policy, refill=policy.refill == "same_step" or advances)
        taken = {r: {p for a, n in runs for p in range(a, a + n)} for r, runs in places(got).items()}
        chosen = set(units(got))
        assert len(chosen) == policy.contributors(len(able))
        assert chosen | set(standby(got)) == able
        assert sum(units(got).values()) <= got.units
        if policy.max_accumulate == 12 and chosen and len(chosen) * 12 >= 6 * accumulate:
            assert sum(units(got).values()) == got.units
        assert set(taken) == chosen
        for r, mine in taken.items():
            assert len(mine) <= units(got)[r]
            others = {p for other, theirs in held.items() if other in able - {r} for p in theirs}
            assert not policy.shared or not mine & others
        assert not policy.shared or sum(map(len, taken.values())) == len(set().union(*taken.values()))
        for r, mine in taken.items():
            held[r] = held.get(r, set()) | mine
        held = {r: mine for r, mine in held.items() if r in able}
        before = got


def job(**policy: Any) -> Script:
    """A lighthouse of 4 replicas whose first epoch is granted."""
    script = Script(total=4, units=replace(SHARED, replicas=4, **policy), return_wait_s=0.0)
    for r in range(4):
        script.ask(r)
    return script


def test_a_batch_that_the_cap_makes_smaller_is_said() -> None:
    """Four replicas train 12 micro-batches; one alone may train 4."""
    script = job(max_accumulate=4)
    script.runs({0: 0, 1: None, 2: None, 3: None}, exited=[(1, 0), (2, 0), (3, 0)])
    out = script.ask(0, epoch=1, after=1)
    assert "quorum.max_accumulate" in out.notes["BatchReduced"]
    assert units(out.grant(0)) == {0: 4}


@pytest.mark.parametrize("shared", [False, True])
def test_one_that_has_other_ranks_now_takes_what_its_ranks_need(shared: bool) -> None:
    """Two ranks, then four on the same state: what was dealt to the two is free again."""
    policy = UnitPolicy(data_ranks=4, accumulate=2, shared=shared)
    narrow = apportion(grant("0", total=1), None, policy, refill=False)
    assert (units(narrow), narrow.units) == ({0: 4}, 8)
    four = replace(grant("0", total=1, epoch=3).members[0], ring=RING * 2)
    wide = apportion(replace(grant("0", total=1, epoch=3), members=(four,)), narrow, policy, refill=False)
    assert (units(wide), places(wide)) == ({0: 8}, {0: ((0, 8),)})
    again = apportion(grant("0", total=1, epoch=4), wide, policy, refill=False)
    assert (units(again), places(again)) == ({0: 4}, {0: ((0, 4),)})


def test_a_constant_batch_that_ranks_do_not_divide_is_said() -> None:
    policy = UnitPolicy(batch="constant", max_accumulate=4, data_ranks=3)
    _, notes = new_epoch(
        LighthouseState.empty(Policy(1, 9, units=policy), 1),
        Base(BASE, None, ()),
        grant("0").members,
        "why",
        refill=False,
    )
    (note,) = (each for each in notes if each.event == "BatchReduced")
    assert (note.facts["units"], note.facts["units_wanted"]) == (2, 3)


def test_status_names_the_units_of_each_and_who_stands_by() -> None:
    script = job(allowed=(1, 3))
    told = describe_job("job", script.s, {r: report(r) for r in range(4)}, "", 0.0)
    rows: Any = told["replicas"]
    assert (told["units"], told["units_wanted"]) == (12, 12)
    assert [row["state"] for row in rows] == ["training", "training", "training", "standby"]
    reasons = [f"member of epoch 1{what}" for what in (*[", 4 units in each step"] * 3, "")]
    assert [row["reason"] for row in rows] == reasons


@pytest.mark.parametrize(
    ("quorum", "allowed", "least"),
    [
        ({}, (), 1),
        ({"min_replicas": 2}, (), 2),
        ({"allowed": [4, 2, 2]}, (2, 4), 2),
        ({"allowed": [1, 2, 4], "min_replicas": 2}, (2, 4), 2),
        ({"allowed": [2, 4], "min_replicas": 3}, (4,), 4),
    ],
)
def test_fewer_contributors_than_min_replicas_are_never_allowed(quorum, allowed, least) -> None:
    chosen = policy(parse({"replicas": 4, "quorum": quorum}))
    assert (chosen.units.allowed, chosen.min_replicas) == (allowed, least)
