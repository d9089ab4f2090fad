"""Survival of lost hosts, exact, beside the formulas of the papers."""

from collections.abc import Collection
from fractions import Fraction
from itertools import combinations
from math import ceil, comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.analysis.plan import loss_rate
from ft_hsdp.analysis.survival import expected_losses, probability, survivable
from ft_hsdp.memory.placement import holders, place

PAIRS = [(5, 2), (7, 2), (7, 3), (8, 3), (10, 4), (11, 4), (13, 3)]  # of Theorem 1: the last group is a ring


def ways(hosts: int, copies: int) -> tuple[int, ...]:
    found = survivable(holder_sets(hosts, copies))
    assert found is not None
    return found


def ring(hosts: int, copies: int) -> list[frozenset[int]]:
    return [frozenset((i + k) % hosts for k in range(copies)) for i in range(hosts)]


def survives(hosts: int, copies: int, lost: int) -> Fraction:
    return probability(ways(hosts, copies), lost)


def holder_sets(hosts: int, copies: int) -> list[frozenset[int]]:
    """The hosts that hold the shards of each host, itself included."""
    divided, _ = place(hosts, copies)
    return [frozenset((owner, *holders(group, owner, copies))) for group in divided for owner in group]


def union_bound(hosts: int, copies: int, lost: int) -> Fraction:
    """GEMINI's lower bound of ``survives`` (Corollary 1), exact for fewer than 2 * ``copies`` lost hosts."""
    if lost < copies:
        return Fraction(1)
    return max(Fraction(0), 1 - Fraction(hosts * comb(hosts - copies, lost - copies), copies * comb(hosts, lost)))


def best_possible(hosts: int, copies: int) -> Fraction:
    """The largest probability of any placement to survive `copies` lost hosts (GEMINI, Theorem 1)."""
    return 1 - Fraction(ceil(hosts / copies), comb(hosts, copies))


@pytest.mark.parametrize(("hosts", "copies"), PAIRS)
def test_theorem_1(hosts: int, copies: int) -> None:
    """The mixed strategy has few holder sets, and is near the best that any placement can reach."""
    assert len(set(holder_sets(hosts, copies))) == hosts - (copies - 1) * (hosts // copies - 1)
    gap = best_possible(hosts, copies) - survives(hosts, copies, copies)
    assert 0 <= gap <= Fraction(2 * copies - 3, comb(hosts, copies))


@pytest.mark.parametrize(("hosts", "copies"), [(5, 2), (7, 2), (8, 3), (11, 4)])
def test_the_bound_of_theorem_1_is_reached(hosts: int, copies: int) -> None:
    assert best_possible(hosts, copies) - survives(hosts, copies, copies) == Fraction(
        2 * copies - 3, comb(hosts, copies)
    )


def counted(kept: Collection[frozenset[int]]) -> tuple[int, ...]:
    units = sorted(frozenset().union(*kept))
    return tuple(
        sum(not any(each <= set(dead) for each in kept) for dead in combinations(units, lost))
        for lost in range(len(units) + 1)
    )


@given(st.sets(st.frozensets(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=8))
def test_any_holders_can_be_counted(kept: set[frozenset[int]]) -> None:
    assert survivable(kept) == counted(kept)


def test_holders_that_overlap_too_much_are_not_counted() -> None:
    far = [frozenset({i, (7 * i + 3) % 61, (19 * i + 8) % 61}) for i in range(61)]
    assert survivable(far) is None


def test_the_figures_of_the_papers() -> None:
    assert survives(16, 2, 2) == Fraction(14, 15)  # GEMINI, figure 9
    assert survives(16, 2, 3) == Fraction(4, 5)
    assert [round(100 * float(survives(16, 2, k)), 2) for k in (4, 5, 6)] == [61.54, 41.03, 22.38]
    assert survives(16, 2, 9) == 0
    assert [union_bound(16, 2, k) for k in (1, 2, 3, 4, 6)] == [
        1,
        Fraction(14, 15),
        Fraction(4, 5),
        Fraction(3, 5),
        0,
    ]
    around = survivable(ring(16, 2))
    assert around is not None
    assert around[3] == Fraction(22, 35) * comb(16, 3)  # not the 60 % that GEMINI prints
    assert 1 - survives(4, 2, 2) == Fraction(2, 6)  # figure 3: a ring loses 4 of 6 pairs
    assert survivable(ring(4, 2)) == (1, 4, 2, 0, 0)
    # ReStore §IV-D: the expected number of failures until data is lost.
    assert expected_losses(ways(4, 2)) == pytest.approx(8 / 3, rel=1e-12)
    assert expected_losses(ways(8, 2)) == pytest.approx(128 / 35, rel=1e-12)
    assert [round(expected_losses(ways(*n)), 4) for n in [(16, 2), (16, 4), (48, 4)]] == [5.0922, 10.5026, 23.5604]


@given(st.integers(1, 8), st.integers(1, 4), st.data())
def test_restores_formula_gives_the_same(count: int, copies: int, data: st.DataObject) -> None:
    hosts = count * copies
    lost = data.draw(st.integers(0, hosts))
    unlucky = sum(
        (-1) ** (j + 1) * comb(count, j) * comb(hosts - j * copies, lost - j * copies)
        for j in range(1, count + 1)
        if lost >= j * copies
    )
    assert 1 - survives(hosts, copies, lost) == Fraction(unlucky, comb(hosts, lost))


def test_the_figures_of_4096_hosts_are_exact() -> None:
    count = 1024
    lost = 100
    unlucky = sum(
        (-1) ** (j + 1) * comb(count, j) * comb(4096 - 4 * j, lost - 4 * j) for j in range(1, lost // 4 + 1)
    )
    assert 1 - survives(4096, 4, lost) == Fraction(unlucky, comb(4096, lost))
    assert survives(4096, 4, 3073) == 0
    assert survives(4096, 4, 3072) > 0


def test_losses_per_day() -> None:
    """Two replicas of 128 hosts, 6.4 failures per 1,000 hosts and day, 10 minutes to replace one."""
    failures, repair = 6.4e-3, 10 / 1440
    by_replica = loss_rate(1, 2, 128 * failures, repair)
    by_shard = loss_rate(128, 2, failures, repair)
    assert round(1 / by_replica, 1) == 107.3
    assert round(1 / by_shard) == 13733
    assert ceil(by_replica / by_shard) == 128
