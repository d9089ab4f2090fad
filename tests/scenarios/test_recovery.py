"""Hosts that are lost with all that was in their memory: from where a real job takes its state then.

Two replicas of two ranks; each rank is on a host of its own. A rank that stands still before its vote keeps the
whole job at a step whose state every agent has, so it is known what there is to restore.
"""

import contextlib
import os
import signal
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from ft_hsdp.state.transfer.donor_connection import ask_held
from tests.scenarios.test_copies import facts
from tests.support.scenarios.scenario_job import Job, check

STEPS = 16
AT = 10  # the step of the vote at which the job stands
HEAD = AT - 1  # the newest committed step then
ALL = ("r0h0", "r0h1", "r1h0", "r1h1")
# On the last of these hosts, perhaps before its snapshot. Replica 0 goes on writing a checkpoint.
STANDS = {"replicas": [1], "rank": 1, "step": AT, "signal": "STOP"}
# Nobody is missed while the job stands, and what the failure costs is up to the operator.
PATIENT = {
    "timeouts.silence_s": 12.0,
    "timeouts.connect_s": 60.0,
    "timeouts.evict_s": 120.0,
    "quorum.on_lost_head": "rollback",
}


class Standing(Job):
    """A job that stands before the vote on step `AT`."""

    def __init__(self, folder: Path, points: dict[str, Any] | None = None, **settings: object) -> None:
        points = {"vote": STANDS, **(points or {})}
        super().__init__(
            folder,
            STEPS,
            **{"replicas": 2, "hosts.per_replica": 2, **PATIENT, "debug.failpoints": points, **settings},
        )

    def held(self, step: int) -> set[str]:
        """The hosts whose agents keep a state."""
        addresses = {agent["address"] for replica in (0, 1) for agent in self.agents(replica).values()}
        token = (self.run / "token").read_text().strip()
        answers = ask_held(addresses, token, 5.0)
        return {row.host for rows in answers.values() for row in rows if row.state.step == step}

    def lose(self, hosts: Collection[str]) -> None:
        """Kill the agents of some hosts, and then all ranks that the launcher has not ended by then."""
        self.until(lambda: len(self.agents(0)) == len(self.agents(1)) == 2, "all agents")
        self.until(lambda: self.step() == HEAD and self.held(HEAD) >= set(ALL[:-1]), "all have the state")
        agents = {host: agent["pid"] for replica in (0, 1) for host, agent in self.agents(replica).items()}
        ranks = [self.pid(replica, rank) for replica in (0, 1) for rank in (0, 1)]
        assert None not in ranks
        for host in hosts:
            os.kill(agents[host], signal.SIGKILL)
        for pid in filter(None, ranks):
            with contextlib.suppress(ProcessLookupError):  # it ended because the agent of its host did
                os.kill(pid, signal.SIGKILL)

    def recovered(self) -> dict[int, dict[str, Any]]:
        """The recovery of each replica, once the job has ended as if nothing had happened."""
        summary = self.end()
        check(summary, STEPS)
        verdict = self.replayed()
        assert verdict["equal"], verdict
        rows = summary["recoveries"]
        assert sorted(row["replica"] for row in rows) == [0, 1], rows
        assert all(row["number"] == 1 and row["ranks"] == 2 for row in rows), rows
        return {row["replica"]: row for row in rows}

    def rolled_back(self) -> int:
        """By how many steps the job went back."""
        return sum(row["steps"] for row in self.events("HeadRolledBack"))


def from_checkpoint(rows: dict[int, dict[str, Any]]) -> None:
    """Both go on from the checkpoint of step 8; the later one may have it from the memory of the first."""
    assert rows[0]["state"] == rows[1]["state"]
    assert {facts(row)[1:] for row in rows.values()} == {(8, 1)}
    assert "checkpoint" in {row["rung"] for row in rows.values()} <= {"checkpoint", "replica"}


@pytest.mark.proof
def test_two_replicas_lose_a_host_each_and_no_more_than_a_step(tmp_path: Path) -> None:
    with Standing(tmp_path) as job:
        job.lose(["r0h0", "r1h1"])
        rows = job.recovered()
        for replica in (0, 1):
            assert facts(rows[replica]) == ("replica", HEAD, 0)
            assert rows[replica]["from"] == {"0": "r1h0", "1": "r0h1"}
            assert rows[replica]["bytes"] > 0
        assert job.rolled_back() == 0


@pytest.mark.proof
def test_a_damaged_source_costs_a_step_and_no_rank_takes_another_state(tmp_path: Path) -> None:
    """The one copy of rank 0's shard of the head is damaged: both replicas take the state before."""
    with Standing(tmp_path, {"snapshot-flip": {"replicas": [1], "rank": 0, "step": HEAD}}) as job:
        job.lose(["r0h0", "r1h1"])
        rows = job.recovered()
        for replica in (0, 1):
            assert facts(rows[replica]) == ("replica", HEAD - 1, 1)
        assert job.rolled_back() == 1


@pytest.mark.proof
def test_hosts_with_the_same_shard_leave_the_checkpoint(tmp_path: Path) -> None:
    """Rank 1's shards are whole in both replicas, rank 0's nowhere: no rank takes what is in memory."""
    with Standing(tmp_path, checkpoint__every=4) as job:
        job.until(lambda: any(e["step"] == 8 for e in job.events("CheckpointWritten")), "the checkpoint")
        job.lose(["r0h0", "r1h0"])
        from_checkpoint(job.recovered())


@pytest.mark.proof
def test_a_rank_that_dies_while_shards_are_fetched_ends_that_attempt_as_a_whole(tmp_path: Path) -> None:
    dies = {"replicas": [0], "rank": 0, "life": 1, "step": 0}
    with Standing(tmp_path, {"fetch": dies}) as job:
        job.lose(["r0h0", "r1h1"])
        summary = job.end()
        check(summary, STEPS)
        assert job.replayed()["equal"]
        assert {(row["replica"], row["number"]) for row in summary["recoveries"]} == {(0, 2), (1, 1)}
        assert {facts(row)[1] for row in summary["recoveries"] if row["replica"] == 1} == {HEAD}
        assert job.rolled_back() == 0
