"""A whole job of stand-ins: the real supervision of processes that only pretend to train."""

import asyncio
import io
import json
import os
import signal
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ft_hsdp.config import Config, parse
from ft_hsdp.launch.job import JobRun, start_run
from ft_hsdp.launch.lighthouse_process import LighthouseFailed, check_port
from ft_hsdp.launch.local import LocalReplicas, local_hosts, up
from ft_hsdp.launch.run.directory import read_json, read_jsonl
from ft_hsdp.launch.run.status import status
from ft_hsdp.launch.run.summary import Summary
from ft_hsdp.launch.run.terminal import Terminal
from tests.support.refused import refused
from tests.support.running import run_by
from tests.support.waiting import async_until

KILL = {"at_step": 8, "replicas": [1], "rank": 1}


class Fake:
    """A job of stand-ins in its run directory, with a real lighthouse."""

    lighthouse = "lighthouse"

    def __init__(self, tmp_path: Path, **document: Any) -> None:
        self.config: Config = parse(
            {"job": {"name": "fake", "runs_dir": str(tmp_path)}, "train": {"steps": 40}, **document}
        )
        self.run = start_run(self.config)
        self.out = io.StringIO()

    def mark(self, name: str) -> Path:
        """Leave a file for the stand-ins."""
        (self.run.path / name).touch()
        return self.run.path / name

    async def held_until(self, ready: Callable[[], object], what: str) -> tuple[int, Summary | None]:
        """Let it run, and end only once something has happened."""
        hold = self.mark("hold")
        going = asyncio.create_task(self.go())
        await async_until(ready, what)
        hold.unlink()
        return await going

    async def go(self) -> tuple[int, Summary | None]:
        with Terminal(self.config, self.out) as terminal:
            entry = "tests.support.launch.standin_trainer:main"
            replicas = partial(LocalReplicas, self.config, self.run, entry=entry, preload=())
            return await JobRun(self.config, self.run, terminal, replicas, self.lighthouse).run()

    def events(self, name: str) -> list[dict[str, Any]]:
        return [e for e in read_jsonl(self.run.events) if e["event"] == name]

    def reached(self, t: float) -> int:
        """The newest step that any replica had committed at the time ``t``: what failures go by."""
        rows = [row for n in range(self.config.replicas) for row in read_jsonl(self.run.commits(n))]
        return max((int(row["step"]) for row in rows if row["t"] <= t), default=0)

    def nothing_runs(self) -> bool:
        return not run_by(str(self.run.path))


async def test_a_job_loses_a_replica_restarts_it_and_ends_well(tmp_path: Path) -> None:
    job = Fake(tmp_path, chaos=[KILL], timeouts={"stop_s": 5})
    code, summary = await job.held_until(lambda: read_jsonl(job.run.replica_events(1)), "the new replica 1")
    assert code == 0
    assert summary == read_json(job.run.summary)
    assert summary is not None
    assert summary["steps"] == 40
    (failure,) = summary["failures"]
    assert (failure["replica"], failure["rank"], failure["kind"]) == (1, 1, "SIGKILL")
    assert failure["source"] == "0"
    assert 0 <= failure["detect_s"] < 10.0
    assert failure["rejoin_s"] is not None
    assert {n: r["incarnations"] for n, r in summary["replicas"].items()} == {"0": 1, "1": 2, "2": 1}
    assert summary["batches"] == {"trained": 80, "duplicated": 0, "skipped": 0}
    assert [row["step"] for row in read_jsonl(job.run.metrics)] == list(range(1, 41))
    (injected,) = job.events("FailureInjected")
    assert 7 <= job.reached(injected["t"]) <= 38
    assert all("t" in e and e["reason"] for e in read_jsonl(job.run.events))
    assert job.nothing_runs()
    text = job.out.getvalue()
    assert "step  3/40" in text
    assert max(len(line) for line in text.splitlines() if line.startswith("step")) <= 80
    sources = {e["event"]: e["source"] for e in read_jsonl(job.run.events)}
    said = {"FailureInjected": "chaos", "ProcessExited": "supervisor", "ReplicaStarted": "lighthouse"}
    assert {**sources, **said} == sources


def test_without_per_replica_each_replica_is_a_host_unless_the_machine_is_known(monkeypatch) -> None:
    for name in ("FT_HSDP_HOST", "FT_HSDP_DOMAINS", "SLURM_TOPOLOGY_ADDR"):
        monkeypatch.delenv(name, raising=False)

    def named(**document: Any) -> dict[str, tuple[int, int] | None]:
        return {host.name: host.home for host in local_hosts(parse({"replicas": 2, **document}), os.environ)}

    assert named(spares=2) == {"r0h0": (0, 0), "r1h0": (1, 0)}, "nobody asked for hosts that replace them"
    hosts = {"per_replica": 2, "spare": 1}
    homes = {f"r{replica}h{place}": (replica, place) for replica in (0, 1) for place in (0, 1)}
    assert named(hosts=hosts, spares=2) == {**homes, **dict.fromkeys(["s0", "s1", "s2"])}
    monkeypatch.setenv("FT_HSDP_DOMAINS", "rack=7")
    alone = local_hosts(parse({"replicas": 2}), os.environ)
    assert [(host.path.rpartition("-")[2], host.replica) for host in alone] == [("r0", 0), ("r1", 1)]


