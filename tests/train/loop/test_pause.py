from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from ft_hsdp.config import parse
from ft_hsdp.errors import ConfigError
from ft_hsdp.ftar.settings import Settings as RingSettings
from ft_hsdp.protocol import RankAlive
from ft_hsdp.state.replica_group import ReplicaGroup
from ft_hsdp.train import runtime as train_runtime
from ft_hsdp.train.identity import RankPlace
from ft_hsdp.train.loop.user_loop import Pauses, checked_pause
from ft_hsdp.train.rank_zero import OtherRank, RankZero
from ft_hsdp.train.runtime import RankRuntime
from tests.support.refused import refused
from tests.support.train.one_rank import START, OneRank
from tests.support.waiting import until
from tests.train.test_job import made

CONFIG = parse({"replicas": 2, "ranks_per_replica": 1, "timeouts": {"pause_s": 100}})


@pytest.fixture
def paused() -> Pauses:
    return Pauses()


@pytest.fixture
def runtime(mesh: DeviceMesh, tmp_path: Path, paused: Pauses) -> Iterator[RankRuntime]:
    """What a rank has before it joins, with these pauses of its main thread."""
    one = OneRank(mesh, CONFIG)
    place = RankPlace(0, 1, tmp_path, ("http://127.0.0.1:1",), "t", "127.0.0.1", 0)
    runtime = RankRuntime(CONFIG, place, torch.device("cpu"), one.adopted, one.live, one.orders, paused, {})
    yield runtime
    runtime.close()


def test_a_pause_is_announced_while_it_lasts(runtime: RankRuntime, paused: Pauses) -> None:
    """What is due is copied before, and the weights may be others than those of the state meanwhile."""
    assert (runtime.main_progress(), paused.left_s(), paused.what) == (0, 0.0, "")
    runtime.snapshots, held = mock.Mock(), runtime.live_state
    assert held.slice_digest(START.lineage)
    with paused.during("evaluation", 100.0):
        assert runtime.main_progress() is None, "the watchdog does not count"
        assert 0 < paused.left_s() <= 100
        assert paused.what == "evaluation"
        runtime.snapshots.wait.assert_called_once_with()
        assert not held.slice_digest(START.lineage)
    assert held.slice_digest(START.lineage)
    assert (runtime.main_progress(), paused.left_s(), paused.what) == (1, 0.0, "")


def test_a_pause_that_lasts_too_long_is_none(runtime: RankRuntime, paused: Pauses) -> None:
    paused.begin("evaluation", 0.02)
    until(lambda: not paused.left_s())
    assert (runtime.main_progress(), paused.what) == (0, "")


class RankOfTwo:
    """A rank of a replica of two. The test carries what it says."""

    def __init__(self, mesh: DeviceMesh, run: Path, rank: int) -> None:
        one, self.paused, self._way = OneRank(mesh, CONFIG), Pauses(), OtherRank if rank else RankZero
        place = RankPlace(rank, 2, run, ("http://127.0.0.1:1",), "t", "127.0.0.1", rank)
        parts = one.adopted, one.live, one.orders, self.paused
        with mock.patch.object(train_runtime, self._way.__name__, wraps=self._way) as made:
            self.runtime = RankRuntime(CONFIG, place, torch.device("cpu"), *parts, {})
        self.hear = made.call_args.args[-2]

    def said(self) -> RankAlive:
        with mock.patch.object(self._way, "to_ranks") as to_ranks:
            self.runtime.say_alive()
        return to_ranks.call_args.args[0]


@pytest.fixture
def two(mesh: DeviceMesh, tmp_path: Path) -> Iterator[list[RankOfTwo]]:
    with mock.patch.object(ReplicaGroup, "gather", side_effect=lambda mine: [mine, mine]):
        made = [RankOfTwo(mesh, tmp_path, rank) for rank in range(2)]
    yield made
    for each in made:
        each.runtime.close()


@pytest.mark.parametrize("who", [0, 1])
def test_a_pause_of_one_rank_is_its_siblings_until_it_ends(two: list[RankOfTwo], who: int) -> None:
    def beat() -> list[bool]:
        for rank in (who, 1 - who):
            two[1 - rank].hear(two[rank].said())
        return [each.runtime.main_progress() is None for each in two]

    pausing, sibling = two[who], two[1 - who]
    pausing.paused.begin("export", 50.0)
    assert beat() == [True, True]
    assert (sibling.paused.left_s(), sibling.paused.what) == (0.0, "")
    assert 0 < sibling.paused.replica_left_s() <= 50, "its ring says so"
    assert (two[0].said().pause_ms > 0, two[1].said().pause_ms > 0) == (True, who == 1), "rank 0 tells of all"
    pausing.paused.end()
    assert beat() == [False, False]
    pausing.paused.begin("export", 0.02)
    beat()
    until(lambda: not sibling.paused.replica_left_s())  # nothing more is heard
    sibling.hear(RankAlive(who, 10**9))
    assert sibling.paused.replica_left_s() <= CONFIG.timeouts.pause_s


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (("", None), "job.pause"),
        (("x" * 81, None), "job.pause"),
        (("a\nb", None), "job.pause"),
        ((3, None), "job.pause"),
        (("evaluation", 0), "job.pause(limit_s)"),
        (("evaluation", 101), "job.pause(limit_s)"),
        (("evaluation", "long"), "job.pause(limit_s)"),
        (("evaluation", float("nan")), "job.pause(limit_s)"),
    ],
)
def test_bad_arguments_are_refused(arguments: Any, key: str) -> None:
    refused(lambda: checked_pause(arguments[0], arguments[1], 100.0), key=key)


def test_an_error_ends_a_pause_and_one_within_another_is_refused(tmp_path: Path) -> None:
    """Before the job is joined, too, where nobody waits."""
    job, refusal = made(tmp_path, CONFIG), pytest.raises(ConfigError, match="evaluation is under way")
    with refusal, job.pause("evaluation"), job.pause("export"):
        pass
    with job.pause("export"):
        pass


def test_what_a_trainer_announces_is_a_pause_in_the_job_and_none_within_another(tmp_path: Path) -> None:
    job = made(tmp_path, CONFIG)
    with job.announced("saving"):
        refused(job.pause("export").__enter__, "saving is under way")
    with job.pause("export"):
        with job.announced("saving"):
            pass
        refused(job.pause("more").__enter__, "export is under way")
    with mock.patch.object(job, "_runtime"):  # it has joined
        job.close()
    with job.announced("saving"), job.pause("after the end"):
        pass


def test_data_connections_outlast_the_longest_pause() -> None:
    assert RingSettings.of(CONFIG).patient.timeout_s == 2 * CONFIG.ftar.timeout_s + 100
