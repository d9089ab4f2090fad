"""Starts processes that do not outlive the one that started them, and small helpers for that.

`python -m ft_hsdp.launch.backend.processes PID MODULE [ARGS]` runs a module. The kernel kills it when PID ends. It
leads a session of its own, so that Ctrl-C in a shell reaches only the process that knows what to do.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import socket
import sys
from collections.abc import Collection
from pathlib import Path

import psutil

import ft_hsdp
from ft_hsdp import address
from ft_hsdp.errors import one_line
from ft_hsdp.jsonl import open_regular
from ft_hsdp.lifetime import MARK_VARIABLE, die_with
from ft_hsdp.secret import KEY_VARIABLE, TOKEN_VARIABLE

FIRST_PORT, PORTS = 20000, 12768  # these ports lie below those that Linux gives to outgoing connections
TRIES = 1000  # random ports that are tried
SECRETS = (TOKEN_VARIABLE, KEY_VARIABLE, "RAY_AUTH_TOKEN")  # variables that no child needs
PLACES = re.compile(  # variables by which launchers tell a rank its place: torchrun's, Slurm's, MPI's and PMI's
    r"(RANK|WORLD_SIZE|MASTER_(ADDR|PORT)|(LOCAL|GROUP|ROLE)_(RANK|WORLD_SIZE|NAME)|(TORCHELASTIC|PET)_.*"
    r"|SLURM_(PROCID|LOCALID|NTASKS|NPROCS|GTIDS|TASKS_PER_NODE|STEP_(NUM_TASKS|TASKS_PER_NODE))"
    r"|(OMPI_COMM_WORLD|OMPI_UNIVERSE|MV2_COMM_WORLD|PMI|PMIX)_.*|MPI_LOCAL(RANKID|NRANKS))"
)
OURS = re.compile(f"FT_HSDP_(HOSTS?|NODE|FATAL_UNITS|CONFIG|REPLICA)|{MARK_VARIABLE}")  # in a rank of ours
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # of Arrow's allocator; no fork has its thread
    "PYTHONUNBUFFERED": "1",
}
"""Environment of every process that computes: one thread each, output at once."""


def tied(*module_and_args: str) -> list[str]:
    """Return the command that runs a module of this installation, killed when the calling process ends."""
    return [sys.executable, "-m", "ft_hsdp.launch.backend.processes", str(os.getpid()), *module_and_args]


def environment() -> dict[str, str]:
    """Return an environment for children: they find this installation; secrets they read from files.

    It has no place of a rank: this process may be a rank of another launcher, or of another job of ours, whose
    hosts it does not inherit either.
    """
    root = str(Path(ft_hsdp.__file__).parents[1])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    dropped = foreign(os.environ).union(SECRETS)
    inherited = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**inherited, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(paths)}


def foreign(environment: Collection[str]) -> set[str]:
    """Return the variables of an environment that tell another job's rank its place."""
    inside = MARK_VARIABLE in environment
    return {n for n in environment if PLACES.fullmatch(n) or (inside and OURS.fullmatch(n))}


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port that is free, and that no outgoing connection takes. Raises OSError if there is none."""
    with kept_port(host) as sock:
        return int(sock.getsockname()[1])


def kept_port(host: str) -> socket.socket:
    """Return a socket that is bound to such a port: no other process gets it from here before it is closed.

    Raises:
        OSError: No port is free.
    """
    for _ in range(TRIES):
        sock = socket.socket(address.family(host))
        try:
            sock.bind((host, FIRST_PORT + secrets.randbelow(PORTS)))
        except OSError as error:
            sock.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return sock
    raise OSError(errno.EADDRINUSE, f"no port is free at {host}")


def take_name(name: str) -> socket.socket | None:
    """Return a socket with an abstract name, which no other process has meanwhile; None: one has it.

    Nothing is left of the name when the socket is closed.
    """
    mine = socket.socket(socket.AF_UNIX)
    try:
        mine.bind(f"\0{name}")
    except OSError:
        mine.close()
        return None
    return mine


def last_line(log: Path) -> str:
    """Return the last line of a log that is not empty, without what is not printable; "" if there is none."""
    try:
        with open_regular(log) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 8192))
            lines = [one_line(line) for line in file.read().decode(errors="replace").splitlines()]
    except OSError:
        return ""
    return next((line for line in reversed(lines) if line), "")


def stands_still(pid: int, host: str) -> bool:
    """Return whether a process of this machine is stopped by SIGSTOP; a debugger's stop does not count."""
    if host != socket.gethostname():
        return False
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def main() -> None:
    """Tie this process to its parent, which waits for it; then run a module."""
    parent, module, *args = sys.argv[1:]
    if os.getpid() != os.getsid(0):
        os.setsid()
    die_with(int(parent))
    os.execv(sys.executable, [sys.executable, "-m", module, *args])  # noqa: S606 - no shell is what we want


if __name__ == "__main__":
    main()
