"""The emulated traces keep the rules of collectives, and show the faults that they name."""

from collections import defaultdict

import pytest

from ft_hsdp.core.traces import GroupTrace, RankId, RankTrace
from tests.model.traces import HANGS, KINDS, RECORDED, SLOW, Case, case, judge

A, B, C, D, E = (RankId(0, k) for k in range(5))


def small(seed: int, kind: str | None = None) -> Case:
    return case(seed, kind, replicas=4, ranks=8)


def told(made: Case, rank: RankId) -> RankTrace:
    trace = made.heard[rank].trace
    assert trace is not None
    return trace


def by_group(made: Case) -> dict[str, dict[RankId, GroupTrace]]:
    groups: dict[str, dict[RankId, GroupTrace]] = defaultdict(dict)
    for rank in made.heard:
        for group in told(made, rank).groups:
            groups[group.name][rank] = group
    return groups


def test_a_seed_gives_one_case():
    assert case(7) == case(7)
    assert case(7) != case(8)
    assert len(small(7, "dead").heard) == 32
    assert len(case(7, "lost", 3, 2, RECORDED).heard) == 6


def test_each_kind_is_drawn_and_has_its_number_of_faults():
    made = [small(seed) for seed in range(60)]
    assert {one.kind for one in made} == set(KINDS)
    for one in made:
        assert len(one.culprits) == (2 if one.kind == "two" else 1)
    assert small(0, "healthy").culprits == ()


@pytest.mark.parametrize("kind", ["before", "in", "after", "lost"])  # all others have traces of several times
@pytest.mark.parametrize("seed", range(8))
def test_a_collective_is_done_only_after_all_have_joined(kind, seed):
    made = small(seed, kind)
    for members in by_group(made).values():
        least = min(group.joined for group in members.values())
        for group in members.values():
            assert group.done <= group.joined <= group.done + 2
            assert group.done <= least
            if group.left is not None:
                assert group.received <= members[group.left].sent
                assert 0 <= group.blocked_s <= group.in_s + 1e-6


@pytest.mark.parametrize("kind", HANGS)
@pytest.mark.parametrize("seed", range(5))
def test_all_but_the_culprit_wait_in_a_hang(kind, seed):
    made = small(seed, kind)
    (fault,) = made.culprits
    for rank, heard in made.heard.items():
        waits = any(group.done < group.joined for group in told(made, rank).groups)
        assert waits or rank in fault
        assert heard.age_s < 1.3 or (rank in fault and kind in ("dead", "silent"))


@pytest.mark.parametrize("kind", SLOW)
def test_a_slow_job_goes_on_and_shows_it(kind):
    made = small(3, kind)
    assert all(heard.still_s < 10 for heard in made.heard.values())
    assert any(group.marks for rank in made.heard for group in told(made, rank).groups)
    for members in by_group(made).values():
        for group in members.values():
            assert all(mark.number % 16 == 0 and mark.number <= group.joined for mark in group.marks)


def test_what_counts_as_found():
    made = Case(0, "two", {}, (frozenset({A}), frozenset({B, C})), stopped=True)
    verdict = judge(made, [frozenset({A}), frozenset({B, C})])
    assert (verdict.exact, verdict.within, verdict.false) == (True, True, 0)
    verdict = judge(made, [frozenset({A}), frozenset({C})])
    assert (verdict.exact, verdict.within, verdict.false) == (False, True, 0)
    verdict = judge(made, [frozenset({A, B, C, D}), frozenset({E})])
    assert (verdict.exact, verdict.within, verdict.false) == (False, False, 1)
    assert judge(Case(0, "healthy", {}, (), stopped=False), [frozenset({A})]).false == 1
