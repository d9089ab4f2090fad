"""What ends a process: the end of the one that started it, that of the rank that it belongs to, and which signals.

SIGINT, SIGTERM and SIGHUP, that of a terminal that closes, tell a job to end; nohup has SIGHUP ignored. SIGUSR1,
SIGUSR2 and SIGQUIT are notices of schedulers and users, and by default they would end a process at once.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading

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
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    if (place := getenv(MARK_VARIABLE.encode())) and len(os.environ[MARK_VARIABLE]) == len(mark):
        ctypes.memmove(place, mark.encode(), len(mark))
    os.environ[MARK_VARIABLE] = mark


def unmarked() -> dict[str, str]:
    """Return the environment of a process that is to outlive the rank that starts it."""
    return {name: value for name, value in os.environ.items() if name != MARK_VARIABLE}
