"""`launcher.py replay` of a run whose ranks ran the user's `entry`: the ranks of one replica run it once more.

A replica may have had fewer ranks for a while (`memory.shrink_to`). FSDP2 cuts the model for the ranks that there
are, and its sums inside a replica depend on their number. So the run is divided into segments, in each of which
replicas were of the same widths, and a segment is repeated by one replica of each width. They sum together
(`train.replay.lanes`), and the widest one passes the state on as a checkpoint.

`python -m ft_hsdp.launch.run.replay_entry RUN FOLDER FIRST LAST` is one of them, which repeats the steps from
FIRST to LAST; `train.replay.job` is what it does.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ft_hsdp import secret
from ft_hsdp.config import Config, load
from ft_hsdp.errors import ConfigError
from ft_hsdp.launch.backend import entry
from ft_hsdp.launch.backend.processes import environment, free_port, last_line, tied
from ft_hsdp.launch.run.directory import Row, RunDir, read_json
from ft_hsdp.launch.run.recorder import commits_of
from ft_hsdp.secret import TOKEN_VARIABLE
from ft_hsdp.train.replay.job import Recorded, ReplayOutcome

LOOK_S = 0.05  # between two looks at the ranks


@dataclass(frozen=True, slots=True)
class ReplaySegment:
    """Recorded steps that follow each other, of members of the same widths."""

    first: int  # step
    last: int  # step
    widths: tuple[int, ...]  # the different numbers of ranks, the largest first


def segments(rows: Sequence[Row], ranks: int) -> list[ReplaySegment]:
    """Divide recorded steps by the widths of their members, into as few segments as possible.

    Args:
        rows: Canonical commits that follow each other.
        ranks: Of a replica that has all of them.

    Raises:
        ConfigError: A member cannot have had so many ranks.
    """
    found: list[ReplaySegment] = []
    for row in rows:
        of_contributors = {c.get("width") or ranks for c in row["contributions"]}
        widths = tuple(sorted({*of_contributors, *row.get("ring_widths", ())}, reverse=True)) or (ranks,)
        if not 1 <= widths[-1] <= widths[0] <= ranks:
            raise ConfigError(
                "width", list(widths), f"1 to {ranks} ranks of a replica, also in step {row['step']}"
            )
        if found and found[-1].widths == widths:
            found[-1] = ReplaySegment(found[-1].first, row["step"], widths)
        else:
            found.append(ReplaySegment(row["step"], row["step"], widths))
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
        _shared(folder).mkdir()
        secret.write_private(folder / secret.RUN_KEY, secrets.token_hex(16))  # signs the states that are passed on
        for segment in segments(rows, config.ranks_per_replica):
            found = agreed(_repeat(run, folder, segment), segment)
            steps += found.steps
            if found.differs_at is not None:
                break
    return ReplayOutcome(steps, found.digest, found.differs_at)


def agreed(found: Sequence[ReplayOutcome], segment: ReplaySegment) -> ReplayOutcome:
    """Return what was found, from what the replica of each width has found, the widest first.

    They hold one state, so a step differs if they do not; if it is not known which, it counts as the last one.

    Args:
        found: Of each width of the segment.
        segment: What they have repeated.
    """
    differing = [each.differs_at for each in found if each.differs_at is not None]
    if not differing and any(each.digest != found[0].digest for each in found):
        differing = [segment.last]
    return replace(found[0], differs_at=min(differing, default=None))


def _repeat(run: RunDir, folder: Path, segment: ReplaySegment) -> list[ReplayOutcome]:
    """Repeat one segment; return what the replica of each width has found, the widest first.

    Raises:
        ConfigError: The entry failed.
    """
    shared = {**environment(), TOKEN_VARIABLE: secrets.token_hex(16), "MASTER_ADDR": "127.0.0.1"}
    command = tied(__name__, str(run.path), str(folder), str(segment.first), str(segment.last))
    ports: set[int] = set()
    while len(ports) < len(segment.widths):
        ports.add(free_port())
    processes: list[subprocess.Popen[bytes]] = []
    names: list[str] = []
    try:
        for width, port in zip(segment.widths, ports, strict=True):
            for rank in range(width):
                names.append(f"rank {rank} of {width}")
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(width)}
                env = {**shared, **place, "MASTER_PORT": str(port)}
                with (folder / names[-1]).open("wb") as log:
                    processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
        failed = _first_failure(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if failed is not None:
        allowed = f"a run whose entry can be repeated ({names[failed]}: {last_line(folder / names[failed])})"
        raise ConfigError("RUN", run.name, allowed)
    found = [read_json(_outcome(folder, segment.last, width)) for width in segment.widths]
    if not all(found):
        raise ConfigError("RUN", run.name, "a run whose entry trains until job.batches ends")
    return [ReplayOutcome(**each) for each in found]


def _outcome(folder: Path, last: int, width: int) -> Path:
    """Return the file in which the ranks of a width that repeat up to step ``last`` write what they found."""
    return folder / f"outcome-{last}-{width}.json"


def _shared(folder: Path) -> Path:
    """Return the folder of the files that ranks of different widths exchange."""
    return folder / "sums"


def _first_failure(processes: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Wait until all processes have ended, or one has failed; return the place of that one."""
    while True:
        codes = [process.poll() for process in processes]
        failed = next((place for place, code in enumerate(codes) if code), None)
        if failed is not None or all(code == 0 for code in codes):
            return failed
        time.sleep(LOOK_S)


def main(run: RunDir, folder: Path, first: int, last: int) -> int:
    """Run one rank; return its exit code."""
    config, rows = load(run.config), commits_of(run)
    mine = [row for row in rows if first <= row["step"] <= last]
    (segment,) = segments(mine, config.ranks_per_replica)
    width = int(os.environ["WORLD_SIZE"])
    recorded = Recorded(
        tuple(mine),
        segment.widths,
        _outcome(folder, last, width),
        _shared(folder),
        loads=folder if first > rows[0]["step"] else None,
        saves=folder if last < rows[-1]["step"] and width == segment.widths[0] else None,
    )
    return entry.main(config, 0, run.path, recorded)


if __name__ == "__main__":
    os.environ.pop("TORCHELASTIC_RESTART_COUNT", None)
    ended = main(RunDir(Path(sys.argv[1])), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    sys.stdout.flush()
    sys.stderr.flush()
    # As a rank of a run ends. The end of the interpreter aborts the process if a thread is inside torch then.
    os._exit(ended)
