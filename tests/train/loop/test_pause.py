"""`job.pause`: what it takes, and what a rank says of itself meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh

from ft_hsdp.config import parse
from ft_hsdp.errors import ConfigError
from ft_hsdp.ftar.settings import Settings as RingSettings
from ft_hsdp.train.identity import RankPlace
from ft_hsdp.train.job import Job
from ft_hsdp.train.orders import Mailbox
from ft_hsdp.train.runtime import RankRuntime
from tests.train.test_job import made


@pytest.fixture
def job(mesh: DeviceMesh, tmp_path: Path) -> Iterator[Job]:
    config = parse({"replicas": 2, "ranks_per_replica": 1, "timeouts": {"pause_s": 100}})
    with made(mesh, tmp_path, config) as job:
        runtime = RankRuntime.__new__(RankRuntime)  # what it says of the main thread needs no connection
        runtime._pauses, runtime._progress, runtime._mailbox = job._pauses, 0, Mailbox()
        runtime.place = RankPlace(0, 1, tmp_path, (), "t", "127.0.0.1", True)
        job._runtime = runtime
        yield job
        job._runtime = None


def test_a_pause_is_announced_while_it_lasts(job: Job) -> None:
    runtime: Any = job._runtime
    assert (runtime.main_progress(), runtime._pauses.left_s(), runtime._beat().pause) == (0, 0.0, "")
    with job.pause("evaluation"):
        assert runtime.main_progress() is None, "the watchdog does not count"
        assert 99 < runtime._pauses.left_s() <= 100
        assert runtime._beat().pause == "evaluation"
    assert (runtime.main_progress(), runtime._pauses.left_s(), runtime._beat().pause) == (1, 0.0, "")


def test_a_pause_that_lasts_too_long_is_none(job: Job) -> None:
    runtime: Any = job._runtime
    with job.pause("evaluation", limit_s=0.02):
        end = time.monotonic() + 5
        while runtime._pauses.left_s():
            assert time.monotonic() < end
        assert (runtime.main_progress(), runtime._beat().pause) == (0, "")


def test_an_error_ends_the_pause(job: Job) -> None:
    with pytest.raises(KeyError), job.pause("evaluation"):
        raise KeyError
    assert job._runtime is not None
    assert job._runtime._pauses.left_s() == 0


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("",), "job.pause: got ''; allowed: 1 to 80 characters"),
        (("x" * 81,), "job.pause: got 'x+.*; allowed: 1 to 80 characters"),
        (("a\nb",), "job.pause: got .*; allowed: 1 to 80 characters"),
        ((3,), "job.pause: got 3; allowed: 1 to 80 characters"),
        (("evaluation", 0), r"job.pause\(limit_s\): got 0; allowed: more than 0, and at most timeouts.pause_s"),
        (("evaluation", 101), r"job.pause\(limit_s\): got 101; .* \(100\)"),
        (("evaluation", "long"), r"job.pause\(limit_s\): got 'long'"),
        (("evaluation", float("nan")), r"job.pause\(limit_s\): got nan"),
    ],
)
def test_bad_arguments_are_refused(job: Job, arguments: Any, line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{line}"), job.pause(*arguments):
        pass


def test_a_pause_in_a_pause_is_refused_and_the_outer_one_goes_on(job: Job) -> None:
    assert job._runtime is not None
    with job.pause("evaluation"):
        with pytest.raises(ConfigError, match="one pause at a time; evaluation is under way"), job.pause("export"):
            pass
        assert job._runtime._beat().pause == "evaluation"


def test_before_the_job_is_joined_nobody_waits(job: Job) -> None:
    runtime, job._runtime = job._runtime, None
    with job.pause("download"):
        pass
    job._runtime = runtime


def test_data_connections_outlast_the_longest_pause(job: Job) -> None:
    settings = RingSettings.of(job.config)
    assert settings.patient.timeout_s == 2 * job.config.ftar.timeout_s + 100
