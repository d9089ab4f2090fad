"""A replica that lost a host and gets no other goes on with fewer ranks, and grows when the host is back."""

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ft_hsdp.launch.injection import Inflicted
from ft_hsdp.launch.run.directory import RunDir, read_jsonl
from ft_hsdp.launch.run.recorder import commits_of
from tests.support.scenarios.scenario_job import Job

SAFE = {"quorum.on_lost_head": "rollback", "timeouts.place_s": 0.3}


def widths(job: Job) -> list[tuple[int, int]]:
    """How many ranks trained the steps, of how many units, each pair once, in the order of the steps."""
    rows = read_jsonl(job.run / "metrics.jsonl")
    found = [(row.get("widths", {}).get("0", 0), row["units"]) for row in rows if "units" in row]
    return [pair for n, pair in enumerate(found) if n == 0 or pair != found[n - 1]]


@pytest.mark.proof
def test_another_host_is_lost_meanwhile_and_a_rank_is_killed_while_it_grows(tmp_path: Path) -> None:
    """Each attempt ends as a whole, and the next one is planned from the hosts that are there then."""
    shrinks = {"ranks_per_replica": 3, "hosts.per_replica": 3, "memory.shrink_to": 1}
    with Job(tmp_path, 30, replicas=1, **shrinks, **SAFE) as job:
        job.until(lambda: job.step() >= 5, "step 5")
        hosts = [job.lose_host(0, "r0h1")]
        job.until(lambda: job.events("Shrunk"), "two ranks")
        job.until(lambda: len(job.events("ReplicaStarted")) == 2, "the second life")
        hosts.append(job.lose_host(0, "r0h2"))
        job.until(lambda: len(job.events("Shrunk")) == 2, "one rank")
        job.more(2)
        for host in hosts:
            host.lifted("it is back")
        job.until(lambda: len(job.events("ReplicaStarted")) == 4, "the life with all ranks")
        job.signal(0, 2, signal.SIGKILL)
        job.ends_well(30)
        assert [(e["from"], e["to"]) for e in job.events("Shrunk")] == [(3, 2), (2, 1)]
        assert [(e["from"], e["to"]) for e in job.events("Grown")] == [(1, 3)]
        assert widths(job)[-1] == (0, 3)
        assert (1, 1) in widths(job)


def together(job: Job) -> list[tuple[int, ...]]:
    """The ranks of the members of each canonical commit, in ring order; () if they are equal. Each run once."""
    rows = [tuple(row.get("ring_widths", ())) for row in commits_of(RunDir(job.run.resolve()))]
    return [widths for n, widths in enumerate(rows) if n == 0 or widths != rows[n - 1]]


def unequal(job: Job) -> int:
    """How many steps replica 1 has committed together with one of fewer ranks."""
    return sum(1 for row in job.rows("replicas/1/commits.jsonl") if row.get("ring_widths"))


