"""What the kernel's log says of this machine's hardware: evidence when a rank ends (DeadPool, Table II)."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

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
        self._last = -COUNTS_S, ""  # when the newest evidence was read, and the line
        self._fd = -1
        with contextlib.suppress(OSError):
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)

    def evidence(self) -> str:
        """Return the newest line that says that this machine's hardware is broken; "": none within `COUNTS_S`.

        Does not block.
        """
        now = self._clock()
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
                self._last = now, line.partition(";")[2][:LONGEST] or line[:LONGEST]
        since, line = self._last
        return line if now - since < COUNTS_S else ""

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
