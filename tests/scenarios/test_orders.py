"""Real replicas are told to end: they leave in peace, keep what they know, and leave no process behind."""

import shutil
import signal
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from ft_hsdp import secret
from ft_hsdp.errors import EXIT_CONFIG, ConfigError, LighthouseUnreachable
from ft_hsdp.launch import admin
from ft_hsdp.launch.run.directory import RunDir
from ft_hsdp.state.checkpoint import catalog
from tests.support.aborted import aborted
from tests.support.running import run_by, running
from tests.support.scenarios.scenario_job import Job
from tests.support.slow_script import write_slow_script

SMALL: dict[str, Any] = {"replicas": 2, "ranks_per_replica": 1}
ENDLESS = 100_000


@pytest.mark.proof
def test_ctrl_c_once_writes_the_state_and_the_same_command_goes_on_from_it(tmp_path: Path) -> None:
    kept = {**SMALL, "checkpoint__dir": str(tmp_path / "checkpoints")}
    with Job(tmp_path, ENDLESS, **kept) as job:
        job.until(lambda: job.step() >= 10, "step 10")
        job.process.send_signal(signal.SIGINT)
        stopped = job.end(130)
        assert aborted(job.rows("events.jsonl")) == [], "a ring broke, or a step was repeated"
        assert {e["kind"] for e in job.events("ReplicaExited")} <= {"done", "left"}
        assert run_by(str(job.run)) == []
        (written,) = job.events("CheckpointWritten")
        assert written["step"] == stopped["steps"] == job.step()
        assert (stopped["failures"], stopped.get("lost")) == ([], None)
        said = job.log.read_text()
        assert "stopping: " in said
        assert f"{tmp_path / 'checkpoints'}: the same command" in said
    steps = stopped["steps"] + 20
    with Job(tmp_path, steps, **kept) as job:
        job.ends_well(steps)
        assert [r["step"] for r in job.rows("metrics.jsonl")] == list(range(stopped["steps"] + 1, steps + 1))


# A real job is scaled up and down while it trains: no ring breaks, no batch is trained twice or left out.


ELASTIC_STEPS, STEP_S = 200, 0.15  # they last until all has been scaled; then they take no time
ELASTIC = {
    "replicas": 2,
    "max_replicas": 3,
    "ranks_per_replica": 1,
    "lr__intervention": "linear",
    "state__snapshot": "on_demand",
}


def all_train(job: Job, *replicas: int) -> None:
    job.until(lambda: job.contributing() == set(replicas), f"replicas {replicas} contribute")
    job.more(10)


def test_two_three_one_two(tmp_path: Path) -> None:
    write_slow_script(script := tmp_path / "slow.py", tmp_path / "hurry", STEP_S)
    with Job(tmp_path, ELASTIC_STEPS, entry=str(script), **ELASTIC) as job:
        all_train(job, 0, 1)
        order(job, "scale", replicas=3)
        all_train(job, 0, 1, 2)
        order(job, "scale", replicas=1)
        all_train(job, 0)
        order(job, "scale", replicas=2)
        all_train(job, 0, 1)
        job.hurry()
        summary = job.end()
    ends = summary["replicas"]
    assert ends["0"]["digest"] == ends["1"]["digest"] != ends["2"]["digest"] == ""
    assert (summary["batches"]["duplicated"], summary["batches"]["skipped"]) == (0, 0)
    assert [summary["failures"], summary.get("lost")] == [[], None]
    assert aborted(job.rows("events.jsonl")) == []
    assert [e["replicas"] for e in job.events("OperatorOrdered", order="scale")] == [3, 1, 2]
    rows = job.rows("replicas/0/commits.jsonl")
    assert all(r["lr_scale"] == pytest.approx(len(r["contributors"]) / r["total"]) for r in rows)
    sizes = [size for size, _ in groupby((len(r["contributors"]), r["total"]) for r in rows)]
    in_order = iter(sizes)
    assert all(size in in_order for size in [(2, 2), (3, 3), (1, 1), (2, 2)]), sizes
    assert set(sizes) <= {(2, 2), (2, 3), (3, 3), (1, 1), (1, 2)}
    assert job.replayed()["equal"]


# An operator drains, undrains and evicts a replica of a real job, and orders a checkpoint, over HTTP.


DRAIN_STEPS = 400
SMALLEST = {"ranks_per_replica": 1, "checkpoint__every": 0}


def row(job: Job, replica: int) -> dict[str, Any]:
    return next(dict(r) for r in job.ask("status")["replicas"] if r["replica"] == replica)


def order(job: Job, action: admin.Action, replica: int | None = None, **more: Any) -> str:
    return admin.order(RunDir(job.run), action, replica, "a test", **more)


