"""Writes metrics.jsonl and summary.json of a job whose lighthouse was started by itself.

Under `up` and `submit` the job's own process does that. `launcher.py lighthouse` starts this module beside the
lighthouse; it ends when the job has its final state, or soon after the lighthouse. It reads the logs of the
replicas that share the run's directory with the lighthouse, and if there are none, it writes nothing.

Run as `python -m ft_hsdp.launch.run.follow RUN PID`; PID is the lighthouse, and the parent of this process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

from ft_hsdp.config import load
from ft_hsdp.jsonl import open_to_append
from ft_hsdp.launch.backend.processes import environment
from ft_hsdp.launch.run.directory import Row, RunDir, open_log
from ft_hsdp.launch.run.recorder import Recorder

LOOK_S = 0.5  # between two looks at the logs
LAST_S = 1.0  # from the final state to the summary: the logs are written by threads


def start(run: RunDir) -> subprocess.Popen[bytes]:
    """Start a process that follows a run, and return it. This process is about to become the run's lighthouse."""
    folder = run.path / "lighthouse"
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "ft_hsdp.launch.run.follow", str(run.path), str(os.getpid())]
    with open_log(folder / "follow.log") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment(), start_new_session=True
        )


def follow(run: RunDir, lighthouse: int) -> None:
    """Merge the logs of a run until its job has ended, or its lighthouse has. Blocks.

    Several lighthouses may share a run's directory: one process at a time writes there.

    Args:
        lighthouse: Pid of the lighthouse, the parent of this process.
    """

    def alone() -> bool:
        return os.getppid() != lighthouse

    with open_to_append(run.path / "lighthouse" / "follow.lock") as lock:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if alone():
                return
            time.sleep(LOOK_S)
        while not run.replicas():
            if alone():
                return
            time.sleep(LOOK_S)
        for file in (run.metrics, run.summary):  # of an earlier lighthouse of this run; all is read again
            file.unlink(missing_ok=True)
        finished: list[float] = []

        def note(event: Row) -> None:
            if event["event"] == "JobFinished":
                finished.append(time.monotonic())

        recorder = Recorder(run, load(run.config), lambda _: None, note, merge_events=False)
        try:
            while not (finished and time.monotonic() - finished[0] >= LAST_S):
                ending = alone()
                while recorder.poll():
                    pass
                if ending:
                    break
                time.sleep(LOOK_S)
            if finished:
                recorder.finish()
        finally:
            recorder.close()


if __name__ == "__main__":
    follow(RunDir(Path(sys.argv[1])), int(sys.argv[2]))
