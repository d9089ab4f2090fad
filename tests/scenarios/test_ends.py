"""Ends of a job: signals, lost output, and scripts that end training early. Each keeps the last state."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from ft_hsdp.launch.run.directory import RunDir
from tests.support.scenarios.scenario_job import DEADLINE_S, SMALL, Job, own_disk
from tests.support.torchrun_job import TorchrunJob
from tests.support.warm import COLD

SCRIPT = """
import sys, time
import torch
from torch import nn
import ft_hsdp

class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        return torch.full((4,), index / 100_000)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, points):
        return self.outer(torch.tanh(self.inner(points))).square().mean()

job = ft_hsdp.join()
torch.manual_seed(0)
model = job.shard(Model())
optim = job.optimizer(torch.optim.AdamW(model.parameters()))
workers, end = int(sys.argv[1]), sys.argv[2]
loader = job.loader(Points(), batch_size=4, num_workers=workers)
job.on_commit(lambda step: sys.exit(0) if end == "commit" and step.step == 5 else None)
for epoch in range(99 if end == "epochs" else 1):
    for number, batch in enumerate(job.batches(loader), 1):
        if end in ("stop", "epochs") and job.step == 4 and (job.replica, job.rank) == (0, 0):
            job.stop()
        if end == "leave" and job.step == 4:
            job.leave()
        model(batch).backward()
        time.sleep(0.02)
        optim.step()
        if end == "epochs" and number == 3:  # at a commit, or within a step
            break
        if end == "break" and job.step == 5 or end == "alone" and job.step == 5 and job.replica == 0:
            break
        if end == "exit" and job.step == 5:
            sys.exit(0)