def beside(folder: Path, steps: int, ranks: int = 4, **more: object) -> Job:
    """Two replicas of `ranks` ranks on two hosts each; half of the ranks are enough."""
    shrinks = {"ranks_per_replica": ranks, "hosts.per_replica": 2, "memory.shrink_to": ranks // 2}
    return Job(folder, steps, replicas=2, **shrinks, **SAFE, **more)


def shrunk(job: Job, replica: int = 0) -> Inflicted:
    """Lose a host of a replica, and wait until it trains on beside the other one; the host."""
    job.until(lambda: job.step() >= 5, "step 5")
    before = unequal(job)
    lost = job.lose_host(replica, f"r{replica}h1")
    job.until(lambda: job.events("Shrunk"), "fewer ranks")
    job.until(lambda: unequal(job) >= before + 3, "both contribute")
    return lost


@pytest.mark.proof
def test_one_of_two_replicas_goes_on_with_half_its_ranks_and_grows(tmp_path: Path) -> None:
    """They sum by lanes, in bf16. `verify` finds each unit once, and a replay the same bits.

    No step is committed while one of them is away: so the job lasts until the lost host is back.
    """
    steps = 60
    with beside(tmp_path, steps, 2, **{"quorum.min_replicas": 2, "ftar.dtype": "bfloat16"}) as job:
        lost = shrunk(job)
        lost.lifted("it is back")
        job.ends_well(steps)
        assert [(e["event"], e["from"], e["to"]) for e in job.events("Shrunk") + job.events("Grown")] == [
            ("Shrunk", 2, 1),
            ("Grown", 1, 2),
        ]
        seen = together(job)
        assert (1, 2) in seen
        assert seen[-1] == ()
        rows = commits_of(RunDir(job.run.resolve()))
        began = min(row["t"] for row in rows if row.get("ring_widths"))
        assert not [e for e in job.events("RingBroken") if e["t"] > began], "it leaves at a commit to grow"
        narrow = {row["units"] for row in rows if row.get("ring_widths") and len(row["contributors"]) == 2}
        assert narrow == {3}


# What else happens while it shrinks, fetches or grows.


WINDOW = {"timeouts.stop_s": 1.5, "debug.faults": True}


def job_of(folder: Path, steps: int, replicas: int, ranks: int, least: int, **more: object) -> Job:
    """A job whose ranks have a host each; no step is committed while one of two replicas is away."""
    hosts = {"ranks_per_replica": ranks, "hosts.per_replica": ranks, "memory.shrink_to": least}
    settings = {"replicas": replicas, "quorum.min_replicas": replicas, **hosts, **SAFE, **WINDOW, **more}
    return Job(folder, steps, **settings)


def changes(job: Job, replica: int) -> list[tuple[int, int]]:
    """The numbers of ranks of a replica, from and to, in order."""
    rows = [*job.events("Shrunk", replica=replica), *job.events("Grown", replica=replica)]
    return [(row["from"], row["to"]) for row in sorted(rows, key=lambda row: row["t"])]


def starts(job: Job, replica: int) -> int:
    return len(job.events("ReplicaStarted", replica=replica))


def contributed(job: Job, since: int, *widths: int) -> bool:
    """Whether both replicas contributed to a commit after step `since` with so many ranks; none given: equal."""
    rows = [row for row in job.rows("replicas/1/commits.jsonl") if row["step"] > since]
    both = [tuple(sorted(row.get("ring_widths", ()))) for row in rows if len(row["contributors"]) == 2]
    return tuple(sorted(widths)) in both


def stands_in_its_fetch(replica: int, rank: int) -> dict[str, Any]:
    """The second life of a rank stops as a part of the state has arrived."""
    point = {"replicas": [replica], "rank": rank, "life": 1, "step": 0, "signal": "STOP"}
    return {"debug.failpoints": {"fetch": point}}


@pytest.mark.proof
def test_a_replica_loses_another_host_while_it_fetches(tmp_path: Path) -> None:
    """What its ranks fetch is void: the fewer ones fetch their parts. The host is back before they train."""
    with job_of(tmp_path, 40, 2, 2, 1, **{"hosts.spare": 1}, **stands_in_its_fetch(1, 1)) as job:
        job.until(lambda: job.step() >= 3, "step 3")
        job.lose_host(1, "r1h1")
        job.until(lambda: job.stopped(1, 1), "it fetches on the spare host")
        spare = job.lose_host(1, "s0")
        job.until(lambda: job.events("Shrunk"), "fewer ranks")
        spare.lifted("it is back")
        job.ends_well(40)
        assert changes(job, 1) == [(2, 1), (1, 2)]
        assert contributed(job, 0, 1, 2)
        first = [row["rank"] for row in job.events("FetchCompleted") if row["incarnation"].endswith("-1")]
        assert 1 not in first, "it was lost in its fetch"


@pytest.mark.soak
def test_the_number_of_ranks_of_a_donor_changes_while_another_replica_is_behind(tmp_path: Path) -> None:
    """The grant is void for the one that fetches: in a new epoch it takes what the fewer ranks hold."""
    settings = {"quorum.min_replicas": 1, "checkpoint.every": 5, **stands_in_its_fetch(1, 0)}
    with job_of(tmp_path, 100, 2, 4, 2, **settings) as job:
        job.until(lambda: job.step() >= 3, "step 3")
        job.signal(1, 3, signal.SIGKILL)
        job.until(lambda: job.stopped(1, 0), "it fetches")
        behind = job.pid(1, 0)
        assert behind is not None
        host = job.lose_host(0, "r0h3")
        job.until(lambda: job.events("Shrunk", replica=0), "the donor has fewer ranks")
        with contextlib.suppress(ProcessLookupError):  # its supervisor may have found it stopped
            os.kill(behind, signal.SIGCONT)
        job.until(lambda: contributed(job, 0, 3, 4), "both train")
        host.lifted("it is back")
        job.ends_well(100)
        assert changes(job, 0)[:1] == [(4, 3)]
        assert changes(job, 1) == []


@pytest.mark.soak
def test_one_of_two_replicas_trains_with_three_of_four_ranks_and_a_connection_is_reset(tmp_path: Path) -> None:
    """Lanes of 4 and 3 ranks are formed again after a reset, and again as another host is lost."""
    with job_of(tmp_path, 80, 2, 4, 2, **{"checkpoint.every": 5}) as job:
        job.until(lambda: job.step() >= 5, "step 5")
        hosts = [job.lose_host(0, "r0h3")]
        job.until(lambda: contributed(job, 5, 3, 4), "three and four ranks")
        job.injure("reset", 1)
        before = job.step()
        job.until(lambda: contributed(job, before + 1, 3, 4), "the lanes are formed again")
        hosts.append(job.lose_host(0, "r0h2"))
        job.injure("reset", 1)
        job.until(lambda: contributed(job, before, 2, 4), "two and four ranks")
        for host in hosts:
            host.lifted("it is back")
        job.ends_well(80)
        assert changes(job, 0) == [(4, 3), (3, 2), (2, 4)]
        assert not commits_of(RunDir(job.run.resolve()))[-1].get("ring_widths")


@pytest.mark.soak
def test_the_only_replica_gets_its_host_back_while_it_shrinks(tmp_path: Path) -> None:
    """A rank dies as it takes its part of the state, and the host is back: it goes on with all ranks."""
    dies = {"fetch": {"replicas": [0], "rank": 0, "life": 1, "step": 0}}
    with job_of(tmp_path, 30, 1, 4, 2, **{"debug.failpoints": dies, "checkpoint.every": 5}) as job:
        job.until(lambda: job.step() >= 5 and job.events("Protected"), "copies")
        host = job.lose_host(0, "r0h2")
        job.until(lambda: starts(job, 0) == 2, "fewer ranks start")
        host.lifted("it is back")
        summary = job.ends_well(30)
        assert changes(job, 0) == [(4, 3), (3, 4)]
        died = [row for row in job.events("ReplicaExited") if row["incarnation"].endswith("-1")]
        assert [(row["kind"], row["rank"]) for row in died] == [("SIGKILL", 0)], "in its fetch"
        assert all(one["lost_steps"] <= 1 for one in summary["recoveries"])


@pytest.mark.soak
def test_another_host_is_lost_after_the_order_to_leave_and_before_all_ranks_start(tmp_path: Path) -> None:
    """It starts with as many ranks as before, one of them on the host that is back; then it grows."""
    with job_of(tmp_path, 40, 1, 3, 2, **{"checkpoint.every": 5}) as job:
        job.until(lambda: job.step() >= 5 and job.events("Protected"), "copies")
        first = job.lose_host(0, "r0h2")
        job.until(lambda: job.events("Shrunk"), "two ranks")
        job.more(2)
        first.lifted("it is back")
        job.until(lambda: job.events("LeaveRequested"), "the order to leave")
        second = job.lose_host(0, "r0h1")
        job.until(lambda: starts(job, 0) == 3, "the next start")
        second.lifted("it is back, too")
        summary = job.ends_well(40)
        assert changes(job, 0) == [(3, 2), (2, 3)]
        ranks = [len(row["pids"]) for row in job.events("ReplicaStarted")]
        assert (ranks[:3], ranks[-1]) == ([3, 2, 2], 3)
        assert all(one["lost_steps"] <= 1 for one in summary["recoveries"])
