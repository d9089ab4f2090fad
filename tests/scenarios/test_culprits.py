"""Ranks of a real job hang: the lighthouse names them, and `diagnose` says so, before anything ends the wait.

With `quorum.on_culprit` it evicts the replica of such a rank.
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
