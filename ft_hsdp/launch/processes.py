"""What a process must do so that nothing outlives the one that started it."""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import signal
import socket
import sys
from pathlib import Path

import ft_hsdp

_PR_SET_PDEATHSIG = 1
FIRST_PORT, PORTS = 20000, 12768  # below those that Linux gives to outgoing connections
TRIES = 1000
TOKEN_VARIABLE = "FT_HSDP_TOKEN"  # noqa: S105 - the name of a variable
SECRETS = (TOKEN_VARIABLE, "RAY_AUTH_TOKEN")  # what a child does not need stands in no environment of it
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}
"""Environment of every process that computes: one thread each, output at once."""


def die_with(parent: int) -> None:
    """Have the kernel SIGKILL this process when `parent`, which must have started it, dies."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before the call
        os._exit(128 + signal.SIGKILL)


def tied(*module_and_args: str) -> list[str]:
    """The command that runs a module of this installation tied to the calling process's life."""
    return [sys.executable, "-m", "ft_hsdp.launch.tied", str(os.getpid()), *module_and_args]


def spare(*module_and_args: str) -> list[str]:
    """Like `tied`, but the module is only loaded; it runs when a line comes on stdin, and ends at its end."""
    return [sys.executable, "-m", "ft_hsdp.launch.spare", str(os.getpid()), *module_and_args]


def environment() -> dict[str, str]:
    """This process's environment, in which children find its packages; the job's token they take from the run."""
    root = str(Path(ft_hsdp.__file__).parents[1])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    inherited = {name: value for name, value in os.environ.items() if name not in SECRETS}
    return {**inherited, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(paths)}


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody has at the moment, and that no outgoing connection takes meanwhile.

    Raises OSError where none is found.
    """
    for _ in range(TRIES):
        port = FIRST_PORT + secrets.randbelow(PORTS)
        with socket.socket() as sock:
            try:
                sock.bind((host, port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                raise
            return port
    raise OSError(errno.EADDRINUSE, f"no port is free at {host}")


def last_line(log: Path) -> str:
    """The last line of a log that is not empty; "" where there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 8192))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    except OSError:
        return ""
    return next((line for line in reversed(lines) if line), "")
