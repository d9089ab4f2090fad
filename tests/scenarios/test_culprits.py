"""Ranks of a real job hang: the lighthouse names them, and `diagnose` says so, before anything ends the wait.

With `quorum.on_culprit` it evicts the replica of such a rank; with `quorum.on_straggler` that of a slow one, or
moves it.
"""

import signal
from itertools import pairwise
from pathlib import Path

import pytest

from ft_hsdp.analysis.diagnosis import describe
from ft_hsdp.errors import LighthouseUnreachable
from ft_hsdp.launch.run.diagnose import ask, lines
from ft_hsdp.launch.run.directory import RunDir
from tests.support import hangs
from tests.support.scenarios.scenario_job import Job

HANGING = {
    "replicas": 2,
    "ranks_per_replica": 2,
    "preload": [hangs.MODULE],
    "debug__faults": True,
    "ftar__timeout_s": 120.0,
}


def findings(job: Job) -> list[tuple[str, list[str]]]:
    try:
        document = describe(ask(RunDir(job.run)))
    except LighthouseUnreachable:
        return []
    return [(f["kind"], [s["name"] for s in f["suspects"]]) for f in document["findings"]]


@pytest.mark.parametrize(
    ("kind", "found"),
    [("hang_before", ("absent", ["1/1"])), pytest.param("hang_in", ("stuck", ["1/1"]), marks=pytest.mark.proof)],
)
def test_a_rank_that_hangs_is_named_and_the_job_gets_on_when_it_does(
    kind: str, found: tuple[str, list[str]], tmp_path: Path
) -> None:
    with Job(tmp_path, 60, **HANGING) as job:
        job.until(lambda: job.step() >= 5, "step 5")
        lift = hangs.order(job.run, kind, 1, 1)
        job.until(lambda: findings(job) == [found], "the culprit is named")
        document = describe(ask(RunDir(job.run)))
        assert any("hangs.py" in line for line in lines(document)) is (kind == "hang_before"), "its main thread"
        job.until(lambda: bool(job.events("CulpritFound")), "the journal has it")
        lift()
        job.ends_well(60)
        told = [(e["replica"], e["rank"], e["over"]) for e in job.events("CulpritFound")]
        assert (told[0], told[-1]) == ((1, 1, False), (1, 1, True))


TIMEOUT_S = 60
ENDLESS = 100_000
HANGS = {"preload": [hangs.MODULE], "debug__faults": True, "quorum__min_replicas": 2, "ftar__timeout_s": TIMEOUT_S}
SOON_S = 12.0  # 3 s of quiet, two looks, an epoch; and as long again on a busy machine


@pytest.mark.proof
def test_the_replica_of_a_rank_that_hangs_is_evicted_and_comes_back(tmp_path: Path) -> None:
    with Job(tmp_path, ENDLESS, **HANGS, quorum__on_culprit="evict") as job:
        job.until(lambda: len(job.contributing()) == 3 and job.step() > 20, "three contribute")
        lift = hangs.order(job.run, "hang_before", 1, 1)
        job.until(lambda: job.events("ReplicaEvicted"), "an eviction", TIMEOUT_S / 2)
        lift()
        job.until(lambda: job.contributing() == {0, 2}, "two go on")
        job.until(lambda: len(job.contributing()) == 3, "all three again")
        job.more(10)
        job.process.send_signal(signal.SIGINT)
        summary = job.end(130)
    (evicted,) = job.events("ReplicaEvicted")
    assert (evicted["replica"], evicted["source"]) == (1, "diagnosis")
    assert "rank 1/1" in evicted["reason"]
    (failure,) = summary["failures"]
    assert (failure["replica"], failure["kind"]) == (1, "evicted")
    commits = sorted(row["t"] for row in job.rows("replicas/0/commits.jsonl"))
    assert max(after - t for t, after in pairwise(commits)) < SOON_S
    assert (summary["batches"]["duplicated"], summary["batches"]["skipped"]) == (0, 0)


@pytest.mark.proof
@pytest.mark.parametrize("spare", [0, 1])
def test_the_replica_of_a_slow_rank_moves_to_a_spare_host_or_is_started_again(spare: int, tmp_path: Path) -> None:
    hosts = {"hosts__per_replica": 1, "hosts__spare": spare}
    with Job(tmp_path, ENDLESS, **HANGS, **hosts, quorum__on_straggler="demote") as job:
        job.until(lambda: len(job.contributing()) == 3 and job.step() > 20, "three contribute")
        lift = hangs.order(job.run, "slow_rank", 1, 1, seconds=0.08)
        what = "HostCordoned" if spare else "ReplicaEvicted"
        job.until(lambda: job.events(what), what, 2 * TIMEOUT_S)
        lift()
        job.until(lambda: len(job.events("ReplicaStarted")) == 4, "it is started again")
        job.until(lambda: len(job.contributing()) == 3, "all three again")
        job.more(10)
        job.process.send_signal(signal.SIGINT)
        summary = job.end(130)
    (seen, *_), (acted,) = job.events("StragglerSeen"), job.events(what)
    assert (seen["replica"], seen["rank"], seen["witnesses"]) == (1, 1, 2)
    assert (acted["replica"], acted.get("host"), len(job.events("HostReplaced"))) == (
        1,
        "r1h0" if spare else None,
        spare,
    )
    assert (summary["batches"]["duplicated"], summary["batches"]["skipped"]) == (0, 0)
