import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product
from statistics import fmean

import pytest

from ft_hsdp.analysis.culprits import SILENT_S, Finding, find, find_slow
from ft_hsdp.core.traces import COMMIT, GroupTrace, Heard, Mark, RankId, RankTrace
from tests.model.judged import judged
from tests.model.traces import HANGS, KINDS, SLOW, Verdict, case

EPOCH = f"{COMMIT} of epoch 1"


class Job:
    """Replicas of two ranks each, in step 5: all have ended their four all_gathers and one all-reduce of it."""

    def __init__(self, replicas: int = 2) -> None:
        self.heard: dict[RankId, Heard] = {}
        for rank in (RankId(r, k) for r in range(replicas) for k in (0, 1)):
            left = RankId((rank.replica - 1) % replicas, rank.rank)
            ring = GroupTrace(f"ring {rank.rank} of epoch 1", 10, 10, "bucket 1", left, 40, 40)
            groups = (GroupTrace(f"{rank.replica}:0", 20, 20, "all_gather"), ring, GroupTrace(EPOCH, 4, 4))
            self.heard[rank] = Heard(RankTrace(groups), 0.5, 2.0)

    def at(self, replica: int, rank: int, **groups: tuple[int, int]) -> None:
        """Say how many collectives of its group, its ring and of commits a rank has begun and ended."""
        names = {"own": 0, "ring": 1, "commit": 2}
        facts = {names[n]: {"joined": j, "done": d, "awaits": "left"} for n, (j, d) in groups.items()}
        self.change(replica, rank, facts)

    def change(self, replica: int, rank: int, facts: Mapping[int, dict[str, object]]) -> None:
        who = RankId(replica, rank)
        trace = self.heard[who].trace
        assert trace is not None
        groups = [replace(g, **facts.get(n, {})) for n, g in enumerate(trace.groups)]  # type: ignore[arg-type]
        self.heard[who] = replace(self.heard[who], trace=replace(trace, groups=tuple(groups)))

    def silence(self, replica: int, rank: int) -> None:
        who = RankId(replica, rank)
        self.heard[who] = replace(self.heard[who], age_s=SILENT_S + 1)

    def found(self) -> list[tuple[str, tuple[str, ...]]]:
        return named(find(self.heard).findings)


def named(findings: Iterable[Finding]) -> list[tuple[str, tuple[str, ...]]]:
    return [(each.kind, tuple(map(str, each.ranks))) for each in findings]


@pytest.fixture
def job() -> Job:
    return Job()


def test_who_has_not_joined_and_waits_nowhere_is_the_culprit(job: Job) -> None:
    job.at(1, 0, own=(21, 20))  # waits for 1/1 in its replica
    job.at(0, 0, ring=(11, 10))  # waits for 1/0, which is excused
    job.at(0, 1, ring=(11, 10))
    (finding,) = find(job.heard).findings
    assert named([finding]) == [("absent", ("1/1",))]
    assert "all_gather, number 21 of 1:0" in finding.why
    waits = {(wait.group, wait.waiting, wait.absent) for wait in find(job.heard).waits}
    assert waits == {
        ("1:0", (RankId(1, 0),), (RankId(1, 1),)),
        ("ring 0 of epoch 1", (RankId(0, 0),), (RankId(1, 0),)),
        ("ring 1 of epoch 1", (RankId(0, 1),), (RankId(1, 1),)),
    }


def test_an_engine_that_waits_is_no_excuse_for_a_main_thread_that_does_not(job: Job) -> None:
    job.at(1, 0, own=(21, 20))
    job.at(1, 1, ring=(11, 10))  # its engine waits for 0/1
    assert ("absent", ("1/1",)) in job.found()
    job.at(0, 1, own=(21, 20))
    job.at(0, 0, own=(21, 20))
    assert ("absent", ("0/1",)) not in job.found()


def test_a_job_in_which_nobody_waits_has_no_culprit(job: Job) -> None:
    assert job.found() == []
    job.at(0, 0, own=(21, 20))
    job.heard[RankId(0, 1)] = replace(job.heard[RankId(0, 1)], still_s=0.0)
    assert job.found() == []


