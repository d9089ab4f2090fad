"""`replay`: the committed steps of a run are trained again, and every bit is compared.

The ranks of one replica run the `entry` of the job, or the built-in trainer, once more (`train.replay.job`). Only
the recorded contributors, batches, ring orders and chunk plans are taken from the run. If the ranks reach the same
lineage at every step and the same digest at the end, then sums, divisors, learning rates and data were as the
records say, through all failures. Results depend on the number of threads and on the CPU's instruction set, so a
replay must run on the same kind of machine as the job.

A replica may have had fewer ranks for a while (`memory.shrink_to`). FSDP2 cuts the model for the ranks that there
are, and its sums inside a replica depend on their number. So the run is divided into segments, in each of which
replicas were of the same widths, and a segment is repeated by one replica of each width. They sum together
(`train.replay.lanes`), and the widest one passes the state on as a checkpoint.

`python -m ft_hsdp.launch.run.replay RUN FOLDER FIRST LAST` is one rank, which repeats the steps FIRST to LAST.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ft_hsdp import secret
from ft_hsdp.analysis.commits import counted, newest_final
from ft_hsdp.config import Config, load
from ft_hsdp.errors import EXIT_CONFIG, ConfigError, FtHsdpError, Retryable
from ft_hsdp.launch.backend import entry
from ft_hsdp.launch.backend.processes import environment, free_port, last_line, tied
from ft_hsdp.launch.run.directory import Row, RunDir, read_json
from ft_hsdp.launch.run.recorder import commits_of, finals_of
from ft_hsdp.lifetime import leave
from ft_hsdp.secret import TOKEN_VARIABLE
from ft_hsdp.state.checkpoint import catalog
from ft_hsdp.state.checkpoint.catalog import UNSIGNED
from ft_hsdp.state.checkpoint.checkpoint_manifest import Unauthentic
from ft_hsdp.train.replay.job import Recorded, ReplayOutcome

LOOK_S = 0.05  # between two looks at the ranks


@dataclass(frozen=True, slots=True)
class ReplayVerdict:
    run: str  # its name
    steps: int  # number of recorded steps
    equal: bool  # every step, and the final digest
    digest: str  # of the state that the replay reached
    recorded: str  # digest of the final state of the run
    differs_at: int | None = None  # the first step with other batches, or with a sum that has other bits

    def __str__(self) -> str:
        if self.equal:
            return f"{self.run}: {self.steps} steps replayed, bit-identical (digest {self.digest[:16]})"
        where = f"step {self.differs_at} differs" if self.differs_at is not None else "the final digest differs"
        return f"{self.run}: {where}; replayed {self.digest[:16]}, recorded {self.recorded[:16]}"


def replay(run: RunDir, begins: Callable[[], object] = lambda: None) -> ReplayVerdict:
    """Replay a finished run. This takes about the CPU time of the run without its failures.

    Args:
        begins: Called when nothing is known that would refuse the run, before its first step is trained.

    Raises:
        ConfigError: The run is not finished, ran on GPUs or with a loop that no `entry` names, an earlier version
            made it, its logs have a gap, its first checkpoint is gone, or its entry failed.
    """
    config = load(run.config)
    if config.train.device != "cpu":
        raise ConfigError("RUN", run.name, f"a run on CPUs: a {config.train.device} sums in another order")
    rows, recorded = _history(run, config)
    if rows[0]["step"] != 1:
        _check_checkpoint(run, config, rows[0])
    begins()
    with tempfile.TemporaryDirectory(prefix="ft_hsdp-replay-") as name:
        folder = Path(name)
        _shared(folder).mkdir()
        secret.write_private(folder / secret.RUN_KEY, secrets.token_hex(16))  # signs the states that are passed on
        for segment in segments(rows, config.ranks_per_replica):
            found = agreed(_repeat(run, folder, segment), segment)
            if found.differs_at is not None:
                break
    equal = found.digest == recorded and found.differs_at is None
    return ReplayVerdict(run.name, len(rows), equal, found.digest, recorded, found.differs_at)


def _history(run: RunDir, config: Config) -> tuple[list[Row], str]:
    """Return the canonical commits of a run from its first step to the end, and the recorded final digest."""
    final = newest_final(finals_of(run).values())
    if final is None:
        raise ConfigError("RUN", run.name, "a run that has ended")
    if final.get("loop") == "own" and config.entry is None:
        allowed = "a run of the built-in trainer or of an `entry`: another loop cannot be started from here"
        raise ConfigError("RUN", run.name, f"{allowed} (`verify RUN` checks its logs and digests)")
    rows = commits_of(run)
    steps = [r["step"] for r in rows]
    if not steps or steps != list(range(steps[0], final["step"] + 1)) or not all(map(counted, rows)):
        raise ConfigError("RUN", run.name, f"a run whose logs hold each of its steps up to {final['step']}")
    return rows, str(final["digest"])


def _check_checkpoint(run: RunDir, config: Config, first: Row) -> None:
    """Check that the checkpoint is there on which the first recorded step of a run builds. Raises ConfigError."""
    folder = Path(config.checkpoint.dir or run.path / "checkpoints")
    key = None if config.checkpoint.trust else secret.run_key(run.path, config.checkpoint.key)
    try:
        found = catalog.newest(folder, key, first["step"] - 1).checkpoint if folder.is_dir() else None
    except Unauthentic as error:
        raise ConfigError("checkpoint.dir", str(folder / str(error)), UNSIGNED) from None
    if found is None or found.manifest.state.lineage != first["prev"]:
        allowed = f"a run from step 1, or one with its checkpoint of step {first['step'] - 1} in {folder}"
        raise ConfigError("RUN", run.name, allowed)


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


@dataclass(frozen=True, slots=True)
class RankFailed:
    text: str  # the rank's name, and the last line of its log
    code: int  # its exit code; below 0: minus the signal that ended it

    def error(self, name: str) -> FtHsdpError:
        """Return the error of a job of this name that cannot be trained here, or that was cut off."""
        if self.code == EXIT_CONFIG:
            return ConfigError("job", name, f"one that can be trained here ({self.text})")
        return Retryable(f"{name}: {self.text} (exit code {self.code})")


def free_ports(count: int) -> list[int]:
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return [*ports]


def place(rank: int, local_rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the environment that tells a rank its place; the ranks of a replica meet at ``port``."""
    numbers = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    return {name: str(number) for name, number in numbers.items()}


