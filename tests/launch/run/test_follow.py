import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ft_hsdp.config import parse
from ft_hsdp.launch.run import follow
from ft_hsdp.launch.run.directory import RunDir, read_json, read_jsonl, write_job_files
from tests.support.launch.launch_rows import commit, written
from tests.support.waiting import until

FINISHED = {"t": 9.0, "event": "JobFinished", "source": "lighthouse", "reason": "final state (1, 2, ab)"}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "job")
    write_job_files(run, parse({"job": {"name": "job", "runs_dir": str(tmp_path)}, "replicas": 2}))
    run.lighthouse_events.parent.mkdir()
    return run


@contextmanager
def following(run: RunDir) -> Iterator[subprocess.Popen[bytes]]:
    """The process that follows a run; it does not outlive a test that fails."""
    with follow.start(run) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_figures_are_written_when_the_job_has_its_final_state(run: RunDir) -> None:
    run.metrics.write_text("what an earlier lighthouse of this run has seen\n")
    with following(run) as process:
        written(run.commits(0), *(commit(step, who=(0,)) for step in (1, 2, 3)))
        until(lambda: [r["step"] for r in read_jsonl(run.metrics)][:2] == [1, 2], "metrics while the job runs")
        assert not run.summary.exists()
        written(run.lighthouse_events, FINISHED)
        until(run.summary.exists, "the summary")
        assert read_json(run.summary)["steps"] == 3
        assert [r["step"] for r in read_jsonl(run.metrics)] == [1, 2, 3]
        assert not run.events.exists()
        assert process.wait(10) == 0


def test_it_ends_with_the_lighthouse_and_then_writes_the_summary_of_a_job_that_has_ended_only(run: RunDir) -> None:
    written(run.commits(0), commit(1, who=(0,)))
    follow.follow(run, 1)  # this is not the pid of the parent: it is gone
    assert not run.summary.exists()
    written(run.lighthouse_events, FINISHED)
    follow.follow(run, 1)
    assert read_json(run.summary)["steps"] == 1


def test_two_lighthouses_of_one_folder_have_one_writer(run: RunDir) -> None:
    written(run.commits(0), commit(1, who=(0,)))
    with following(run) as process:
        until(run.metrics.exists, "it has begun")
        follow.follow(run, 1)
        assert not run.summary.exists()
        written(run.lighthouse_events, FINISHED)
        until(run.summary.exists, "the summary")
        assert process.wait(10) == 0


def test_nothing_is_written_where_the_replicas_have_other_folders(run: RunDir) -> None:
    follow.follow(run, 1)
    assert not run.metrics.exists()
