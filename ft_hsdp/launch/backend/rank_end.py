"""Why a rank ended, as it says itself: its supervisor reads it when the rank is gone.

The exit code says whether a rank may be started again. This says what the error was, and whether the script, a
shortage of this machine or something temporary is to blame. A rank that a signal ended has said nothing; the file
may be missing for other reasons, too (a full disk, another machine), and then the exit code has to do.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path

from ft_hsdp.core.restart import Cause
from ft_hsdp.errors import EXIT_CONFIG, FtHsdpError, LocalResourceError, exhausted, one_line, raised_from
from ft_hsdp.launch.run.directory import RunDir, read_json, try_write_json

_SHORT = frozenset({errno.EAGAIN, errno.ENOSPC, errno.EDQUOT, errno.EADDRINUSE})  # `exhausted` knows the others
_SHORT_TEXT = re.compile(  # of torch's errors, which have no number
    r"can't allocate memory|cannot allocate memory|out of memory|no space left|too many open files|EADDRINUSE"
    r"|address already in use|resource temporarily unavailable",
    re.IGNORECASE,
)
_OUTSIDE = re.compile(  # in the type or text of an error: what is not under the script's control
    r"connect|timed?.?out|network|http|socket|unavailable|temporar|nccl"
    r"|no space|quota|DistBackend|DistStore",
    re.IGNORECASE,
)
_DEVICE = re.compile(r"cuda error|cudnn|cublas|device-side|worker .*(killed by|exited)", re.IGNORECASE)
_spare_descriptors: list[int] = []


@dataclass(frozen=True, slots=True)
class RankEnd:
    cause: Cause
    error: str  # its type and text, on one line


def cause_of(error: BaseException) -> Cause:
    causes = list(raised_from(error))
    if exhausted(error) is not None or any(
        isinstance(each, LocalResourceError)
        or (isinstance(each, OSError) and each.errno in _SHORT)
        or (isinstance(each, RuntimeError) and _SHORT_TEXT.search(str(each)))
        for each in causes
    ):
        return Cause.SHORTAGE
    if any(_DEVICE.search(str(each)) for each in causes):
        return Cause.DEVICE
    for each in causes:
        kinds = " ".join(kind.__name__ for kind in type(each).__mro__)
        ours = isinstance(each, FtHsdpError) and each.exit_code != EXIT_CONFIG
        if ours or isinstance(each, OSError | EOFError) or _OUTSIDE.search(f"{kinds} {each}"):
            return Cause.TEMPORARY
    return Cause.SCRIPT


def reserve() -> None:
    """Put a descriptor aside, with which `tell` can write even where there is none left."""
    with contextlib.suppress(OSError):
        _spare_descriptors.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def tell(
    run: Path, replica: int, rank: int, incarnation: str, error: BaseException, cause: Cause | None = None
) -> None:
    """Write down why this rank ends; an error of the disk loses it.

    Args:
        run: The run's directory.
        replica: Of the rank.
        rank: This one.
        incarnation: Its name.
        error: That ends it.
        cause: What is to blame; None: as `cause_of` says.
    """
    while _spare_descriptors:
        os.close(_spare_descriptors.pop())
    text = one_line(f"{type(error).__name__}: {error}")
    body = {"incarnation": incarnation, "cause": cause or cause_of(error), "error": text}
    try_write_json(RunDir(run).rank_end(replica, rank), body)


def told(run: RunDir, replica: int, rank: int, incarnation: str) -> RankEnd | None:
    """Return what a rank of an incarnation has said about its end; None: nothing."""
    body = read_json(run.rank_end(replica, rank))
    if not isinstance(body, dict) or body.get("incarnation") != incarnation:
        return None
    try:
        return RankEnd(Cause(body["cause"]), str(body["error"]))
    except (KeyError, ValueError):
        return None
