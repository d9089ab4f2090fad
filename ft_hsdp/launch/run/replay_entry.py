"""`launcher.py replay` of a run whose ranks ran the user's `entry`: the ranks of one replica run it once more.

`python -m ft_hsdp.launch.run.replay_entry RUN OUTCOME` is one of them; `train.replay_job` is what it does.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ft_hsdp.config import Config, load
from ft_hsdp.errors import ConfigError
from ft_hsdp.launch.backend import entry
from ft_hsdp.launch.backend.processes import environment, free_port, last_line, tied
from ft_hsdp.launch.run.directory import Row, RunDir, read_json
from ft_hsdp.launch.run.recorder import commits_of
from ft_hsdp.secret import TOKEN_VARIABLE
from ft_hsdp.train.replay_job import Recorded, ReplayOutcome

LOOK_S = 0.05  # between two looks at the ranks


def repeat(run: RunDir, config: Config) -> ReplayOutcome:
    """Run the entry of a finished run once more, on its recorded steps. Blocks for as long as that takes.

    Args:
        run: The run; its logs hold each step from the first one on.
        config: Its configuration.

    Returns:
        What was found.

    Raises:
        ConfigError: The entry failed.
    """
    with tempfile.TemporaryDirectory(prefix="ft_hsdp-replay-") as folder:
        outcome = Path(folder) / "outcome.json"
        shared = {
            **environment(),
            TOKEN_VARIABLE: secrets.token_hex(16),
            "WORLD_SIZE": str(config.ranks_per_replica),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        ranks, logs = [], []
        try:
            for rank in range(config.ranks_per_replica):
                logs.append(Path(folder) / f"rank{rank}.log")
                with logs[-1].open("wb") as log:
                    command = tied(__name__, str(run.path), str(outcome))
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
        found = read_json(outcome)
        if not found:
            raise ConfigError("RUN", run.name, "a run whose entry trains until job.batches ends")
        return ReplayOutcome(**found)


def _first_failure(ranks: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Wait until all ranks have ended, or one has failed; return that one."""
    while True:
        codes = [process.poll() for process in ranks]
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        if failed is not None or all(code == 0 for code in codes):
            return failed
        time.sleep(LOOK_S)


def main(run: RunDir, outcome: Path) -> int:
    """Run one rank; return its exit code."""
    rows: tuple[Row, ...] = tuple(commits_of(run))
    return entry.main(load(run.config), 0, run.path, Recorded(rows, outcome))


if __name__ == "__main__":
    os.environ.pop("TORCHELASTIC_RESTART_COUNT", None)
    ended = main(RunDir(Path(sys.argv[1])), Path(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    # As a rank of a run ends. The end of the interpreter aborts the process if a thread is inside torch then.
    os._exit(ended)
