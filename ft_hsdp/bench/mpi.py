"""OpenMPI's workers: started by its own mpirun, each connects back to the bench."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from ft_hsdp.bench.link import GONE_S, Answer, Link, collect
from ft_hsdp.bench.rank import Seat
from ft_hsdp.bench.roster import mpirun
from ft_hsdp.errors import Retryable
from ft_hsdp.launch.backend.processes import environment, last_line

START_S = 120.0  # longest time until all ranks have greeted
MODULE = "ft_hsdp.bench.contenders.openmpi"
SHARED_MEMORY = ("--mca", "pml", "ob1", "--mca", "btl", "sm,self")
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # it refuses root otherwise


def start_mpi(seat: Seat, members: int, folder: Path, stack: ExitStack) -> list[Link]:
    """Run `members` ranks; their links, greeted, in the order of ranks. `stack` takes what ends them.

    Raises Retryable if they do not come up. The ranks end when their sockets do, and mpirun when they do.
    """
    log = folder / f"{seat.name}.log"
    path = str(folder / f"{seat.name}.sock")
    program = mpirun()
    assert program is not None
    listener = stack.enter_context(socket.socket(socket.AF_UNIX))
    listener.bind(path)
    listener.listen(members)
    command = [program, "-n", str(members), "--oversubscribe", *SHARED_MEMORY]
    command += [sys.executable, "-m", MODULE, path, json.dumps(dataclasses.asdict(seat))]
    env = {**environment(), **ROOT, "TMPDIR": str(folder)}
    with log.open("ab") as file:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
    stack.callback(_end, process)
    deadline = time.monotonic() + START_S
    greeted: list[tuple[Answer, Link]] = []
    while len(greeted) < members:
        sock = _accept(listener, process, deadline, log)
        link = Link(seat.name, sock, log)
        stack.callback(link.close)
        greeted.append((collect([link], max(0.0, deadline - time.monotonic()))[0], link))
    links = []
    for answer, link in sorted(greeted, key=lambda pair: int(pair[0]["member"])):
        link.name = f"{seat.name} rank {answer['member']}"
        link.greet(answer)
        links.append(link)
    return links


def _accept(
    listener: socket.socket, process: subprocess.Popen[bytes], deadline: float, log: Path
) -> socket.socket:
    listener.settimeout(0.2)
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(TimeoutError):
            sock, _ = listener.accept()
            sock.setblocking(True)
            return sock
    why = last_line(log) or f"no rank within {START_S:g} s"
    raise Retryable(f"bench: mpirun did not start its ranks: {why}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """It goes by itself once its ranks are gone; make sure."""
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            if number is not None:
                os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GONE_S)
            return
