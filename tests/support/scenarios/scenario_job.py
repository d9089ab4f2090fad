"""A real job under test: `launcher.py up` in a process of its own, with real ranks, sockets and signals."""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from ft_hsdp.event_table import tell
from ft_hsdp.launch.injection import Inflicted, inflict, parse_options
from ft_hsdp.launch.run.directory import RunDir
from ft_hsdp.launch.run.verify import verify
from tests.support import warm
from tests.support.lighthouse.signed import BlockingProof
from tests.support.started_job import MODEL, ROOT, StartedJob, config_of_text, overrides

SMALL = {
    "replicas": 3,
    "ranks_per_replica": 2,
    **MODEL,
    "lr.schedule": "cosine",
    "lr.warmup": 5,
    "lr.intervention": "sqrt",
    "optim.clip": 0.5,
}
# Lower precision, activations that are made again, two batches a step, batches dealt anew at each step.
HARD = {
    "train__precision": "bfloat16",
    "train__recompute": True,
    "train__accumulate": 2,
    "data__assignment": "global",
}
DEADLINE_S = 240.0


@contextmanager
def own_disk(folder: Path, mount: str) -> Iterator[int]:
    """A file system that ``mount`` mounts at $1, for a process and its children alone: the pid of that process."""
    folder.mkdir()
    script = f"{mount} && echo ready && exec sleep 600"
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "ready\n"
            yield holder.pid
        finally:
            holder.kill()


class Job(StartedJob):
    """A running job; a context that leaves no process behind.

    holder: the pid of a process in whose namespaces it runs, and in which its run directory is looked for.
    """

    def __init__(self, folder: Path, steps: int, holder: int | None = None, /, **dotted: object) -> None:
        settings = {**SMALL, "job.name": "job", "job.runs_dir": str(folder / "runs"), "train.steps": steps}
        settings |= {key.replace("__", "."): value for key, value in dotted.items()}
        seen = folder if holder is None else Path(f"/proc/{holder}/root{folder}")
        command = [sys.executable, str(ROOT / "launcher.py"), "up", config_of_text(folder), *overrides(settings)]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))  # for `preload`
        env, run = {**os.environ, "PYTHONPATH": path}, seen / "runs" / "job"
        super().__init__(command, folder, run, folder / "up.log", env, holder)

    # What can be seen from outside.

    def pid(self, replica: int, rank: int) -> int | None:
        running = (r["pid"] for r in self.ranks(replica) if r["rank"] == rank and r["state"] == "running")
        return next(running, None)

    def stopped(self, replica: int, rank: int) -> bool:
        """Return whether a rank is stopped, also by a failpoint."""
        pid = self.pid(replica, rank)
        with contextlib.suppress(psutil.NoSuchProcess):
            return pid is not None and psutil.Process(pid).status() == psutil.STATUS_STOPPED
        return False

    def agent(self, replica: int) -> int:
        """The pid of the newest state agent of a replica."""
        (agent,) = self.agents(replica).values()
        return int(agent["pid"])

    def agents(self, replica: int) -> dict[str, dict[str, Any]]:
        """Pid and address of the newest state agent on each host of a replica."""
        return agents_of(self.run, replica)

    def lighthouse(self) -> dict[str, Any]:
        """What its file says."""
        said: dict[str, Any] = json.loads((self.run / "lighthouse.json").read_text())
        return said

    def ask(self, path: str) -> dict[str, Any]:
        """What the lighthouse answers to a GET."""
        auth = BlockingProof((self.run / "token").read_text().strip())
        answer = httpx.get(f"{self.lighthouse()['url']}/v1/{path}", auth=auth, timeout=5, trust_env=False)
        return dict(answer.raise_for_status().json())

    def overview(self) -> dict[str, Any]:
        """What the lighthouse shows; no replicas while it does not answer."""
        try:
            return self.ask("overview?points=2")
        except (OSError, httpx.HTTPError):
            return {"replicas": []}

    def progress(self) -> dict[tuple[int, int], int]:
        """How far the trainer of each rank is that the lighthouse has heard, by (replica, rank)."""
        replicas = self.overview()["replicas"]
        return {(r["replica"], rank["rank"]): rank["progress"] for r in replicas for rank in r["ranks"]}

    def journal(self, kind: str) -> list[dict[str, Any]]:
        """The rows of one kind in the lighthouse's journal."""
        with sqlite3.connect(self.run / "lighthouse" / "journal.sqlite") as db:
            rows = db.execute("SELECT body FROM rows WHERE kind = ? ORDER BY seq", (kind,)).fetchall()
        db.close()
        return [json.loads(body) for (body,) in rows]

    # What can be done from outside.

    def hurry(self) -> None:
        """Let a script that calls `slow_script.pause` go as fast as it can; its replay, too."""
        for folder in self.run.parents[:2]:
            (folder / "hurry").touch()

    def signal(self, replica: int, rank: int, number: signal.Signals) -> int:
        """Send a signal to a live rank; its pid."""
        self.until(lambda: self.pid(replica, rank) is not None, f"replica {replica} rank {rank} runs")
        pid = self.pid(replica, rank)
        assert pid is not None
        os.kill(pid, number)
        return pid

    def lose_host(self, replica: int, host: str) -> Inflicted:
        """Take a host with all its processes from a replica; the host, which can be lifted."""
        return self.injure("host", replica, host=host)

    def injure(self, kind: str, replica: int, **facts: object) -> Inflicted:
        return inflict(RunDir(self.run), parse_options(kind=kind, replica=replica, **facts))

    def end(self, code: int = 0, deadline_s: float | None = None) -> dict[str, Any]:
        """Wait for the end of the job; its summary. What it has logged is allowed, and told in plain words."""
        summary = super().end(code, deadline_s)
        found = verify(RunDir(self.run))
        assert not found.breaches, "\n".join(found.breaches)
        bare = [e for e in self.rows("events.jsonl") if tell(e, reason=False).startswith(e["event"])]
        assert not bare, f"no sentence for {bare}"
        return summary

    def ends_well(self, steps: int, deadline_s: float | None = None) -> dict[str, Any]:
        """Wait for an end as if nothing had happened: a replay has all steps and the same bits. The summary."""
        summary = self.ends_at(steps, deadline_s)
        self.replays(steps)
        return summary

    def replays(self, steps: int) -> str:
        """Train it again, up to a last step: with the same bits. Their digest."""
        first = self.rows("metrics.jsonl")[0]["step"]
        verdict = self.replayed()
        assert (verdict["equal"], verdict["steps"]) == (True, steps + 1 - first), verdict
        return str(verdict["digest"])

    def replay_command(self) -> list[str]:
        """What trains the recorded run again."""
        command = [sys.executable, str(ROOT / "launcher.py"), "replay", self.run.name, "--json"]
        return [*command, "--runs-dir", str(self.run.parent)]

    def replayed(self) -> dict[str, Any]:
        """Train the recorded run again, in forks of a process that has imported torch; the verdict."""
        log = self.run.parent / "replay.log"
        log.write_bytes(b"")
        warm.start(self.replay_command(), self.run.parent, log).wait(DEADLINE_S)
        text = log.read_text()
        verdict: dict[str, Any] = json.loads(text[text.index("{") :])
        return verdict


