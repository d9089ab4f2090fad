import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from ft_hsdp.secret import worker_token
from ft_hsdp.state.pacing import PROFILED
from ft_hsdp.state.transfer.donor_connection import ask_held
from tests.support.scenarios.scenario_job import DEADLINE_S, Job

pytestmark = pytest.mark.proof

STEPS = 18
AT = 10  # the step of the vote at which a job stands
HEAD = AT - 1  # the newest committed step then
EVERYWHERE = {
    (host, rank) for host in ("r0h0", "r0h1") for rank in (0, 1)
}  # each shard of replica 0, on each host


def told(job: Job) -> list[str]:
    """What the job says of its protection, in order."""
    rows = [*job.events("Protected"), *job.events("Unprotected")]
    return [row["event"] for row in sorted(rows, key=lambda row: row["t"])]


def recoveries(job: Job, steps: int) -> list[dict[str, Any]]:
    """How each replica was restored, once the job has ended as if nothing had happened."""
    return list(job.ends_well(steps)["recoveries"])


def test_one_replica_loses_a_host_and_at_most_a_step(tmp_path: Path) -> None:
    rule = {"kind": "host", "at_step": 8, "replicas": [0], "host": "r0h1", "for_s": 0.3}
    hosts = {"ranks_per_replica": 4, "hosts.per_replica": 2, "chaos": [rule]}
    with Job(tmp_path, STEPS, replicas=1, **hosts) as job:
        (row,) = recoveries(job, STEPS)
        assert (row["rung"], row["ranks"]) == ("copy", 4), row
        assert row["lost_steps"] <= 1, row
        assert set(row["from"].values()) == {"r0h0"}, row
        assert sum(e["steps"] for e in job.events("HeadRolledBack")) <= 1
        assert told(job)[0] == "Protected"
        assert [e["reason"] for e in job.events("CopyMissing")] == []
        assert all(row["copied_bytes"] > 0 for row in job.rows("replicas/0/commits.jsonl"))


def test_a_job_that_falls_to_one_replica_is_protected_at_its_second_commit(tmp_path: Path) -> None:
    """Two replicas are two copies. While one is away the other copies, and loses a host, too."""
    chaos = [
        {"kind": "host", "at_step": 5, "replicas": [1], "host": "r1h0", "for_s": 3.0},
        {"kind": "host", "at_step": 11, "replicas": [0], "host": "r0h1", "for_s": 0.2},
    ]
    steps = 40
    with Job(tmp_path, steps, replicas=2, **{"hosts.per_replica": 2, "chaos": chaos}) as job:
        rows = recoveries(job, steps)
        # Replica 1 need not be back before the last step.
        assert 0 in {row["replica"] for row in rows}
        assert all((row["lost_steps"] or 0) <= 1 for row in rows), rows
        # Replica 1 finds nothing in memory if it is back while replica 0 trains: it fetches as one that is behind.
        assert {row["rung"] for row in rows if row["replica"] == 0} <= {"agent", "copy", "replica"}, rows
        assert sum(e["steps"] for e in job.events("HeadRolledBack")) <= 1
        commits = {row["step"]: row for row in job.rows("replicas/0/commits.jsonl")}
        assert all("copied_bytes" not in commits[step] for step in (1, 2, 3)), (
            "each replica is a copy of the other"
        )
        alone = next(e for e in job.events("EpochGranted") if e["members"] == [0] and e["epoch"] > 1)
        first = alone["step"]
        assert [commits[step]["contributors"] for step in (first, first + 1)] == [[0], [0]]
        assert all(commits[step]["copied_bytes"] > 0 for step in (first, first + 1))
        said = {
            name: [e["t"] for e in job.events(name) if e["t"] > alone["t"]]
            for name in ("Unprotected", "Protected")
        }
        again = min(said["Protected"])
        assert min(said["Unprotected"]) < again
        assert again < commits[first + 2]["t"], "its second commit says that the state is kept"


NEVER = {"replicas": [9], "rank": 0, "step": 0}


def facts(row: dict[str, Any]) -> tuple[str, int, int]:
    """From where a state came, of which step it is, and how many steps it costs."""
    return row["rung"], row["state"][1], row["lost_steps"]


