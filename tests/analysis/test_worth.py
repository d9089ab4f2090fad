from dataclasses import replace
from typing import Any

import pytest

from ft_hsdp.analysis.costs import Assumptions
from ft_hsdp.analysis.plan import plan
from ft_hsdp.config import parse

# 6.4 failures per 1,000 hosts and day, 10 minutes to replace one.
FAILURES = Assumptions(30 * 6.4e-3, replace_s=600, swap_s=30, restart_s=300, step_s=20)


def made(replicas: int, ranks: int, assumptions: Assumptions = FAILURES, **sections: Any) -> Any:
    """The document of a job with a rank on each host, and its two sides."""
    job = {"replicas": replicas, "ranks_per_replica": ranks, "hosts": {"per_replica": ranks}}
    document = plan(parse({**job, "checkpoint": {"every": 100}, **sections}), assumptions, size=100.0)
    return document, document["with_copies"], document["replicas_alone"]


def test_three_replicas_copy_nothing() -> None:
    document, copied, alone = made(3, 4)
    assert document["copied_bytes_per_step"] == 0
    assert copied == alone
    assert document["shards"][1] == {"rank": 1, "holders": ["r0h1", "r1h1", "r2h1"], "copies": []}
    assert {row["bytes"] for row in document["hosts"]} == {2 * 300}
    assert [row["survives"] for row in copied["lost_hosts"]][1:3] == [1, pytest.approx(1 - 4 / 220)]


def test_one_replica_with_copies_and_without() -> None:
    document, copied, alone = made(1, 16)
    assert document["copied_bytes_per_step"] == 16 * 75
    assert {row["bytes"] for row in document["hosts"]} == {5 * 75}
    assert [round(row["survives"], 4) for row in copied["lost_hosts"]][:4] == [1, 0.9333, 0.8, 0.6154]
    assert {row["survives"] for row in alone["lost_hosts"]} == {0}
    # Without copies each failure takes the state with it: 100 steps between checkpoints, and the restart.
    assert alone["losses_per_month"] == pytest.approx(16 * 6.4e-3 * 30)
    assert alone["failure_costs_s"] == pytest.approx(300 + 20 * 99 / 2)
    assert copied["failure_costs_s"] == pytest.approx(50, rel=0.01)
    assert alone["effective_ratio"] < copied["effective_ratio"] < 1


def test_hosts_that_do_not_fail() -> None:
    _, copied, _ = made(1, 2, replace(FAILURES, host_failures_per_month=0.0))
    assert (copied["losses_per_month"], copied["effective_ratio"]) == (0, 1)


def test_copies_of_every_tenth_step_lose_up_to_ten() -> None:
    every, tenth = (made(1, 16, memory={"every": n})[1]["failure_costs_s"] for n in (1, 10))
    assert every == pytest.approx(30 + 20, rel=0.01)
    assert tenth == pytest.approx(30 + 5.5 * 20, rel=0.01)


def test_racks_that_hold_all_copies_of_a_shard() -> None:
    hosts = {"per_replica": 4, "labels": {"r0h[01]": "a/0", "*": "a/1"}}
    by_host, by_rack = (made(1, 4, hosts=hosts, memory={"apart": level}) for level in ("host", "rack"))
    zone = {"fatal": 1, "known": 1}
    assert by_rack[2]["lost_domains"] == {"rack": {"fatal": 2, "known": 2}, "zone": zone}
    assert by_rack[1]["lost_domains"] == {"rack": {"fatal": 0, "known": 2}, "zone": zone}
    assert by_host[1]["lost_domains"]["rack"]["fatal"] == 2
