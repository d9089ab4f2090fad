"""Replicas that log as if they trained: a step every 30 ms, all on one history, until the last step."""

import os
import signal
import time
from pathlib import Path

from ft_hsdp.config import Config
from ft_hsdp.jsonl import LineWriter, replace_json
from ft_hsdp.launch.run.directory import RunDir, read_json, read_jsonl
from ft_hsdp.train.identity import IncarnationSource
from tests.support.launch.launch_rows import commit

STEP_S = 0.03


def _healthy(run: RunDir, replica: int) -> bool:
    """Whether a replica runs, and fetched the state if it was started again."""
    listed = read_json(run.processes(replica)) or {"restarts": 0, "ranks": []}
    if any(rank["state"] != "running" for rank in listed["ranks"]):
        return run.final(replica).exists()
    return listed["restarts"] == 0 or bool(read_jsonl(run.replica_events(replica)))


def main(config: Config, calling: IncarnationSource, path: Path) -> int:
    run = RunDir(path)
    call = calling.wait()
    replica, restart, ranks = call.replica, call.restarts, config.ranks_per_replica
    if (path / "raise").exists():
        raise KeyError(f"tokens of {os.getpid()}")
    if (path / "unplugged").exists():
        raise FileNotFoundError(2, "No such file", "/data/part")
    if (path / "hang").exists():
        time.sleep(60)
    if (path / "deaf").exists():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (path / f"deaf-{replica}-{os.environ['RANK']}").touch()
        time.sleep(60)
    if os.environ["RANK"] != "0":
        while not run.final(replica).exists():
            time.sleep(0.005)
        return 0
    if restart and (path / "crash-loop").exists():
        return 75
    commits, fed, events = (
        LineWriter(file) for file in (run.commits(replica), run.fed(replica), run.replica_events(replica))
    )
    step = 0  # also if it starts later than the others: its batches count
    if restart:
        step = max((row["step"] for n in range(config.replicas) for row in read_jsonl(run.commits(n))), default=0)
        who = {"replica": replica, "incarnation": f"{replica}-{call.run_id}-{restart}"}
        about = {**who, "seconds": 0.1, "bytes": 10, "donor": 0, "reason": "test"}
        events.write({"t": time.time(), "event": "FetchCompleted", "source": "replica", **about})
    deadline = time.monotonic() + 30
    while step < config.train.steps:
        while step == config.train.steps - 2 and (path / "hold").exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        step += 1
        fed.write(
            {
                "step": step,
                "shard": replica,
                "index": (step - 1) * ranks,
                "units": ranks,
                "t": time.time(),
                "incarnation": "x",
            }
        )
        time.sleep(STEP_S)
        # No test disturbs replica 0. Its batch counts, even while its process list is being written.
        healthy = [0, *(n for n in range(1, config.replicas) if _healthy(run, n))]
        row = commit(step, ranks=ranks, who=healthy, t=time.time(), step_s=STEP_S)
        row["contributions"] = row["contributions"][:1]
        commits.write(row)
    final = {"step": step, "commit_epoch": 1, "lineage": f"L{step}", "digest": "d", "incarnation": str(call)}
    final |= {"of_job": True}
    replace_json(run.final(replica), final)
    return 0