class Standing(Job):
    """A job of one replica on two hosts that stands before the vote of rank 1 on step `AT`."""

    def __init__(self, folder: Path, points: dict[str, Any] | None = None, **settings: object) -> None:
        stands = {"replicas": [0], "rank": 1, "step": AT, "signal": "STOP"}
        patient = {"timeouts.silence_s": 12.0, "timeouts.connect_s": 60.0, "timeouts.evict_s": 120.0}
        points = {"vote": stands, **(points or {})}
        failing = {"hosts.per_replica": 2, "quorum.on_lost_head": "rollback", "debug.failpoints": points}
        super().__init__(folder, STEPS, **{"replicas": 1, **patient, **failing, **settings})

    def held(self, step: int) -> set[tuple[str, int]]:
        """The shards of a state that are in memory: host and rank of each."""
        replicas = range(len(list((self.run / "replicas").iterdir())))
        addresses = {agent["address"] for replica in replicas for agent in self.agents(replica).values()}
        answers = ask_held(addresses, worker_token((self.run / "token").read_text().strip()), 5.0)
        return {(row.host, row.rank) for rows in answers.values() for row in rows if row.state.step == step}

    def until_known(self, head: int, condition: Callable[[], object], what: str) -> None:
        """Wait until a step is the newest one, the lighthouse knows it, and `condition` holds.

        A leader reports a commit a moment after it has logged it. Who is killed in between takes the step with it,
        and nobody counts it as lost.
        """
        self.until(lambda: self.step() == head == self.reported() and condition(), what)

    def reported(self) -> int:
        """The newest step that the lighthouse has heard of."""
        head = self.ask("holders")["head"]
        return int(head["step"]) if head else 0

    def lose(self, *hosts: str) -> None:
        """Kill the agents of some hosts of replica 0, and all its ranks."""
        self.lose_ranks({0: hosts})

    def lose_ranks(self, lost: Mapping[int, Sequence[str]]) -> None:
        """Kill the agents of some hosts of each replica, and all ranks of these replicas, at once."""
        pids = []
        for replica, hosts in lost.items():  # all are looked up first: a replica recovers within a second
            agents = {host: agent["pid"] for host, agent in self.agents(replica).items()}
            pids += [*(agents[host] for host in hosts), *(self.pid(replica, rank) for rank in (0, 1))]
        for pid in pids:
            assert pid is not None
            with contextlib.suppress(ProcessLookupError):  # a rank ends when its neighbour is gone
                os.kill(pid, signal.SIGKILL)


def test_a_copy_that_is_on_some_hosts_only_counts_if_the_whole_state_is_there(tmp_path: Path) -> None:
    """The newest snapshot of rank 1 was left out: the state before is taken, at the second attempt."""
    points = {
        "snapshot-out": {"replicas": [0], "rank": 1, "step": HEAD},
        "fetch": {"replicas": [0], "rank": 1, "life": 1, "step": 0},
    }
    with Standing(tmp_path, points) as job:
        job.until_known(HEAD, lambda: ("r0h1", 0) in job.held(HEAD), "the copy of rank 0's shard")
        assert job.held(HEAD) == {("r0h0", 0), ("r0h1", 0)}
        assert job.held(HEAD - 1) == EVERYWHERE
        job.lose("r0h1")
        (row,) = recoveries(job, STEPS)
        assert (row["number"], row["rung"], row["state"][1], row["lost_steps"]) == (2, "copy", HEAD - 1, 1), row
        assert sum(e["steps"] for e in job.events("HeadRolledBack")) == 1


def test_a_flipped_copy_is_not_restored(tmp_path: Path) -> None:
    """It goes on from the copy before, and fetches what it lacks."""
    points = {"snapshot-flip": {"replicas": [0], "rank": 1, "step": HEAD}}
    with Standing(tmp_path, points, replicas=2, hosts__per_replica=1) as job:
        both = {("r0h0", 0), ("r0h0", 1)}  # else the newest copy of both is that of the step before
        job.until_known(HEAD, lambda: job.stopped(0, 1) and job.held(HEAD) >= both, "the copies of the head")
        job.lose()
        (_,) = recoveries(job, STEPS)
        (found,) = job.events("SnapshotCorrupt", replica=0, rank=1)
        assert "changed since" in found["reason"]
        (restored,) = job.events("StateRestored", replica=0)
        assert (restored["step"], restored["origin"]) == (HEAD - 1, "agent")
        assert not job.events("JobHalted")
        assert not job.events("StateDiverged")