def test_who_is_silent_is_the_culprit_whatever_it_said_last(job: Job) -> None:
    job.at(1, 1, own=(21, 20))  # what it waited in has ended since
    job.silence(1, 1)
    job.at(1, 0, own=(22, 21))
    assert job.found() == [("silent", ("1/1",))]
    job.silence(0, 1)  # nobody waits for that one
    assert job.found() == [("silent", ("1/1",))]


def test_who_has_not_finished_what_others_have_finished_is_stuck(job: Job) -> None:
    job.at(0, 0, own=(21, 20))
    job.at(0, 1, own=(21, 21))
    assert job.found() == [("stuck", ("0/0",))]
    job.at(0, 1, own=(21, 20))
    assert job.found() == [("stuck", ("0/0", "0/1"))], "no count tells which"


def test_in_a_ring_counts_of_chunks_and_what_an_engine_waits_for_tell_the_culprit(job: Job) -> None:
    for replica in (0, 1):
        job.change(replica, 0, {1: {"joined": 11, "received": 42, "sent": 44, "awaits": "left"}})
    job.change(1, 0, {1: {"received": 44}})
    assert job.found() == [("link", ("1/0", "0/0"))]
    job.change(0, 0, {1: {"awaits": ""}})
    assert job.found() == [("stuck", ("0/0",))]
    job.change(0, 0, {1: {"awaits": "left", "received": 44, "sent": 42}})
    job.change(1, 0, {1: {"received": 42}})
    assert job.found() == [("stuck", ("0/0",))], "it passes nothing on"
    job.silence(1, 0)
    assert ("silent", ("1/0",)) in job.found()


def test_ranks_that_wait_for_each_other_are_found(job: Job) -> None:
    for replica in (0, 1):
        for rank in (0, 1):
            mine, other = (21, 20), (20, 20)
            trace = job.heard[RankId(replica, rank)].trace
            assert trace is not None
            more = GroupTrace(f"{replica}:1", *(mine if rank else other))
            job.heard[RankId(replica, rank)] = Heard(replace(trace, groups=(*trace.groups, more)), 0.5, 2.0)
            job.at(replica, rank, own=other if rank else mine)
    assert job.found() == [("deadlock", ("0/0", "0/1"))]


# Whose word counts. Replica 1 is the suspect, 2 may lie.


@pytest.fixture
def hung() -> Job:
    """Three replicas: 1/1 hangs before an all_gather, 1/0 waits in it, and all others in their rings."""
    job = Job(3)
    job.at(1, 0, own=(21, 20))
    for replica in (0, 2):
        for rank in (0, 1):
            job.at(replica, rank, ring=(11, 10))
    return job


def confirmed(job: Job) -> list[tuple[str, int, int]]:
    found = find(job.heard).findings
    return [(",".join(map(str, each.ranks)), each.witnesses, each.epoch) for each in found]


def test_witnesses_are_the_other_replicas_that_wait_for_what_a_culprit_has_not_begun(hung: Job) -> None:
    assert confirmed(hung) == [("1/1", 2, 1)]
    hung.heard[RankId(0, 1)] = replace(hung.heard[RankId(0, 1)], still_s=0.0)
    assert confirmed(hung) == [("1/1", 1, 1)], "0/1 does not wait for it"
    for replica in (0, 1, 2):
        hung.at(replica, 0, own=(20, 20), ring=(11, 11), commit=(5, 4))
    assert confirmed(hung) == [("1/1", 2, 1)], "the vote of 1/0 is none of another replica"


def test_a_silent_rank_has_witnesses_while_another_one_of_its_replica_is_heard(hung: Job) -> None:
    hung.silence(1, 1)
    assert confirmed(hung) == [("1/1", 2, 1)]
    hung.silence(1, 0)
    assert {witnesses for _, witnesses, _ in confirmed(hung)} == {0}


def test_who_gets_on_waits_for_votes_or_is_one_of_several_has_no_witness(hung: Job) -> None:
    before = dict(hung.heard)
    trace = before[RankId(1, 1)].trace
    assert trace is not None
    hung.heard[RankId(1, 1)] = Heard(trace, 0.5, 0.2)
    assert confirmed(hung) == [("1/1", 0, 0)]
    hung.heard = dict(before)
    hung.at(1, 0, own=(21, 21))
    hung.at(1, 1, own=(21, 20))
    assert ("1/1", 2, 1) in confirmed(hung)
    hung.at(1, 1, commit=(5, 4))
    assert ("1/1", 0, 0) in confirmed(hung)
    hung.heard = dict(before)
    hung.silence(2, 0)
    hung.at(2, 1, ring=(11, 10), own=(21, 20))
    assert set(confirmed(hung)) == {("1/1", 0, 0), ("2/0", 0, 0)}