"""
NOTICES = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
ENDLESS = 100_000


def settings(folder: Path, workers: int, end: str = "") -> dict[str, Any]:
    """Two replicas of one rank that run `SCRIPT`, with a folder for checkpoints."""
    (folder / "mine.py").write_text(SCRIPT)
    kept = {"checkpoint__dir": str(folder / "kept"), "entry": "mine.py", "args": [str(workers), end]}
    return {**kept, "replicas": 2, "ranks_per_replica": 1, "train__micro_batch": 4}


def saved(folder: Path) -> list[int]:
    """The steps of which there is a checkpoint."""
    return sorted(int(each.name.split("-")[1]) for each in (folder / "kept").glob("step-*"))


def below(pid: int) -> list[psutil.Process]:
    """All processes that a process has started, and that they have started."""
    return psutil.Process(pid).children(recursive=True)


def send(processes: list[psutil.Process], *numbers: int) -> None:
    """Send signals to processes, of which some may end meanwhile."""
    for process in processes:
        for number in numbers:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def test_a_closed_terminal_and_lost_output_cost_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads its output, then it has no reader; notices come to all its processes, and then SIGHUP."""
    monkeypatch.setenv(COLD, "1")  # output as an interpreter makes it
    os.mkfifo(tmp_path / "up.log")
    reader = os.open(tmp_path / "up.log", os.O_RDONLY | os.O_NONBLOCK)
    room = fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
    with Job(tmp_path, ENDLESS, **settings(tmp_path, 1)) as job:
        job.log = tmp_path / "mine.py"  # who reads a pipe waits for its writers
        job.until(lambda: len(job.rows("metrics.jsonl")) > room // 60, "more steps than there is room for lines")
        os.close(reader)
        everything = [psutil.Process(job.process.pid), *below(job.process.pid)]
        send(everything, *NOTICES)
        job.more(3)
        send(everything, signal.SIGHUP)
        summary = job.end(128 + signal.SIGHUP)
        assert (saved(tmp_path), summary["failures"]) == ([summary["steps"]], [])


@pytest.mark.parametrize("end", ["break", "epochs"])
def test_loops_that_break_on_all_replicas_end_the_job_well_or_go_on(tmp_path: Path, end: str) -> None:
    ends_well(tmp_path, end)


@pytest.mark.soak
@pytest.mark.parametrize("end", ["stop", "leave", "exit", "commit"])
def test_scripts_end_the_job_well(tmp_path: Path, end: str) -> None:
    ends_well(tmp_path, end)


def ends_well(folder: Path, end: str) -> None:
    """A script ends training at step 5: once, with the same state on all replicas and on disk."""
    with Job(folder, ENDLESS, **settings(folder, 0, end), train__accumulate=2) as job:
        summary = job.end()
        batches = summary["batches"]
        assert (batches["trained"], batches["duplicated"], batches["skipped"]) == (20, 0, 0)
        states = {(r["step"], r["digest"]) for r in summary["replicas"].values()}
        assert (len(states), states.pop()[0], summary["steps"]) == (1, 5, 5)
        assert {r["incarnations"] for r in summary["replicas"].values()} == {1}
        assert (summary["failures"], saved(folder)) == ([], [5])


@pytest.mark.parametrize("steps", [ENDLESS, pytest.param(40, marks=pytest.mark.soak)])
def test_an_announced_checkpoint_that_was_not_written_is_said_last_with_a_code_of_its_own(tmp_path, steps) -> None:
    """At a signal, and at the end of training."""
    with Job(tmp_path, steps, **settings(tmp_path, 0)) as job:
        job.until(lambda: job.step() >= 3, "step 3")
        (tmp_path / "kept").rename(tmp_path / "gone")
        (tmp_path / "kept").write_text("no folder")
        if steps == ENDLESS:
            job.process.send_signal(signal.SIGTERM)
        step = job.end(75)["steps"]
        said = job.log.read_text().splitlines()[-1]
        assert f"of step {step} was not written" in said


def test_a_script_that_stops_the_job_ends_it_under_torchrun_too(tmp_path: Path) -> None:
    with TorchrunJob(tmp_path, **settings(tmp_path, 0, "stop"), train__steps=ENDLESS) as job:
        finals = job.finals([job.torchrun(replica, 1) for replica in range(2)])
        assert ({final["step"] for final in finals}, saved(tmp_path)) == ({5}, [5])
        job.until(
            lambda: "JobFinished" in RunDir(job.run).lighthouse_events.read_text(), "the lighthouse knows it"
        )


@pytest.mark.soak
def test_a_replica_that_breaks_its_loop_alone_is_done_and_the_others_go_on(tmp_path: Path) -> None:
    with Job(tmp_path, 30, **settings(tmp_path, 0, "alone")) as job:
        summary = job.end()
        assert [summary["replicas"][r]["step"] for r in "01"] == [5, 30]
        assert {r["incarnations"] for r in summary["replicas"].values()} == {1}


HOW = ("TERM", "INT", "HUP", "all TERM", "all INT", "all HUP")


@pytest.mark.soak
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("launcher", ["up", "replica", "torchrun"])
def test_no_step_is_lost_however_a_job_is_told_to_end(tmp_path, launcher, how, workers) -> None:
    """A signal comes to its supervisors, or to all processes at once, as a control group's stop does it."""
    same = {**SMALL, "data.path": "stdlib", "data.max_bytes": 1048576}  # as the job that goes on from it
    chosen = {**same, **settings(tmp_path, workers), "train__steps": ENDLESS}
    with contextlib.ExitStack() as stack:
        if launcher == "up":
            job = stack.enter_context(Job(tmp_path, ENDLESS, **settings(tmp_path, workers)))
            job.until(lambda: job.step() >= 5, "step 5")
            started, run = [job.process], job.run
        else:
            others = stack.enter_context(TorchrunJob(tmp_path, **chosen))
            started = [others.replica(r) if launcher == "replica" else others.torchrun(r, 1) for r in range(2)]
            others.until(lambda: min(others.step(0), others.step(1)) >= 5, "step 5")
            run = others.run
        processes = [psutil.Process(each.pid) for each in started]
        every = [p for each in processes for p in (each, *each.children(recursive=True))]
        send(every if how.startswith("all") else processes, signal.Signals[f"SIG{how.split()[-1]}"])
        codes = [each.wait(DEADLINE_S) for each in started]
        assert 0 not in codes
        logs = [file.read_text() for file in run.glob("replicas/*/commits.jsonl")]
        rows = [json.loads(line) for log in logs for line in log.splitlines()]
    check_saved(tmp_path, max(row["step"] for row in rows))


def check_saved(folder: Path, last: int) -> None:
    """The newest checkpoint is of the last step that was committed, and another job goes on from it."""
    assert saved(folder)[-1:] == [last]
    with Job(folder, last + 2, **settings(folder, 0), job__name="next") as job:
        job.run = folder / "runs" / "next"
        job.end()
        assert job.rows("metrics.jsonl")[0]["step"] == last + 1


# The disk of the run directory, of the lighthouse's store and of the checkpoints hangs: no step waits for it.


MOUNT = 'truncate -s 200M "$1.img" && mkfs.ext4 -q "$1.img" && mount -o loop "$1.img" "$1"'
HANG_S = 13.0  # longer than a silent lighthouse or a silent replica is waited for


@contextmanager
def frozen(holder: int, folder: Path) -> Iterator[None]:
    """No process gets on that writes there, or opens a file to write."""
    within = ["nsenter", "--mount", "--target", str(holder), "--", "fsfreeze"]
    subprocess.run([*within, "--freeze", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run([*within, "--unfreeze", str(folder)], check=True)


@pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/loop-control").exists(), reason="mounts a file system of its own"
)
def test_no_step_waits_and_nobody_is_suspected(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    kept = {"checkpoint.dir": str(runs / "kept"), "checkpoint.every": 10}
    with own_disk(runs, MOUNT) as holder, Job(tmp_path, 10_000, holder, ranks_per_replica=1, **kept) as job:
        job.until(lambda: job.step() >= 15, "step 15")
        began = time.time()
        with frozen(holder, runs):
            time.sleep(HANG_S)
        ended = time.time()
        job.more(1)
        job.process.send_signal(signal.SIGTERM)
        summary = job.end(143)
        # Each leaves at the commit after the signal has reached it, which may be one step apart.
        assert {each["step"] for each in summary["replicas"].values()} <= {summary["steps"], summary["steps"] - 1}
        assert (summary["batches"]["duplicated"], summary["batches"]["skipped"]) == (0, 0)
        exits = [e for e in job.events("ReplicaExited") if e["kind"] not in ("done", "left")]
        assert not exits, exits
        assert not job.events("LighthouseExited"), "the lighthouse was restarted"
        assert not job.events("RingBroken"), "somebody was suspected"
        quarter = (ended - began) / 4
        times = [row["t"] for row in job.rows("metrics.jsonl") if "step_s" in row]
        parts = {int((t - began) // quarter) for t in times if began < t < ended}
        assert parts >= {1, 2, 3}, "steps waited for the disk"