def test_the_owner_and_its_holder_at_once_leave_the_checkpoint(tmp_path: Path) -> None:
    head = STEPS - 2
    stands = {"replicas": [0], "rank": 1, "step": head + 1, "signal": "STOP"}
    with Standing(tmp_path, {"vote": stands}, checkpoint__every=4) as job:
        # A checkpoint that rank 1 was still writing when it stopped is never complete. The first one is long done.
        job.until_known(head, lambda: job.events("CheckpointWritten"), "the head and a checkpoint")
        newest = max(e["step"] for e in job.events("CheckpointWritten"))
        job.lose("r0h0", "r0h1")
        (row,) = recoveries(job, STEPS)
        assert row["rung"] == "checkpoint", row
        assert newest <= row["state"][1] == head - row["lost_steps"], row


def test_without_a_lighthouse_copies_go_on_and_a_recovery_finds_them(tmp_path: Path) -> None:
    with Standing(tmp_path, {}, **{"timeouts.reach_s": 1.0}) as job:
        job.until(lambda: job.step() >= 3, "step 3")
        lighthouse = job.lighthouse()["pid"]
        os.kill(lighthouse, signal.SIGSTOP)
        job.until(lambda: job.step() == HEAD and job.held(HEAD) == EVERYWHERE, "the copies of the head")
        job.lose("r0h1")
        os.kill(lighthouse, signal.SIGCONT)
        job.until(lambda: job.events("StateRestored"), "the state")
        (row,) = recoveries(job, STEPS)
        assert (row["rung"], row["state"][1], row["lost_steps"]) == ("copy", HEAD, 0), row


@pytest.mark.parametrize("kept", [False, True])
def test_a_host_that_is_lost_before_its_newest_shard_is_kept_costs_that_step(tmp_path: Path, kept: bool) -> None:
    """M54: rank 1 has copied its shard of the head, and its agent does not know it; rank and host are lost.

    M51 (kept): its agent does, and the other host fetches the shard, slice by slice: one a second, because rank 1
    waits for rank 0 in a collective.
    """
    stands = {"replicas": [0], "rank": 1, "step": HEAD, "signal": "STOP"}
    with Standing(tmp_path, {"snapshot": stands}) as job:
        job.until_known(HEAD, lambda: ("r0h0", 0) in job.held(HEAD), "rank 0 has the head")
        job.until(lambda: job.stopped(0, 1), "rank 1 stands still")
        assert job.held(HEAD - 1) == EVERYWHERE, "the commit of the head says so"
        if kept:
            job.signal(0, 0, signal.SIGSTOP)
            job.signal(0, 1, signal.SIGCONT)
            job.until(lambda: ("r0h1", 1) in job.held(HEAD), "rank 1 has the head")
        assert {host for host, rank in job.held(HEAD) if rank == 1} == ({"r0h1"} if kept else set())
        job.lose("r0h1")
        (row,) = recoveries(job, STEPS)
        assert (row["rung"], row["state"][1], row["lost_steps"]) == ("copy", HEAD - 1, 1), row
        assert sum(e["steps"] for e in job.events("HeadRolledBack")) == 1


def test_a_holder_that_dies_holds_up_no_step(tmp_path: Path) -> None:
    """M52: its agent falls silent and is killed. The job goes on without copies, and then with a new holder."""
    hosts = {"hosts.per_replica": 2, "memory.wait_s": 0.2}
    steps = 100
    with Job(tmp_path, steps, replicas=1, **hosts) as job:
        job.until(lambda: job.step() >= 3 and job.events("Protected"), "copies")
        holder = job.agents(0)["r0h1"]["pid"]
        os.kill(holder, signal.SIGSTOP)
        job.until(lambda: job.events("CopyMissing") or job.events("Unprotected"), "a copy that is late")
        os.kill(holder, signal.SIGKILL)
        assert recoveries(job, steps) == []
        assert len(job.events("ReplicaStarted")) == 1, "no rank ended"
        assert "Unprotected" in told(job)
        assert told(job)[-1] == "Protected", "the next agent of that host keeps copies"


