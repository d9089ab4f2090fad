import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.support.running import running
from tests.support.scenarios.scenario_job import HARD, Job
from tests.support.warm import COLD


def kill_one(job: Job, rng: random.Random, within: int) -> None:
    """Kill a rank of a replica that is not the last one, within so many steps; the survivors go on."""
    job.more(rng.randint(0, within))
    able = job.contributing()
    victims = [r for r in range(3) if len(able - {r}) >= 1]
    job.signal(rng.choice(victims), rng.randrange(2), signal.SIGKILL)
    job.more(1)


@pytest.mark.proof
def test_kills_at_random_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any rank of any replica, leaders included, as long as one replica is left to go on. Gradients go as bf16."""
    monkeypatch.setenv(COLD, "1")  # each process as a user has it
    rng, steps = random.Random(2), 25
    with Job(tmp_path, steps, restart__budget=50, ftar__dtype="bfloat16", **HARD) as job:
        job.until(lambda: job.step() >= 3, "step 3")
        for _ in range(2):
            kill_one(job, rng, 9)
        summary = job.ends_well(steps)
        survivors = {r for r in summary["replicas"] if summary["replicas"][r]["incarnations"] == 1}
        assert sum(r["incarnations"] - 1 for r in summary["replicas"].values()) == len(summary["failures"])
        assert all(f["kind"] == "SIGKILL" for f in summary["failures"]), (survivors, summary["failures"])


@pytest.mark.proof
def test_all_three_at_once(tmp_path: Path) -> None:
    """The state agents outlive the ranks: the job goes on where it was, although nobody is left who trained it."""
    steps = 15
    with Job(tmp_path, steps, quorum__on_lost_head="halt") as job:
        job.until(lambda: job.step() >= 5, "step 5")
        for replica in range(3):
            job.signal(replica, replica % 2, signal.SIGKILL)
        job.ends_well(steps)
        restored = job.events("StateRestored")
        assert {e["replica"] for e in restored} == {0, 1, 2}
        lost = [e["steps"] for e in job.events("HeadRolledBack")]
        assert lost in ([], [1]), "more than the step of which no copy was complete yet"


@pytest.mark.proof
@pytest.mark.parametrize("policy", ["halt", "rollback"])
def test_all_three_at_once_without_copies(tmp_path: Path, policy: str) -> None:
    """No copy of the state is left: the job ends with one clear reason, or begins again if it was told to."""
    steps = 15
    settings = {"ranks_per_replica": 1, "quorum__on_lost_head": policy, "state__snapshot": "on_demand"}
    with Job(tmp_path, steps, **settings) as job:
        job.until(lambda: job.step() >= 5, "step 5")
        for replica in range(3):
            job.signal(replica, 0, signal.SIGKILL)
        if policy == "halt":
            summary = job.end(75)
            assert summary["lost"] == [0, 1, 2]
            assert len(job.events("JobHalted")) == 1
            return
        job.ends_well(steps)
        (rolled,) = job.events("HeadRolledBack")
        assert rolled["steps"] >= 4, "of step 5 the lighthouse may not have heard"


# SIGSTOP of real ranks: silence is not death, and nobody diverges over it.


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 1])
def test_stopped_twice_for_four_seconds(tmp_path: Path, rank: int) -> None:
    """With the defaults the others go on without it, and it heals when it continues. All end equal."""
    steps = 150  # they must last for both stops, on a fast machine, too
    with Job(tmp_path, steps) as job:
        for at in (5, 25):
            job.until(lambda at=at: job.step() >= at, f"step {at}")
            pid = job.signal(1, rank, signal.SIGSTOP)
            time.sleep(4.0)  # the length of the stop is what is tested
            os.kill(pid, signal.SIGCONT)
        summary = job.ends_well(steps)
        assert [r for r in job.rows("metrics.jsonl") if r["contributors"] == [0, 2]], "nobody went on without it"
        silent = [e for e in job.events("RingBroken") if "no sign of life" in e["reason"] and e["replica"] != 1]
        assert {e["suspect"] for e in silent} == {1}, "the wrong one is suspected"
        assert all(summary["replicas"][r]["incarnations"] == 1 for r in ("0", "2")), "a survivor was restarted"


# Fewer than `quorum.min_replicas` hold the newest state, and copies are made on demand: nobody trains alone.


STEPS = 20
SETTINGS = {"quorum__min_replicas": 2, "state__snapshot": "on_demand"}


def lose(job: Job, replica: int) -> None:
    """Kill a replica, and the agents in which its copies were."""
    os.kill(job.agent(replica), signal.SIGKILL)
    job.signal(replica, 0, signal.SIGKILL)


@pytest.mark.proof
def test_those_that_come_back_with_nothing_fetch_the_state_before_the_next_step(tmp_path: Path) -> None:
    with Job(tmp_path, STEPS, **SETTINGS) as job:
        job.until(lambda: job.step() >= 5, "some steps")
        lose(job, 1)
        lose(job, 2)
        job.ends_well(STEPS)
        assert {e["replica"] for e in job.events("FetchCompleted")} == {1, 2}
        assert any("min_replicas is 2" in e["reason"] for e in job.events("Waiting"))
        assert len(job.events("ReplicaStarted", replica=0)) == 1, "the one that held the state did not survive"
        rows = job.rows("metrics.jsonl")
        assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
        assert min(len(row["contributors"]) for row in rows) >= 2, "somebody trained alone"


# One step number, two commits: the hole through which the paper's rule and torchft diverge silently.


@pytest.mark.proof
def test_a_replica_that_committed_alone_is_left_behind_and_heals(tmp_path: Path) -> None:
    """Replica 0 commits step 6 and is stopped before anybody hears of it. Its peers, made to lose what they were
    prepared to commit, do step 6 again without it. It comes back at the same step number with another lineage."""
    at, steps = 6, 60
    failpoints = {
        "token-second": {"replicas": [0], "step": at, "signal": "STOP"},
        "record-lost": {"replicas": [1, 2], "step": at},
    }
    limits = {"timeouts.evict_s": 60.0, "debug.failpoints": failpoints}
    with Job(tmp_path, steps, **limits) as job:
        job.until(lambda: job.step() >= 2, "step 2")
        job.until(lambda: job.stopped(0, 0), "replica 0 stops")
        job.until(lambda: job.step() >= at + 3, "the others go on without it")
        job.signal(0, 0, signal.SIGCONT)
        summary = job.ends_well(steps)
        assert {r["incarnations"] for r in summary["replicas"].values()} == {1}, "somebody was restarted"
        rows = [x for r in (0, 1) for x in job.rows(f"replicas/{r}/commits.jsonl") if x["step"] == at]
        assert len({x["lineage"] for x in rows}) == 2, "there was only one commit of this step"
        behind = job.events("LeftBehind", replica=0)
        assert behind, "replica 0 was not left behind"
        merged = {r["step"]: r for r in job.rows("metrics.jsonl")}
        assert merged[at]["contributors"] == [1, 2], "the commit that nobody built on is in the metrics"
        assert merged[steps]["contributors"] == [0, 1, 2], "replica 0 did not come back"


# The fork server of a real job is stopped or killed while a rank is lost: it costs one start at most.


FORK_STEPS = 40


def fork_server(job: Job) -> int:
    """Its pid: the one of the launcher's children that leads a session and runs the module."""
    (server,) = [
        process.pid
        for process, line in running(job.process.pid).items()
        if "ft_hsdp.launch.backend.zygote" in line
        and process.ppid() == job.process.pid
        and os.getsid(process.pid) == process.pid
    ]
    return server