def only_these_started_again(job: Job, *survivors: int) -> None:
    """No step was repeated, and each survivor fed each of its steps once."""
    assert aborted(job.rows("events.jsonl")) == []
    for replica in survivors:
        steps = [fed["step"] for fed in job.rows(f"replicas/{replica}/fed.jsonl")]
        assert len(steps) == len(set(steps))


@pytest.mark.proof
def test_drain_undrain_checkpoint_and_evict(tmp_path: Path) -> None:
    with Job(tmp_path, DRAIN_STEPS, **SMALLEST) as job:
        job.until(lambda: job.step() >= 20, "step 20")
        # Drain: it leaves without a step repeated, and is not started again.
        order(job, "drain", 1)
        job.until(lambda: job.pid(1, 0) is None, "the end of replica 1")
        job.more(30)
        assert row(job, 1)["state"] == "drained"
        assert job.contributing() == {0, 2}
        assert "already" in order(job, "drain", 1)
        only_these_started_again(job, 0, 2)
        (left,) = job.events("ReplicaExited", replica=1)
        assert left["kind"] == "left"
        assert [(e["code"], e["final"]) for e in job.events("Ended", replica=1)] == [(0, False)]
        # The order outlives the lighthouse.
        for process, line in running(job.process.pid).items():
            if line[1:3] == ["-m", "lighthouse"]:
                process.kill()
        job.until(lambda: job.events("LighthouseExited", over=True), "another lighthouse")
        job.more(20)
        assert row(job, 1)["state"] == "drained"
        assert job.pid(1, 0) is None
        # A checkpoint, although none is ever due.
        order(job, "checkpoint")
        job.until(lambda: job.events("CheckpointWritten"), "a checkpoint")
        (started,) = job.events("CheckpointStarted")
        ordered = job.events("OperatorOrdered", order="checkpoint")[0]
        assert ordered["source"] == "admin"
        assert (ordered["address"], ordered["reason"]) == ("127.0.0.1", "a test")
        (path,) = catalog.published(job.run / "checkpoints")
        assert (
            catalog.verify(path, secret.current(job.run / "checkpoint_key").encode()).manifest.state.step
            == started["step"]
        )
        # Undrain.
        order(job, "undrain", 1)
        job.until(lambda: 1 in job.contributing(), "replica 1 contributes again")
        assert job.events("RestartScheduled") == []
        # Evict.
        assert "kill 0-" in order(job, "evict", 0)
        job.until(lambda: job.events("ReplicaExited", replica=0, kind="evicted"), "the eviction")
        job.until(lambda: 0 in job.contributing() and len(job.contributing()) == 3, "all three contribute again")
        summary = job.ends_well(DRAIN_STEPS, 300)
    assert [summary["replicas"][str(r)]["incarnations"] for r in range(3)] == [2, 2, 1]
    assert [failure["kind"] for failure in summary["failures"]] == ["evicted"]


@pytest.mark.proof
def test_what_cannot_be_ordered_is_said_and_who_is_drained_at_the_end_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.delenv(admin.ADMIN_VARIABLE, raising=False)
    with Job(tmp_path, 80, **SMALLEST) as job:
        job.until(lambda: job.step() >= 3, "step 3")
        with pytest.raises(admin.NotDone, match="there is no replica 7") as refused:
            order(job, "drain", 7)
        assert refused.value.exit_code == EXIT_CONFIG
        elsewhere = RunDir(tmp_path / "elsewhere")  # what another machine has; the lighthouse reads its own files
        elsewhere.path.mkdir()
        for name in ("config.yaml", "lighthouse.json", "token"):
            shutil.copy(job.run / name, elsewhere.path / name)
        shutil.copy(job.run / "token", elsewhere.admin_token)
        with pytest.raises(ConfigError, match="the admin's token of this job"):
            admin.order(elsewhere, "checkpoint")
        elsewhere.admin_token.unlink()
        with pytest.raises(ConfigError, match=admin.ADMIN_VARIABLE):
            admin.order(elsewhere, "checkpoint")
        monkeypatch.setenv(admin.ADMIN_VARIABLE, (job.run / "admin_token").read_text().strip())
        assert "one replica writes" in admin.order(elsewhere, "checkpoint")
        job.until(lambda: job.step() >= 20, "step 20")
        order(job, "drain", 2)
        summary = job.end()
    with pytest.raises(LighthouseUnreachable):
        order(job, "checkpoint")
    ends = [summary["replicas"][str(r)]["digest"] for r in range(3)]
    assert ends[0] == ends[1] != ends[2] == ""
    assert not summary.get("lost")
    assert not summary["failures"]
    only_these_started_again(job, 0, 1)
    assert job.replayed()["equal"]