async def test_a_host_that_is_down_leaves_its_replica_to_a_spare_one(tmp_path: Path) -> None:
    """It is away for good, and the job ends all the same. The spare host was there from the start."""
    rule = {"kind": "host", "host": "r1h0", "replicas": [1], "at_step": 8}
    job = Fake(tmp_path, chaos=[rule], hosts={"per_replica": 1, "spare": 1}, timeouts={"stop_s": 5})
    placed = await job.held_until(lambda: "'s0'" in str(read_json(job.run.processes(1))), "the spare host")
    assert placed[0] == 0
    assert [(e["before"], e["host"]) for e in job.events("HostReplaced")] == [("r1h0", "s0")]


async def test_down_steps_keep_a_replica_away(tmp_path: Path) -> None:
    chaos = [{**KILL, "down_steps": 12}, {"at_step": 9, "host": "r9h0"}]
    job = Fake(tmp_path, chaos=chaos, train={"steps": 120})
    assert (await job.go())[0] == 0
    (idle,) = [line for line in job.out.getvalue().splitlines() if line.startswith("chaos.")]
    assert idle.startswith("chaos.1 ")
    (injected,) = job.events("FailureInjected")
    started = job.events("ReplicaStarted")[-1]
    assert started["replica"] == 1
    assert job.reached(started["t"]) - job.reached(injected["t"]) >= 11


async def test_a_replica_past_its_budget_is_lost_and_the_job_is_retryable(tmp_path: Path) -> None:
    job = Fake(tmp_path, chaos=[KILL], restart={"budget": 1}, train={"steps": 120})
    job.mark("crash-loop")
    code, summary = await job.go()
    assert code == 75
    assert summary is not None
    assert summary["lost"] == [1]


@pytest.mark.parametrize(("error", "code"), [("raise", 64), ("unplugged", 75)])
async def test_an_error_that_ends_every_replica_again_ends_the_job_and_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: str, code: int
) -> None:
    """With 64 if the script is to blame; data that are away may come back."""
    job = Fake(tmp_path, replicas=2, ranks_per_replica=1, restart={"budget": 2})
    job.mark(error)
    assert (await job.go())[0] == code
    why = {
        "raise": "KeyError: 'tokens of ",
        "unplugged": "FileNotFoundError: [Errno 2] No such file: '/data/part'",
    }
    gone = [line for line in job.out.getvalue().splitlines() if "is gone" in line]
    assert why[error] in gone[0], "the first line says why"
    assert all(why[error] in event["reason"] for event in job.events("ProcessExited"))
    if code == 64:
        assert why[error] in capsys.readouterr().err
    else:
        assert any("is lost" in line and why[error] in line for line in job.out.getvalue().splitlines())
        assert {e["delay_s"] for e in job.events("RestartScheduled")} == {0.0, 1.0}, "then it waits"
    assert max(e["restarts"] for e in job.events("ReplicaStarted")) <= 2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_a_signal_stops_everything(tmp_path: Path, number: int, code: int) -> None:
    job = Fake(tmp_path)
    job.mark("hang")
    going = asyncio.create_task(job.go())
    await async_until(lambda: len(job.run.replicas()) == 3 and job.events("ReplicaStarted"), "the start")
    picture = await asyncio.to_thread(status, job.run)
    assert len(picture["replicas"]) == 3
    os.kill(os.getpid(), number)
    assert (await going)[0] == code
    assert job.nothing_runs()


async def test_a_second_signal_waits_for_nobody(tmp_path: Path) -> None:
    job = Fake(tmp_path, timeouts={"stop_s": 60.0})  # longer than this test may take
    job.mark("deaf")
    going = asyncio.create_task(job.go())
    await async_until(lambda: len(list(job.run.path.glob("deaf-*"))) == 6, "ranks that do not leave")
    os.kill(os.getpid(), signal.SIGINT)
    await async_until(lambda: "stopping: " in job.out.getvalue(), "the first word")
    os.kill(os.getpid(), signal.SIGINT)
    assert (await going)[0] == 130
    assert "stopping at once" in job.out.getvalue()
    assert job.nothing_runs()


async def test_a_lighthouse_that_does_not_start_is_one_line(tmp_path: Path) -> None:
    job = Fake(tmp_path)
    job.lighthouse = "no_lighthouse_today"
    with pytest.raises(LighthouseFailed, match="no_lighthouse_today"):
        await job.go()
    assert job.nothing_runs()


def test_bad_input_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    job = {"name": "job", "runs_dir": str(tmp_path / "runs")}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused(lambda: up(parse({"job": job, "network": {"port": port}})), rf"network.port: got {port}")
    refused(lambda: check_port(parse({"network": {"host": "203.0.113.1"}})), r"network\.host: got")
    refused(lambda: up(parse({"job": job, "data": {"path": str(tmp_path / "none")}})), r"data\.path: got")
    assert not (tmp_path / "runs" / "job").exists()


def test_the_token_is_secret_and_the_configuration_is_resolved(tmp_path: Path) -> None:
    job = Fake(tmp_path)
    assert job.run.token.stat().st_mode & 0o777 == 0o600
    assert len(bytes.fromhex(job.run.token.read_text())) == 32
    assert "seq_len: 128" in job.run.config.read_text()
    assert json.loads(job.run.supervisor.read_text())["pid"] == os.getpid()