def run_ranks(
    command: Sequence[str],
    folder: Path,
    places: Mapping[str, Mapping[str, str]],
    stop: threading.Event | None = None,
) -> RankFailed | None:
    """Run ``command`` once for each rank; wait until all have ended well, or one has failed. Blocks.

    Args:
        places: By the rank's name, what is in its environment alone (`place`).
        stop: Ends the ranks once it is set.

    Returns:
        The first rank that has failed, which ends the others; None: all have ended well.
    """
    shared = {**environment(), TOKEN_VARIABLE: secrets.token_hex(16), "MASTER_ADDR": "127.0.0.1"}
    shared.pop("TORCHELASTIC_RESTART_COUNT", None)  # of this process, if torchrun has started it
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for name, own in places.items():
            with (folder / name).open("wb") as log:
                processes.append(subprocess.Popen(command, env={**shared, **own}, stdout=log, stderr=log))
        failed = _first_failure(processes, stop)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if failed is None:
        return None
    name = [*places][failed]
    return RankFailed(f"{name}: {last_line(folder / name)}", processes[failed].returncode)


def _repeat(run: RunDir, folder: Path, segment: ReplaySegment) -> list[ReplayOutcome]:
    """Repeat one segment; return what the replica of each width has found, the widest first."""
    command = tied(__name__, str(run.path), str(folder), str(segment.first), str(segment.last))
    places = {
        f"rank {rank} of {width}": place(rank, rank, width, port)
        for width, port in zip(segment.widths, free_ports(len(segment.widths)), strict=True)
        for rank in range(width)
    }
    failed = run_ranks(command, folder, places)
    if failed is not None:
        raise ConfigError("RUN", run.name, f"a run that can be repeated ({failed.text})")
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


def _first_failure(processes: Sequence[subprocess.Popen[bytes]], stop: threading.Event | None) -> int | None:
    """Wait until all processes have ended, or one has failed; return the place of that one."""
    while True:
        if stop is not None and stop.is_set():
            processes[0].kill()
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
    # As a rank of a run ends. The end of the interpreter aborts the process if a thread is inside torch then.
    leave(main(RunDir(Path(sys.argv[1])), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
