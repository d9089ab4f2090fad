"""Ranks as children of the supervisor, although a fork server forked them.

The fork server forks twice and the process between ends at once, so the kernel gives the rank to its nearest
ancestor that adopts: the supervisor. The supervisor sees the rank's exit, signals it and reaps it, also after the
end of the fork server, and the rank dies only with the supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import json
import os
import signal
import socket
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import psutil

from ft_hsdp.lifetime import MARK_VARIABLE, process_stat

_PR_SET_CHILD_SUBREAPER = 36
LEAVE_S = 1.0  # from SIGTERM to SIGKILL for what a rank has left behind
LOOK_S = 0.02  # between two looks at it
UNKILLABLE_S = 10.0  # for what a kernel does not let go, as a process that waits for a disk


def adopt() -> None:
    """Make this process the parent of descendants whose own parent has ended.

    Raises:
        OSError: The kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


class Child:
    """A rank that runs, and the socket on which it gets its incarnation; belongs to one event loop."""

    def __init__(
        self, pid: int, line: socket.socket, exited: Callable[[int], None], warm: Callable[[], None]
    ) -> None:
        """Watch a rank.

        Args:
            line: This process's end of its socket.
            exited: Called once with its exit code, which is negative for a signal.

        Raises:
            OSError: It cannot be watched: there is no descriptor left.
        """
        self.pid = pid
        self._exited = exited
        self._warm = warm
        self._loop = asyncio.get_running_loop()
        self._process = os.pidfd_open(pid)
        self._line: socket.socket | None = line
        line.setblocking(False)
        self._loop.add_reader(self._process, self._end)
        self._loop.add_reader(line, self._hear)

    def assign(self, assignment: Mapping[str, Any]) -> None:
        """Send the rank its incarnation. A rank that has exited gets nothing; its exit is reported."""
        if self._line is not None:
            with contextlib.suppress(OSError):
                self._line.send(json.dumps(dict(assignment)).encode() + b"\n")

    def signal(self, number: int) -> None:
        """Send it a signal; never to another process that has got its pid."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, number)

    def _hear(self) -> None:
        assert self._line is not None
        data = b""
        with contextlib.suppress(OSError):
            data = self._line.recv(64)
        if data:
            self._warm()
        else:
            self._hang_up()  # the rank has its incarnation, or is gone

    def _hang_up(self) -> None:
        if self._line is not None:
            self._loop.remove_reader(self._line)
            self._line.close()
            self._line = None

    def _end(self) -> None:
        try:
            result = os.waitid(os.P_PIDFD, self._process, os.WEXITED | os.WNOHANG)
        except ChildProcessError:  # another part of this process waited for it: how it ended is not known
            code = -signal.SIGKILL
        else:
            if result is None:
                return
            code = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        self._loop.remove_reader(self._process)
        os.close(self._process)
        self._hang_up()
        self._exited(int(code))


def left(mark: str) -> list[psutil.Process]:
    """Return the processes that a rank which has ended, whose mark is ``mark``, has forked or started, and theirs.

    They are children of this process, which has adopted them, and descendants of these.
    """
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    found = []
    for pid in _children():
        with contextlib.suppress(OSError, psutil.Error):
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                root = psutil.Process(pid)
                found += [root, *root.children(recursive=True)]
    return found


async def end_left(mark: str) -> None:
    """End the processes that `left` finds: SIGTERM, and SIGKILL after `LEAVE_S`. Gives up after `UNKILLABLE_S`."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    told: set[psutil.Process] = set()
    while loop.time() - began < UNKILLABLE_S:
        late, new = loop.time() - began >= LEAVE_S, set(left(mark)) - told
        told |= new
        for process in told if late else new:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL if late else signal.SIGTERM)
        if not (told := {process for process in told if not _gone(process)}):
            return
        await asyncio.sleep(LOOK_S)


def _gone(process: psutil.Process) -> bool:
    """Return whether a process has ended; reap it if it is a child of this one."""
    try:
        return os.waitpid(process.pid, os.WNOHANG)[0] == process.pid
    except ChildProcessError:  # its parent lives
        return not process.is_running()


def reap(sessions: Collection[int], watched: Collection[int]) -> None:
    """Reap adopted processes of these sessions that have ended, except the watched ones."""
    for pid, state in _adopted(sessions):
        if pid not in watched and state == b"Z":
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def end(sessions: Collection[int]) -> bool:
    """Send SIGKILL to all adopted processes of these sessions and reap them; return whether none was left."""
    adopted = _adopted(sessions)
    for pid, _ in adopted:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)  # our child, and not reaped yet: no other process has its pid
            os.waitpid(pid, os.WNOHANG)
    return not adopted


def _adopted(sessions: Collection[int]) -> list[tuple[int, bytes]]:
    """Return the children of these sessions with their states, except those that lead a session."""
    standing = ((pid, *_standing(pid)) for pid in _children() if pid not in sessions)
    return [(pid, state) for pid, state, session in standing if session in sessions]


def _children() -> list[int]:
    try:
        lists = [(task / "children").read_text(encoding="utf-8") for task in Path("/proc/self/task").iterdir()]
    except OSError as error:
        if error.errno != errno.ENOENT:
            return []
        return [child.pid for child in psutil.Process().children()]  # a kernel without these files
    return [int(pid) for text in lists for pid in text.split()]


def _standing(pid: int) -> tuple[bytes, int]:
    try:
        fields = process_stat(pid)
    except OSError:
        return b"", 0
    return fields[0], int(fields[3])