def test_an_engine_that_hangs_has_witnesses() -> None:
    job = Job(3)
    for replica in (0, 1, 2):
        job.at(replica, 0, ring=(11, 10))
    job.change(1, 0, {1: {"awaits": ""}})
    assert confirmed(job) == [("1/0", 2, 1)]


def healthy() -> Iterable[Job]:
    """Yield what 0 and 1 tell, who are as they should be while 2 keeps something back."""
    ring, ended, votes = {"ring": (11, 10)}, {"ring": (11, 11)}, {"ring": (11, 11), "commit": (5, 4)}
    states = (ring, ring), (votes, votes), (votes, ring), ({**ended, "own": (21, 20)}, ring)
    for mine, yours in product(states, states):
        job = Job(3)
        for rank in (0, 1):
            job.at(0, rank, **mine[rank])
            job.at(1, rank, **yours[rank])
        yield job


def test_no_replica_that_lies_finds_two_witnesses_against_a_healthy_one() -> None:
    chance, against = random.Random(5), set[str]()
    names = [EPOCH, *(f"ring {n} of epoch {e}" for n in (0, 1) for e in (1, 2)), "0:0", "1:0", "2:0"]
    for job in [job for _ in range(100) for job in healthy()]:
        for rank in (RankId(2, 0), RankId(2, 1)):
            groups = []
            for name in chance.sample(names, chance.randrange(1, 7)):
                done, left = chance.choice((4, 5, 9, 10, 11, 20, 21, 99)), chance.choice((None, *job.heard))
                groups.append(GroupTrace(name, done + chance.randrange(3), done, left=left, awaits="left"))
            job.heard[rank] = Heard(RankTrace(tuple(groups)), 0.5, 9.0)
        for finding in find(job.heard).findings:
            if finding.ranks[0].replica < 2:
                against.add(finding.kind)
                assert finding.witnesses < 2, finding
    assert {"absent", "stuck"} <= against, "it is found, but not confirmed"


def marks(late: float) -> tuple[Mark, ...]:
    return tuple(Mark(n, 100.0 + n * 0.1 + late) for n in (16, 32, 48))


def test_a_slow_rank_begins_collectives_late_and_a_slow_connection_blocks_its_left_end(job: Job) -> None:
    times = {"in_s": 10.0, "blocked_s": 0.2}
    for replica in (0, 1):
        for rank in (0, 1):
            job.change(replica, rank, {0: {"marks": marks(0.0)}, 1: times})
    assert find_slow(job.heard).findings == ()
    job.change(0, 1, {0: {"marks": marks(0.06)}})
    assert named(find_slow(job.heard).findings) == [("slow", ("0/1",))]
    job.change(0, 1, {0: {"marks": marks(0.02)}})
    job.change(1, 0, {1: {"blocked_s": 4.0}})
    assert named(find_slow(job.heard).findings) == [("slow link", ("1/0", "0/0"))]
    job.change(1, 1, {1: {"blocked_s": 4.0}})  # its replica comes late in all rings: no connection is at fault
    assert find_slow(job.heard).findings == ()


def verdict(kind: str, seed: int) -> Verdict:
    return judged(case(seed, kind, replicas=5, ranks=8))[0]


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("in", "two")])
def test_emulated_faults_are_named(kind: str) -> None:
    verdicts = [verdict(kind, seed) for seed in range(10)]
    assert fmean(v.exact for v in verdicts) >= (1.0 if kind in HANGS else 0.9), kind
    assert sum(v.false for v in verdicts) <= 2 * (kind in SLOW), kind


def test_two_faults_and_hangs_inside_of_collectives_are_named_or_narrowed_down() -> None:
    verdicts = [verdict(kind, seed) for kind in ("in", "two") for seed in range(12)]
    assert fmean(v.exact for v in verdicts) >= 0.6
    assert sum(v.false for v in verdicts) <= 1


def test_a_healthy_job_has_no_culprit() -> None:
    assert sum(verdict("healthy", seed).false for seed in range(10)) == 0
