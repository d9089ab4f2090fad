"""Starts the ranks of one replica, which print JSON lines of what they saw; and what prints them."""

import json
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ft_hsdp.launch.backend.processes import environment

Row = dict[str, Any]


def rows_of_ranks(module: str, ranks: int, folder: Path, timeout_s: float) -> list[list[Row]]:
    """Run ``ranks`` processes to their end and return the lines of each one; blocks.

    Args:
        module: In tests.support.state; RANK, RANKS and STORE are in its environment.
        ranks: How many.
        folder: For the file by which they find each other.
        timeout_s: How long to wait for each one.
    """
    started = [
        subprocess.Popen(
            [sys.executable, "-m", f"tests.support.state.{module}"],
            env=environment() | {"RANK": str(rank), "RANKS": str(ranks), "STORE": str(folder / "store")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        ended = [(process, *process.communicate(timeout=timeout_s)) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    failed = [f"rank {rank}: {err[-2000:]}" for rank, (process, _, err) in enumerate(ended) if process.returncode]
    assert not failed, "\n".join(failed)
    return [[json.loads(line) for line in out.splitlines()] for _, out, _ in ended]


def rows_by_kind(module: str, ranks: int, folder: Path, timeout_s: float) -> dict[str, list[Row]]:
    by_kind: dict[str, list[Row]] = {}
    for rows in rows_of_ranks(module, ranks, folder, timeout_s):
        for row in rows:
            by_kind.setdefault(row["kind"], []).append(row)
    return by_kind


def say_of_each(kinds: Iterable[str], find: Callable[[str], Row]) -> None:
    """In a rank: print what it finds of each kind, up to the first that fails."""
    for kind in kinds:
        try:
            found = find(kind)
        except Exception:
            found = {"error": traceback.format_exc()}
        print(json.dumps({"kind": kind, **found}), flush=True)
        if "error" in found:
            break  # the ranks may stand at different collectives now
