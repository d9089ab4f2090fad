"""An operator drains, undrains and evicts a replica of a real job, and orders a checkpoint, over HTTP."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from ft_hsdp import secret
from ft_hsdp.errors import EXIT_CONFIG, ConfigError, LighthouseUnreachable
from ft_hsdp.launch import admin
from ft_hsdp.launch.run.directory import RunDir
from ft_hsdp.state.checkpoint import catalog
from tests.support.aborted import aborted
from tests.support.scenarios.scenario_job import Job, check

pytestmark = [pytest.mark.multiproc, pytest.mark.proof]

STEPS = 400
SMALL = {"ranks_per_replica": 1, "checkpoint__every": 0}


def row(job: Job, replica: int) -> dict[str, Any]:
    """What the lighthouse says of a replica."""
    url = json.loads((job.run / "lighthouse.json").read_text())["url"]
    headers = {"Authorization": f"Bearer {(job.run / 'token').read_text().strip()}"}
    found: dict[str, Any] = httpx.get(f"{url}/v1/status", headers=headers, trust_env=False).json()
    return next(r for r in found["replicas"] if r["replica"] == replica)


def order(job: Job, action: admin.Action, replica: int | None = None, **more: Any) -> str:
    return admin.order(RunDir(job.run), action, replica, "a test", **more)


def after(job: Job, steps: int) -> None:
    """Let so many more steps be committed."""
    goal = job.step() + steps
    job.until(lambda: job.step() >= goal, f"step {goal}")


def undisturbed(job: Job, *survivors: int) -> None:
    """No step was repeated, and each survivor fed each of its steps once."""
    assert aborted(job.rows("events.jsonl")) == []
    for replica in survivors:
        steps = [fed["step"] for fed in job.rows(f"replicas/{replica}/fed.jsonl")]
        assert len(steps) == len(set(steps))


def test_drain_undrain_checkpoint_and_evict(tmp_path: Path) -> None:
    with Job(tmp_path, STEPS, **SMALL) as job:
        job.until(lambda: job.step() >= 20, "step 20")
        # Drain: it leaves without a step repeated, and is not started again.
        assert (
            order(job, "drain", 1)
            == "replica 1 leaves at the next step boundary, and stays away until it is undrained"
        )
        job.until(lambda: job.pid(1, 0) is None, "the end of replica 1")
        after(job, 30)
        assert row(job, 1)["state"] == "drained"
        assert job.contributing() == {0, 2}
        assert order(job, "drain", 1) == "replica 1 is drained already"
        undisturbed(job, 0, 2)
        (left,) = job.events("ReplicaExited", replica=1)
        assert left["kind"] == "stopped"
        assert [e["event"] for e in job.events("Left", replica=1) + job.events("Finished", replica=1)] == ["Left"]
        # The order outlives the lighthouse.
        for process in psutil.Process(job.process.pid).children(recursive=True):
            if process.cmdline()[1:3] == ["-m", "lighthouse"]:
                process.kill()
        job.until(lambda: job.events("LighthouseRestarted"), "another lighthouse")
        after(job, 20)
        assert row(job, 1)["state"] == "drained"
        assert job.pid(1, 0) is None
        # A checkpoint, although none is ever due.
        order(job, "checkpoint")
        job.until(lambda: job.events("CheckpointWritten"), "a checkpoint")
        (started,) = job.events("CheckpointStarted")
        ordered = job.events("CheckpointOrdered")[0]
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
        assert "kills 0-" in order(job, "evict", 0)
        job.until(lambda: job.events("ReplicaExited", replica=0, kind="evicted"), "the eviction")
        job.until(lambda: 0 in job.contributing() and len(job.contributing()) == 3, "all three contribute again")
        summary = job.end(deadline_s=300)
    check(summary, STEPS)
    assert [summary["replicas"][str(r)]["incarnations"] for r in range(3)] == [2, 2, 1]
    assert [failure["kind"] for failure in summary["failures"]] == ["evicted"]
    assert job.replayed()["equal"]


def test_who_is_drained_at_the_end_is_not_waited_for(tmp_path: Path) -> None:
    with Job(tmp_path, 200, **SMALL) as job:
        job.until(lambda: job.step() >= 20, "step 20")
        order(job, "drain", 2)
        summary = job.end()
    ends = [summary["replicas"][str(r)]["digest"] for r in range(3)]
    assert ends[0] == ends[1] != ends[2] == ""
    assert not summary.get("lost")
    assert not summary["failures"]
    undisturbed(job, 0, 1)
    assert job.replayed()["equal"]


def test_what_the_command_line_says_when_it_cannot_be_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(admin.ADMIN_VARIABLE, raising=False)
    with Job(tmp_path, 100_000, **SMALL) as job:
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
    with pytest.raises(LighthouseUnreachable):
        order(job, "checkpoint")
