"""OpenMPI's workers: started by its own mpirun, each connects back to the bench.

The workers of one contender, as one thing.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from ft_hsdp.bench.contenders.base import WorkerSeat
from ft_hsdp.bench.contenders.roster import mpirun
from ft_hsdp.bench.scope import signals_held_back
from ft_hsdp.bench.workers.link import GONE_S, Answer, WorkerLink, ask, collect
from ft_hsdp.errors import DataCorruption, Retryable
from ft_hsdp.launch.backend.processes import environment, last_line

START_S = 120.0  # longest time until all ranks have greeted
MODULE = "ft_hsdp.bench.contenders.openmpi"
SHARED_MEMORY = ("--mca", "pml", "ob1", "--mca", "btl", "sm,self")
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # it refuses root otherwise


def start_mpi(seat: WorkerSeat, members: int, folder: Path, stack: ExitStack) -> list[WorkerLink]:
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
    with log.open("ab") as file, signals_held_back():
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
        stack.callback(_end, process)
    deadline = time.monotonic() + START_S
    greeted: list[tuple[Answer, WorkerLink]] = []
    while len(greeted) < members:
        sock = _accept(listener, process, deadline, log)
        link = WorkerLink(seat.name, sock, log)
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


LEAD_S = 0.005  # from the command to the common start: every worker has read it by then


class Team:
    """A contender's ring. `links[i]` is member i; `order` is the ring, clockwise."""

    def __init__(self, name: str, links: Sequence[WorkerLink]) -> None:
        self.name = name
        self.links: list[WorkerLink] = []
        self.order: list[int] = []
        self._epoch = 0
        for link in links:
            self.add(link)

    def add(self, link: WorkerLink) -> None:
        """One more member, at the end of the ring; `join` makes it one."""
        self.order.append(len(self.links))
        self.links.append(link)

    @property
    def active(self) -> list[WorkerLink]:
        """The members of the ring, clockwise."""
        return [self.links[member] for member in self.order]

    def join(self, order: Sequence[int] | None = None) -> float:
        """Form a ring of these members under a new epoch; seconds from a common start until all are ready."""
        self.order = list(self.order if order is None else order)
        start = time.monotonic() + LEAD_S
        return self.last(ask(self.active, {**self.membership("join"), "at": start})) - start

    def membership(self, what: str) -> dict[str, Any]:
        """The command to join the ring of `order` under a new epoch."""
        self._epoch += 1
        ring = [(member, self.links[member].address) for member in self.order]
        return {"do": what, "epoch": self._epoch, "ring": ring}

    def prepare(self, size: int) -> None:
        """Allocate for `size` bytes."""
        ask(self.active, {"do": "prepare", "bytes": size})

    def check(self) -> None:
        """Sum known values. Raises DataCorruption if a sum is wrong."""
        for link, answer in zip(self.active, ask(self.active, {"do": "check"}), strict=True):
            if wrong := answer.get("wrong"):
                raise DataCorruption(f"bench: {link.name} has a wrong sum: {wrong}")
            _complete(link, answer)

    def start(self, times: int = 1) -> float:
        """Begin `times` all-reduces, one after the other; the common start."""
        start = time.monotonic() + LEAD_S
        for link in self.active:
            link.send({"do": "run", "times": times, "at": start})
        return start

    def time(self, times: int = 1) -> float:
        """Seconds of an all-reduce: from a common start to the slowest rank's end, over `times`."""
        start = self.start(times)
        return (self.last(collect(self.active)) - start) / times

    def spin(self, on: bool) -> None:
        """Start or stop a thread of pure Python in the first member's process."""
        ask(self.links[:1], {"do": "spin", "on": on})

    def close(self) -> None:
        """Kill what is left."""
        for link in self.links:
            link.close()

    def last(self, answers: Sequence[Answer]) -> float:
        """The moment when the last of the ring's members was done. Raises Retryable if one has failed."""
        for link, answer in zip(self.active, answers, strict=True):
            _complete(link, answer)
        return max(float(answer["t"]) for answer in answers)


def _complete(link: WorkerLink, answer: Answer) -> None:
    """Raises Retryable where an all-reduce failed that nobody disturbed."""
    if "raised" in answer:
        raise Retryable(f"bench: {link.name} raised {answer['raised']}: {answer['text']}")
