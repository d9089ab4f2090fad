"""A replica that lost a host and gets no other goes on with fewer ranks, and grows when the host is back."""

import signal
from pathlib import Path

import pytest

from ft_hsdp.launch.injection import Inflicted, inflict, parse_options
from ft_hsdp.launch.run.directory import RunDir, read_jsonl
from ft_hsdp.launch.run.recorder import commits_of
from tests.support.scenarios.scenario_job import Job

pytestmark = pytest.mark.proof

SAFE = {"quorum.on_lost_head": "rollback", "timeouts.place_s": 0.3}


def widths(job: Job) -> list[tuple[int, int]]:
    """How many ranks trained the steps, of how many units, each pair once, in the order of the steps."""
    rows = read_jsonl(job.run / "metrics.jsonl")
    found = [(row.get("widths", {}).get("0", 0), row["units"]) for row in rows if "units" in row]
    return [pair for n, pair in enumerate(found) if n == 0 or pair != found[n - 1]]


def test_another_host_is_lost_meanwhile_and_a_rank_is_killed_while_it_grows(tmp_path: Path) -> None:
    """Each attempt ends as a whole, and the next one is planned from the hosts that are there then."""
    shrinks = {"ranks_per_replica": 3, "hosts.per_replica": 3, "memory.shrink_to": 1}
    with Job(tmp_path, 30, replicas=1, **shrinks, **SAFE) as job:
        run = RunDir(job.run)
        job.until(lambda: job.step() >= 5, "step 5")
        hosts = [inflict(run, parse_options(kind="host", replica=0, host="r0h1"))]
        job.until(lambda: job.events("Shrunk"), "two ranks")
        job.until(lambda: len(job.events("ReplicaStarted")) == 2, "the second life")
        hosts.append(inflict(run, parse_options(kind="host", replica=0, host="r0h2")))
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
    lost = inflict(RunDir(job.run), parse_options(kind="host", replica=replica, host=f"r{replica}h1"))
    job.until(lambda: job.events("Shrunk"), "fewer ranks")
    job.until(lambda: unequal(job) >= before + 3, "both contribute")
    return lost


def test_one_of_two_replicas_goes_on_with_half_its_ranks_and_grows(tmp_path: Path) -> None:
    """They sum by lanes. `verify` finds each unit once, and a replay the same bits.

    No step is committed while one of them is away: so the job lasts until the lost host is back.
    """
    steps = 60
    with beside(tmp_path, steps, 2, **{"quorum.min_replicas": 2}) as job:
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
