"""Processes under test that obey what a pipe says, and ranks of a replica, as forks of the template of `warm`."""

import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any

from tests.support import warm

Row = dict[str, Any]


class Forked:
    """Runs ``main(pipe, *arguments)``."""

    def __init__(self, main: Callable[..., None], *arguments: Any) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        self._process = warm.fork(main, (theirs, *arguments))
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def hear(self, timeout_s: float = 30.0) -> Any:
        """What it says next."""
        assert self.pipe.poll(timeout_s), "it says nothing"
        return self.pipe.recv()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout_s: float = 30.0) -> int | None:
        """How it ends."""
        self._process.join(timeout_s)
        return self._process.exitcode

    def close(self) -> None:
        self._process.kill()
        self._process.join(10)
        self._process.close()
        self.pipe.close()


def of_ranks(ranks: int, work: Callable[..., Any], *arguments: Any, timeout_s: float = 150.0) -> list[Any]:
    """What ``work(*arguments)`` returns on each rank of a process group; {"exit": code} if it ends instead."""
    with tempfile.TemporaryDirectory() as folder:
        started = [Forked(_rank, rank, ranks, f"{folder}/store", work, arguments) for rank in range(ranks)]
        try:
            return [_result(each, timeout_s) for each in started]
        finally:
            for each in started:
                each.close()


def _result(rank: Forked, timeout_s: float) -> Any:
    try:
        return rank.hear(timeout_s)
    except EOFError:
        return {"exit": rank.wait()}


def _rank(
    pipe: Connection, rank: int, ranks: int, store: str, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    pipe.send(work(*arguments))
    os._exit(0)  # what torch takes down at the end of an interpreter is not what is tested


def of_kinds(ranks: int, work: Callable[[str], Row], kinds: Iterable[str]) -> dict[str, list[Row]]:
    """What ``work`` finds of each kind, by rank, up to the first kind that fails."""
    found = of_ranks(ranks, _of_each, work, list(kinds))
    return {kind: [rows[kind] for rows in found if kind in rows] for kind in found[0]}


def _of_each(work: Callable[[str], Row], kinds: list[str]) -> dict[str, Row]:
    found: dict[str, Row] = {}
    for kind in kinds:
        try:
            found[kind] = work(kind)
        except Exception:
            found[kind] = {"error": traceback.format_exc()}
            break  # the ranks may stand at different collectives now
    return found