def test_a_copy_that_its_holder_refuses_moves_to_the_next_host(tmp_path: Path) -> None:
    """M61: h1 keeps the shard of rank 0, and refuses it; then h0 is lost, and h2 has the only copy."""
    chaos = [{"kind": "host", "at_step": 10, "replicas": [0], "host": "r0h0", "for_s": 0.3}]
    points = {"copy-out": {"replicas": [0], "rank": 1, "step": 4}}
    hosts = {"ranks_per_replica": 3, "hosts.per_replica": 3, "chaos": chaos, "debug.failpoints": points}
    with Job(tmp_path, STEPS, replicas=1, **hosts) as job:
        (row,) = recoveries(job, STEPS)
        assert (row["rung"], row["ranks"], row["from"]["0"]) == ("copy", 3, "r0h2"), row
        assert row["lost_steps"] <= 1, row
        (moved,) = job.events("CopyMoved")
        assert (moved["shard"], moved["holder"]) == (0, "r0h2"), moved
        assert told(job)[:3] == ["Protected", "Unprotected", "Protected"]


def test_the_last_healthy_replica_loses_a_host_while_the_other_one_fetches(tmp_path: Path) -> None:
    """M63: rank 0 of replica 1 has not fetched its shard, and the host of rank 1 of replica 0 is lost."""
    points = {"fetch": {"replicas": [1], "rank": 0, "life": 1, "step": 0, "signal": "STOP"}, "vote": NEVER}
    two = {"replicas": 2, "memory.copies": 1, "quorum.min_replicas": 2}  # so no step is made meanwhile
    with Standing(tmp_path, points, **two) as job:
        job.until(lambda: job.step() >= 5, "step 5")
        job.lose_ranks({1: ["r1h0", "r1h1"]})
        job.until(lambda: len(job.events("ReplicaStarted", replica=1)) == 2, "the second life of replica 1")
        job.until(lambda: job.stopped(1, 0), "the fetch of rank 0")
        head = job.step()
        job.until(lambda: ("r1h1", 1) in job.held(head), "the shard of rank 1")
        assert job.held(head) == {("r0h0", 0), ("r0h1", 1), ("r1h1", 1)}
        fetching = [job.pid(1, rank) for rank in (0, 1)]
        job.lose_ranks({0: ["r0h1"]})
        for pid in fetching:
            assert pid is not None
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        rows = recoveries(job, STEPS)
        newest = {row["replica"]: row for row in rows}
        assert {facts(row) for row in newest.values()} == {("replica", head, 0)}, rows
        assert all(row["from"] == {"0": "r0h0", "1": "r1h1"} for row in newest.values()), rows
        assert not job.events("HeadRolledBack")


def test_the_last_healthy_replica_recovers_from_its_copies_while_the_other_one_is_behind(tmp_path: Path) -> None:
    """M63: replica 1 lives and has nothing; replica 0 has copies, and loses a host."""
    points = {"fetch": {"replicas": [1], "rank": 1, "life": 1, "step": 0, "signal": "STOP"}}
    with Standing(tmp_path, points, replicas=2) as job:
        job.until(lambda: job.step() >= 5, "step 5")
        job.lose_ranks({1: ["r1h0", "r1h1"]})
        job.until(lambda: len(job.events("CheckedIn", replica=1)) == 2, "the second life of replica 1")
        job.until(lambda: job.stopped(0, 1), "replica 0 waits")
        job.signal(0, 1, signal.SIGCONT)
        job.until(lambda: job.stopped(1, 1), "the fetch of rank 1")
        job.until(lambda: job.step() == job.reported() and job.held(job.step()) >= EVERYWHERE, "the copies")
        behind = {"0": "contribute", "1": "behind"}
        job.until(lambda: job.events("EpochGranted")[-1]["roles"] == behind, "the grant is told")
        head = job.step()
        job.lose_ranks({0: ["r0h1"]})
        job.until(lambda: job.events("StateRestored", replica=0), "the state of replica 0")
        job.signal(1, 1, signal.SIGCONT)
        rows = [row for row in recoveries(job, STEPS) if row["replica"] == 0]
        assert [(facts(row), row["from"]) for row in rows] == [(("copy", head, 0), {"0": "r0h0", "1": "r0h0"})]
        assert not job.events("HeadRolledBack")