def agents_of(run: Path, replica: int) -> dict[str, dict[str, Any]]:
    """Pid and address of the newest state agent on each host of a replica."""
    found = {}
    for log in (run / "replicas" / str(replica)).glob("agent-*.log"):
        ready = [line for line in log.read_text().splitlines() if line.startswith("{")]
        if ready:
            found[log.stem.removeprefix("agent-")] = dict(json.loads(ready[-1]))
    return found


def everything_is_told(job: Job, died: Collection[str] = ()) -> None:
    """All events and commits of the run's files are in the lighthouse's journal, once.

    died: incarnations that were killed while there was no lighthouse. What they had not told yet went with them;
    what they had told, but not written yet, too: a disk that is late holds nobody up.
    """
    rows, journal = job.rows("events.jsonl"), job.journal("event")
    written, told = (Counter((e["event"], e["t"]) for e in each) for each in (rows, journal))
    gone = {(e["event"], e["t"]) for e in [*rows, *journal] if e.get("incarnation") in died}
    assert set(written - told) <= gone, "events are missing"
    assert not (odd := {n for n, t in set(told - written) - gone} - {"ReplicaStalled"}), odd
    logs = [job.rows(f"replicas/{n}/commits.jsonl") for n in range(3)]
    commits = [(row["step"], row["lineage"]) for row in job.journal("commit")]
    assert set(commits) == {(row["step"], row["lineage"]) for log in logs for row in log}
    assert len(commits) == len(set(commits))
