"""Hosts that are lost with all that was in their memory: from where a real job takes its state then.

Two replicas of two ranks; each rank is on a host of its own. A rank that stands still before its vote keeps the
whole job at a step whose state every agent has, so it is known what there is to restore.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.test_copies import AT, HEAD, STEPS, Standing, facts, recoveries

pytestmark = pytest.mark.proof

ALL = {("r0h0", 0), ("r0h1", 1), ("r1h0", 0), ("r1h1", 1)}
# On the last of these hosts, perhaps before its snapshot. Replica 0 goes on writing a checkpoint.
STANDS = {"replicas": [1], "rank": 1, "step": AT, "signal": "STOP"}


class Both(Standing):
    """A job of two replicas that stands before the vote on step `AT`."""

    def __init__(self, folder: Path, points: dict[str, Any] | None = None, **settings: object) -> None:
        super().__init__(folder, {"vote": STANDS, **(points or {})}, **{"replicas": 2, **settings})

    def lose(self, *hosts: str) -> None:
        """Kill the agents of some hosts, and all ranks."""
        self.until(lambda: len(self.agents(0)) == len(self.agents(1)) == 2, "all agents")
        self.until(lambda: self.step() == HEAD and self.held(HEAD) >= ALL - {("r1h1", 1)}, "all have the state")
        self.lose_ranks({replica: [host for host in hosts if host[1] == str(replica)] for replica in (0, 1)})

    def recovered(self) -> dict[int, dict[str, Any]]:
        """The recovery of each replica, once the job has ended as if nothing had happened."""
        rows = recoveries(self, STEPS)
        assert sorted(row["replica"] for row in rows) == [0, 1], rows
        assert all(row["number"] == 1 and row["ranks"] == 2 for row in rows), rows
        return {row["replica"]: row for row in rows}

    def rolled_back(self) -> int:
        """By how many steps the job went back."""
        return sum(row["steps"] for row in self.events("HeadRolledBack"))


def test_two_replicas_lose_a_host_each_and_no_more_than_a_step(tmp_path: Path) -> None:
    with Both(tmp_path) as job:
        job.lose("r0h0", "r1h1")
        rows = job.recovered()
        for replica in (0, 1):
            assert facts(rows[replica]) == ("replica", HEAD, 0)
            assert rows[replica]["from"] == {"0": "r1h0", "1": "r0h1"}
            assert rows[replica]["bytes"] > 0
        assert job.rolled_back() == 0


def test_a_damaged_source_costs_a_step_and_no_rank_takes_another_state(tmp_path: Path) -> None:
    """The one copy of rank 0's shard of the head is damaged: both replicas take the state before."""
    with Both(tmp_path, {"snapshot-flip": {"replicas": [1], "rank": 0, "step": HEAD}}) as job:
        job.lose("r0h0", "r1h1")
        rows = job.recovered()
        for replica in (0, 1):
            assert facts(rows[replica]) == ("replica", HEAD - 1, 1)
        assert job.rolled_back() == 1


def test_hosts_with_the_same_shard_leave_the_checkpoint(tmp_path: Path) -> None:
    """Rank 1's shards are whole in both replicas, rank 0's nowhere: no rank takes what is in memory.

    Both go on from the checkpoint of step 8; the later one may have it from the memory of the first.
    """
    with Both(tmp_path, checkpoint__every=4) as job:
        job.until(lambda: any(e["step"] == 8 for e in job.events("CheckpointWritten")), "the checkpoint")
        job.lose("r0h0", "r1h0")
        rows = job.recovered()
        assert rows[0]["state"] == rows[1]["state"]
        assert {facts(row)[1:] for row in rows.values()} == {(8, 1)}
        assert "checkpoint" in {row["rung"] for row in rows.values()} <= {"checkpoint", "replica"}


def test_a_rank_that_dies_while_shards_are_fetched_ends_that_attempt_as_a_whole(tmp_path: Path) -> None:
    dies = {"replicas": [0], "rank": 0, "life": 1, "step": 0}
    with Both(tmp_path, {"fetch": dies}) as job:
        job.lose("r0h0", "r1h1")
        summary = job.ends_well(STEPS)
        assert {(row["replica"], row["number"]) for row in summary["recoveries"]} == {(0, 2), (1, 1)}
        assert {facts(row)[1] for row in summary["recoveries"] if row["replica"] == 1} == {HEAD}
        assert job.rolled_back() == 0
