"""Why a rank ended: what it says itself, which its supervisor reads when the rank is gone, and the kernel's log.

The exit code says whether a rank may be started again. This says what the error was, and whether the script, a
shortage of this machine or something temporary is to blame. A rank that a signal ended has said nothing; the file
may be missing for other reasons, too (a full disk, another machine), and then the exit code has to do. What the
kernel's log says of this machine's hardware is evidence when a rank ends (DeadPool, Table II).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Callable
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

KMSG = Path("/dev/kmsg")
COUNTS_S = 60.0  # for which a line explains the ends of ranks
LONGEST = 160  # characters of a line that are told
_RECORD = 8192  # bytes: the kernel's largest
_MOST = 10_000  # records that are read at once

# Errors of NVIDIA's driver after which a GPU is to be reset or replaced: uncorrected memory errors (48, 95, 140),
# a row that cannot be remapped (64), NVLink (74), a GPU that has left the bus (79) or whose processor is silent
# (119, 120). Others may be the program's (13, 31, 43), or are corrected (63, 92, 94). See NVIDIA's Xid catalog:
# https://docs.nvidia.com/deploy/xid-errors
_XIDS = frozenset({48, 64, 74, 79, 95, 119, 120, 140})
_XID = re.compile(r"NVRM: Xid \([^)]{1,40}\): (\d{1,4})\b")
# Of the processor's or the memory's machine checks, and of pages that the kernel has given up.
_MEMORY = re.compile(r"\bmce: .*\bUncorrected\b|\bEDAC \S+: \d+ UE\b|\bMemory failure: 0x")


def is_evidence(line: str) -> bool:
    """Return whether a line of the kernel's log says that hardware is broken."""
    xid = _XID.search(line)
    return int(xid[1]) in _XIDS if xid else _MEMORY.search(line) is not None


class KernelLog:
    """The kernel's log from now on. Whoever may not read it finds no evidence.

    Args:
        path: The log; each read gives whole lines.
        clock: Monotonic seconds.
    """

    def __init__(self, path: Path = KMSG, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._read = clock()  # when it was read last
        self._last = -COUNTS_S, ""  # since when the newest evidence may be there, and the line
        self._fd = -1
        with contextlib.suppress(OSError):
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)

    def evidence(self) -> str:
        """Return the newest line that says that this machine's hardware is broken; "": none within `COUNTS_S`.

        A line counts as old as the read before it, so call this often: the kernel's stamps are of a clock that
        drifts from ours. Does not block.
        """
        before, self._read = self._read, self._clock()
        for _ in range(_MOST if self._fd >= 0 else 0):
            try:
                text = os.read(self._fd, _RECORD).decode(errors="replace")
            except BrokenPipeError:  # records were overwritten before they were read
                continue
            except OSError:  # there is no other one
                break
            if not text:
                break
            for line in filter(is_evidence, text.splitlines()):
                self._last = before, line.partition(";")[2][:LONGEST] or line[:LONGEST]
        since, line = self._last
        return line if self._read - since < COUNTS_S else ""

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


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
