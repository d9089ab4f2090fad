"""`launcher.py replay` of a run whose ranks ran the user's `entry`: the ranks of one replica run it once more.

A replica may have had fewer ranks for a while (`memory.shrink_to`). FSDP2 cuts the model for the ranks that there
are, and its sums inside a replica depend on their number. So the run is divided into segments, in each of which it
had ranks of one number, and as many ranks repeat the segment. They pass the state on as a checkpoint.

`python -m ft_hsdp.launch.run.replay_entry RUN FOLDER FIRST LAST` is one of them, which repeats the steps from
FIRST to LAST; `train.replay_job` is what it does.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ft_hsdp import secret
from ft_hsdp.config import Config, load
from ft_hsdp.errors import ConfigError
from ft_hsdp.launch.backend import entry
from ft_hsdp.launch.backend.processes import environment, free_port, last_line, tied
from ft_hsdp.launch.run.directory import Row, RunDir, read_json
from ft_hsdp.launch.run.recorder import commits_of
from ft_hsdp.secret import TOKEN_VARIABLE
from ft_hsdp.train.replay_job import Recorded, ReplayOutcome

LOOK_S = 0.05  # between two looks at the ranks


@dataclass(frozen=True, slots=True)
class ReplaySegment:
    """Recorded steps that follow each other, and that ranks of one number have trained."""

    first: int  # step
    last: int  # step
    width: int  # ranks


def segments(rows: Sequence[Row], ranks: int) -> list[ReplaySegment]:
    """Divide recorded steps by the number of ranks that have trained them, into as few segments as possible.

    Args:
        rows: Canonical commits that follow each other; all members of a step have ranks of one number.
        ranks: Of a replica that has all of them.
    """
    found: list[ReplaySegment] = []
    for row in rows:
        width = max((c.get("width", 0) for c in row["contributions"]), default=0) or ranks
        if found and found[-1].width == width:
            found[-1] = ReplaySegment(found[-1].first, row["step"], width)
        else:
            found.append(ReplaySegment(row["step"], row["step"], width))
    return found


def repeat(run: RunDir, config: Config, rows: Sequence[Row]) -> ReplayOutcome:
    """Run the entry of a finished run once more, on its recorded steps. Blocks for as long as that takes.

    Args:
        run: The run.
        config: Its configuration.
        rows: Its canonical commits, from the first step on.

    Returns:
        What was found.

    Raises:
        ConfigError: The entry failed.
    """
    with tempfile.TemporaryDirectory(prefix="ft_hsdp-replay-") as name:
        folder, steps = Path(name), 0
        secret.write_private(folder / secret.RUN_KEY, secrets.token_hex(16))  # signs the states that are passed on
        for segment in segments(rows, config.ranks_per_replica):
            found = _repeat(run, folder, segment)
            steps += found.steps
            if found.differs_at is not None:
                break
    return ReplayOutcome(steps, found.digest, found.differs_at)


def _repeat(run: RunDir, folder: Path, segment: ReplaySegment) -> ReplayOutcome:
    """Repeat one segment; return what was found.

    Raises:
        ConfigError: The entry failed.
    """
    shared = {
        **environment(),
        TOKEN_VARIABLE: secrets.token_hex(16),
        "WORLD_SIZE": str(segment.width),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    steps = str(segment.first), str(segment.last)
    ranks, logs = [], []
    try:
        for rank in range(segment.width):
            logs.append(folder / f"rank{rank}.log")
            with logs[-1].open("wb") as log:
                command = tied(__name__, str(run.path), str(folder), *steps)
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                ranks.append(subprocess.Popen(command, env={**shared, **own}, stdout=log, stderr=log))
        failed = _first_failure(ranks)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    if failed is not None:
        allowed = f"a run whose entry can be repeated (rank {failed}: {last_line(logs[failed])})"
        raise ConfigError("RUN", run.name, allowed)
    found = read_json(_outcome(folder, segment.last))
    if not found:
        raise ConfigError("RUN", run.name, "a run whose entry trains until job.batches ends")
    return ReplayOutcome(**found)


def _outcome(folder: Path, last: int) -> Path:
    """Return the file in which the ranks that repeat up to step ``last`` write what they found."""
    return folder / f"outcome-{last}.json"


def _first_failure(ranks: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Wait until all ranks have ended, or one has failed; return that one."""
    while True:
        codes = [process.poll() for process in ranks]
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        if failed is not None or all(code == 0 for code in codes):
            return failed
        time.sleep(LOOK_S)


def main(run: RunDir, folder: Path, first: int, last: int) -> int:
    """Run one rank; return its exit code."""
    rows = commits_of(run)
    mine = tuple(row for row in rows if first <= row["step"] <= last)
    loads = folder if first > rows[0]["step"] else None
    saves = folder if last < rows[-1]["step"] else None
    return entry.main(load(run.config), 0, run.path, Recorded(mine, _outcome(folder, last), loads, saves))


if __name__ == "__main__":
    os.environ.pop("TORCHELASTIC_RESTART_COUNT", None)
    ended = main(RunDir(Path(sys.argv[1])), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    sys.stdout.flush()
    sys.stderr.flush()
    # As a rank of a run ends. The end of the interpreter aborts the process if a thread is inside torch then.
    os._exit(ended)
