"""What ends a process: the end of the one that started it, that of the rank that it belongs to, and which signals.

SIGINT, SIGTERM and SIGHUP, that of a terminal that closes, tell a job to end; nohup has SIGHUP ignored. SIGUSR1,
SIGUSR2 and SIGQUIT are notices of schedulers and users, and by default they would end a process at once. Output
that is not taken ends no process, nor holds it up (`forgiving`).
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import signal
import sys
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TextIO

from ft_hsdp.jsonl import Queued, here

_PR_SET_PDEATHSIG = 1
NOTICES = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
MARK_VARIABLE = "FT_HSDP_MARK"  # a rank and all that it starts have the same one; its supervisor finds them by it
UNMARKED = "0" * 32


def die_with(parent: int) -> None:
    """Have the kernel kill this process when `parent`, which started it, dies; raise OSError if it refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before the call
        os._exit(128 + signal.SIGKILL)


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that tell this process to end: those that it does not ignore."""
    told = (signal.SIGTERM, signal.SIGHUP)
    return (signal.SIGINT, *(number for number in told if signal.getsignal(number) is not signal.SIG_IGN))


def outlive_notices() -> None:
    """Have this process, and what it starts from now on, ignore `NOTICES`. A handler of the program stays."""
    if threading.current_thread() is threading.main_thread():
        for number in NOTICES:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, signal.SIG_IGN)


def wear(mark: str) -> None:
    """Have /proc show ``mark`` in the environment of this process, and of all that it forks or starts from now on.

    A forked process shows the environment that its parent began with. So the value is written in its place, which
    has to be as long; a fork server begins with `UNMARKED`.
    """
    place, size = _place_of_mark()
    if size == len(mark):
        ctypes.memmove(place, mark.encode(), size)
    os.environ[MARK_VARIABLE] = mark


@cache
def _place_of_mark() -> tuple[int, int]:
    """Return where the mark stands with which this process, or the one that forked it, began, and its length.

    `os.environ` keeps a value that is set later elsewhere.
    """
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    place = getenv(MARK_VARIABLE.encode())
    return (place, len(os.environ[MARK_VARIABLE])) if place else (0, 0)


def process_stat(pid: int | str) -> list[bytes]:
    """Return what /proc/PID/stat says after the name of a process: proc(5) from the third field, the state, on.

    The name has no encoding: the kernel cuts it after 15 bytes, also within a letter. Raises OSError.
    """
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()


def start_ticks(pid: int) -> int:
    """Return when a process started, in clock ticks since the boot. Raises OSError.

    The time of day of a start, as psutil has it, moves whenever the clock of the host is set.
    """
    return int(process_stat(pid)[19])


def identity(pid: int | None = None) -> dict[str, object]:
    """Return {"pid", "start_ticks", "host", "boot"} of a process, by default of this one. Raises OSError."""
    known = os.getpid() if pid is None else pid
    return {"pid": known, "start_ticks": start_ticks(known), **here()}


def entitle(command: Sequence[str]) -> None:
    """Have /proc show a command line for this process, a fork; words for which there is no room are left out.

    It is written in the place of the line with which the process that forked it began.
    """
    fields = process_stat("self")
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, proc(5)
    line = b"".join(word.encode() + b"\0" for word in command)[: max(end - start, 0)]
    if line := line[: line.rfind(b"\0") + 1]:
        ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)


def unmarked() -> dict[str, str]:
    """Return the environment of a process that is to outlive the rank that starts it."""
    return {name: value for name, value in os.environ.items() if name != MARK_VARIABLE}


class _Forgiving(io.FileIO):
    """A file that ignores its errors, whatever it leads to: the output is lost, and the writer goes on."""

    def write(self, data: Any, /) -> int:
        """Write what is taken; all of ``data`` counts as written."""
        with contextlib.suppress(OSError):
            super().write(data)
        return memoryview(data).nbytes


class _Patient(_Forgiving):
    """The same where neither a reader nor a disk is waited for: a thread does; what finds no place is lost."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.lines = Queued(self)

    def write(self, data: Any, /) -> int:
        self.lines.append(bytes(data))
        return memoryview(data).nbytes

    def append(self, line: bytes, /) -> bool:
        """Write a line, for as long as its reader takes."""
        return super().write(line) == len(line)

    def missed(self, lines: int, why: str) -> None:
        """Forget lines that found no place."""


def forgiving(descriptor: int, *, patient: bool = False) -> TextIO:
    """Return a line-buffered text file at ``descriptor`` that raises no error.

    Args:
        patient: Whether a write returns within a moment, also if nobody reads, as after Ctrl-S, or a disk
            hangs. `drain` it at the end.
    """
    file = _Patient(descriptor) if patient else _Forgiving(descriptor, "wb", closefd=False)
    buffer = io.BufferedWriter(file)
    return io.TextIOWrapper(buffer, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def drain(stream: TextIO) -> None:
    """Wait for the reader of a file that `forgiving` made, for as long as it goes on reading."""
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    if isinstance(raw, _Patient):
        raw.lines.drain()


def leave(code: int) -> NoReturn:
    """End this process at once with ``code``; what it has printed is written first, while its disk takes it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
            drain(stream)
    os._exit(code)
