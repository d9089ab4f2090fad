from dataclasses import replace
from math import inf

import pytest

from ft_hsdp.analysis.costs import Assumptions
from ft_hsdp.analysis.reliability import reliability
from ft_hsdp.memory.hosts import Host

# 6.4 failures per 1,000 hosts and day, 10 minutes to replace one.
FAILURES = Assumptions(30 * 6.4e-3, replace_s=600, swap_s=30, restart_s=300, step_s=20)


def job(replicas: int, hosts: int, rack: str = "") -> list[list[Host]]:
    return [[Host("", rack, f"r{n}h{i}") for i in range(hosts)] for n in range(replicas)]


def test_three_replicas_copy_nothing() -> None:
    found = reliability(job(3, 4), [100] * 4, 2, "host", FAILURES, 100)
    assert found.copied_bytes == 0
    assert found.with_copies == found.without_copies
    assert found.holders[1] == tuple(Host("", "", f"r{n}h1") for n in range(3))
    assert found.host_bytes == {f"r{n}h{i}": 200 for n in range(3) for i in range(4)}
    assert found.with_copies.survives[2] == 1
    assert found.with_copies.survives[3] == pytest.approx(1 - 4 / 220)


def test_one_replica_with_copies_and_without() -> None:
    found = reliability(job(1, 16), [100] * 16, 2, "host", FAILURES, 100)
    assert found.copied_bytes == 1600
    assert set(found.host_bytes.values()) == {400}
    assert [round(float(p or 0), 4) for p in found.with_copies.survives.values()] == [1, 0.9333, 0.8, 0.6154]
    assert found.without_copies.survives == {1: 0, 2: 0, 3: 0, 4: 0}
    # Without copies each failure takes the state with it: 100 steps between checkpoints, and the restart.
    assert found.without_copies.losses_per_month == pytest.approx(16 * 6.4e-3 * 30)
    assert found.without_copies.lost_s == pytest.approx(300 + 20 * 99 / 2)
    assert found.with_copies.lost_s == pytest.approx(50, rel=0.01)
    assert found.without_copies.ratio < found.with_copies.ratio < 1


def test_what_cannot_be_protected_is_said() -> None:
    found = reliability(job(2, 2, rack="7"), [1, 1], 2, "rack", FAILURES, 100)
    assert found.plan.unprotected == (0, 1)
    assert "racks" in found.plan.reason


def test_without_checkpoints_a_lost_state_is_the_end_of_the_job() -> None:
    found = reliability(job(1, 2), [1, 1], 1, "host", FAILURES, 0)
    figures = found.with_copies
    assert (figures.lost_s, figures.ratio, figures.renewal) == (inf, 0, 0)


def test_hosts_that_do_not_fail() -> None:
    found = reliability(job(1, 2), [1, 1], 2, "host", replace(FAILURES, host_failures_per_month=0.0), 100)
    assert (found.with_copies.losses_per_month, found.with_copies.ratio) == (0, 1)


def test_copies_of_every_tenth_step_lose_up_to_ten() -> None:
    every, tenth = (reliability(job(1, 16), [1] * 16, 2, "host", FAILURES, 100, every=n) for n in (1, 10))
    swap = (FAILURES.swap_s, FAILURES.step_s)
    assert every.with_copies.lost_s == pytest.approx(swap[0] + swap[1], rel=0.01)
    assert tenth.with_copies.lost_s == pytest.approx(swap[0] + 5.5 * swap[1], rel=0.01)


def test_racks_that_hold_all_copies_of_a_shard() -> None:
    racks = [Host("a", f"{i // 2}", f"h{i}") for i in range(4)]
    by_host, by_rack = (reliability([racks], [1] * 4, 2, level, FAILURES, 100) for level in ("host", "rack"))
    assert by_rack.without_copies.fatal == {"rack": (2, 2), "zone": (1, 1)}
    assert by_rack.with_copies.fatal == {"rack": (0, 2), "zone": (1, 1)}
    assert by_host.with_copies.fatal["rack"] == (2, 2)
