"""The processes of this machine, read while any of them may end."""

from collections.abc import Iterator
from contextlib import suppress

import psutil


def running(above: int | None = None, mark: tuple[str, str] | None = None) -> dict[psutil.Process, list[str]]:
    """The processes that run, with their command lines; no zombies.

    Args:
        above: Only descendants of the process with this pid.
        mark: Only processes that have this variable with this value in their environment.
    """
    return dict(_running(above, mark))


def run_by(words: str) -> list[list[str]]:
    """The command lines of all processes that have ``words`` in one of their arguments."""
    return [line for line in running().values() if any(words in word for word in line)]


def _running(above: int | None, mark: tuple[str, str] | None) -> Iterator[tuple[psutil.Process, list[str]]]:
    every = psutil.process_iter() if above is None else psutil.Process(above).children(recursive=True)
    for process in every:
        with suppress(psutil.Error, OSError):
            marked = mark is None or process.environ().get(mark[0]) == mark[1]
            if marked and process.status() != psutil.STATUS_ZOMBIE:
                yield process, process.cmdline()