def test_copies_stay_until_a_commit_under_the_next_plan_says_that_its_state_is_kept(tmp_path: Path) -> None:
    """M62: two replicas are copies of each other again, and lose the same shard before they commit a step so."""
    points = {
        "vote": {"replicas": [0], "rank": 1, "step": AT, "signal": "STOP"},  # replica 0 waits for the other one
        "reduce-begin": {"replicas": [1], "rank": 1, "life": 1, "step": AT + 2, "signal": "STOP"},
    }
    with Standing(tmp_path, points, **{"replicas": 2, "quorum.catchup_wait_s": 50.0}) as job:
        job.until(lambda: job.step() >= 3, "step 3")
        away = job.lose_host(1, "r1h0")
        copies = {("r0h0", 1), ("r0h1", 0)}
        job.until(lambda: job.stopped(0, 1) and copies <= job.held(HEAD), "copies by the replica that is left")
        away.lifted("it is back")
        job.until(lambda: len(job.events("CheckedIn", replica=1)) == 2, "the second life of replica 1")
        job.signal(0, 1, signal.SIGCONT)
        job.until(lambda: job.stopped(1, 1), "both train")
        head = job.step()
        job.until(lambda: ("r1h0", 0) in job.held(head), "the other replica is a copy")
        assert copies <= job.held(head - 1), "nothing was freed"
        job.lose_ranks({0: ["r0h1"], 1: ["r1h1"]})
        rows = recoveries(job, STEPS)[-2:]
        assert {facts(row)[1:] for row in rows} in ({(head - 1, 1)}, {(head, 0)}), rows
        first, second = (row["from"]["1"] for row in rows)
        # The one that is back later may take it from the other one.
        assert first == "r0h0", rows
        assert second in {"r0h0", f"r{rows[0]['replica']}h1"}, rows


def test_all_that_a_supervisor_started_dies_with_it_and_the_checkpoint_is_left(tmp_path: Path) -> None:
    """M64: ranks and agents end with the launcher, so no memory outlives it; the next job has the checkpoint."""
    settings = {"replicas": 1, "hosts.per_replica": 2, "checkpoint.every": 4, "checkpoint.keep": 99}
    settings["checkpoint.dir"] = str(tmp_path / "checkpoints")
    with Job(tmp_path / "one", 10_000, **settings) as job:
        job.until(lambda: job.events("CheckpointWritten") and job.events("Protected"), "checkpoint and copies")
        started = psutil.Process(job.process.pid).children(recursive=True)
        agents = {agent["pid"] for agent in job.agents(0).values()}
        ranks = {job.pid(0, 0), job.pid(0, 1)}
        assert agents | ranks <= {process.pid for process in started}
        job.process.kill()
        _, alive = psutil.wait_procs(started, DEADLINE_S)
        assert not alive
        newest = max(int(path.name.split("-")[1]) for path in (tmp_path / "checkpoints").glob("step-*"))
    with Job(tmp_path / "two", newest + 6, **settings) as job:
        job.ends_well(newest + 6)
        assert job.rows("metrics.jsonl")[0]["step"] == newest + 1


# Two replicas of two ranks; each rank is on a host of its own. A rank that stands still before its vote keeps the
# whole job at a step whose state every agent has, so it is known what there is to restore.


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


def test_ranks_whose_shards_are_copied_measure_their_idle_spans_and_no_others(tmp_path: Path) -> None:
    for replicas, watched in ((1, {0, 1}), (2, set[int]())):
        with Job(tmp_path / str(replicas), PROFILED + 5, replicas=replicas, hosts__per_replica=2) as job:
            job.ends_at(PROFILED + 5)
            told = job.events("CopiesPaced")
            assert {row["rank"] for row in told} == watched
            assert all(row["spans"] > 1 for row in told), "FSDP2 communicates several times a step"