def agents(job: Job) -> set[int]:
    below = running(job.process.pid)
    return {process.pid for process, line in below.items() if "ft_hsdp.state.agent.server" in line}


@pytest.mark.proof
def test_the_others_go_on_and_the_lost_one_returns(tmp_path: Path) -> None:
    with Job(tmp_path, FORK_STEPS, replicas=2, ranks_per_replica=1, timeouts__load_s=120.0) as job:
        job.until(lambda: job.step() >= 5, "some steps")
        server, kept, other = fork_server(job), agents(job), job.pid(0, 0)
        assert len(kept) == 2
        os.kill(server, signal.SIGSTOP)
        job.signal(1, 0, signal.SIGKILL)
        job.until(lambda: job.events("ForkServerLost", pid=server), "the fork server to be given up")
        assert job.pid(0, 0) == other
        job.until(lambda: job.events("StateRestored", replica=1, origin="agent"), "the copy to be taken over")
        assert kept <= agents(job), "copies in memory are gone with the fork server"
        summary = job.ends_well(FORK_STEPS)
        assert summary["replicas"]["0"]["incarnations"] == 1
        assert summary["replicas"]["1"]["incarnations"] <= 3
        assert not job.events("JobHalted")


# The state agent of one replica of a real job is stopped for good: one stall, then another one serves.


AGENT_STEPS = 120
SLOW = {"train__micro_batch": 16, "train__seq_len": 64}  # steps long enough for an agent to start meanwhile


@pytest.mark.proof
def test_votes_go_on_and_another_agent_serves_fetches(tmp_path: Path) -> None:
    stands = {"replicas": [1], "rank": 0, "step": 60, "signal": "STOP"}  # the victim, until there is another agent
    patient = {"timeouts__silence_s": 12.0, "timeouts__connect_s": 24.0, "timeouts__evict_s": 120.0}
    points = {"debug__failpoints": {"vote": stands}, "timeouts__ranks_s": 24.0, **patient}
    with Job(tmp_path, AGENT_STEPS, replicas=2, ranks_per_replica=1, **SLOW, **points) as job:
        job.until(lambda: job.step() >= 5, "some steps")
        stopped = job.agent(0)
        os.kill(stopped, signal.SIGSTOP)
        job.until(lambda: job.events("StateAgentLost", replica=0), "the agent to be given up")
        job.more(10)
        assert len([e for e in job.events("StateAgentLost", replica=0) if not e.get("over")]) == 1, (
            "a vote waited for it again"
        )
        job.until(lambda: job.events("StateAgentLost", replica=0, over=True), "another agent")
        assert not psutil.pid_exists(stopped) or psutil.Process(stopped).status() == psutil.STATUS_ZOMBIE
        os.kill(job.agent(1), signal.SIGKILL)  # all that replica 1 keeps
        job.signal(1, 0, signal.SIGKILL)
        job.ends_at(AGENT_STEPS)
        assert job.events("FetchCompleted", replica=1, donor=0), "the new agent gave it nothing"
        assert not job.events("RingBroken", replica=1, suspect=0)


# The connections of a replica to its neighbours are reset: the ring is repaired in place, and no process ends.


@pytest.mark.proof
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_reset_ring_is_formed_again_and_no_rank_ends(tmp_path: Path, transport: str) -> None:
    chaos = [{"kind": "reset", "at_step": step, "replicas": [step % 2]} for step in (5, 10)]
    with Job(tmp_path, 16, replicas=2, ftar__transport=transport, chaos=chaos) as job:
        summary = job.ends_well(16)
        assert [row["kind"] for row in job.events("FailureInjected")] == ["reset", "reset"]
        assert job.events("RingBroken"), "a ring broke"
        assert len(job.events("EpochGranted")) >= 3, "and was formed again after each reset"
        assert len(job.events("ReplicaStarted")) == 2, "in the lives that there were"
        assert (summary["failures"], summary["recoveries"]) == ([], [])
