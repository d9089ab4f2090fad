"""The bench's end of a worker.

The bench's end of the nursery: every call forks one worker.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ft_hsdp.bench.contenders.base import WorkerSeat
from ft_hsdp.bench.workers.nursery import LARGEST
from ft_hsdp.errors import Retryable
from ft_hsdp.launch.backend.processes import environment, last_line, tied

ANSWER_S = 120.0  # longest time for one answer
GONE_S = 10.0  # longest time for a killed process to go

Answer = dict[str, Any]


class WorkerLink:
    """Socket and life of one worker. `name` says which one it is, as a user would."""

    def __init__(self, name: str, sock: socket.socket, log: Path, pidfd: int | None = None) -> None:
        self.name = name
        self.address = ""
        self.pid = 0
        self._sock = sock
        self._log = log
        self._pidfd = pidfd
        self._pending = b""

    def greet(self, answer: Answer) -> None:
        """Take the worker's first words."""
        self.address, self.pid = answer["address"], answer["pid"]
        if self._pidfd is None:
            self._pidfd = os.pidfd_open(self.pid)  # it waits for us, so it is still that process

    def send(self, command: Mapping[str, Any]) -> None:
        """Give it something to do. Raises Retryable if it is gone."""
        try:
            self._sock.sendall(json.dumps(command).encode() + b"\n")
        except ConnectionError:
            raise self._gone() from None

    def kill(self) -> float:
        """SIGKILL it; the moment before. No other process can be hit."""
        assert self._pidfd is not None
        moment = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        return moment

    def close(self) -> None:
        """Kill it, wait until it is gone."""
        if self._pidfd is not None:
            self.kill()
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            poll.poll(GONE_S * 1e3)
            os.close(self._pidfd)
            self._pidfd = None
        self._sock.close()

    def fileno(self) -> int:
        """Return the socket's file descriptor."""
        return self._sock.fileno()

    def read(self) -> Answer | None:
        """Take what has arrived; an answer, once it is whole. Raises Retryable if the worker failed or is gone."""
        try:
            data = self._sock.recv(65536)
        except ConnectionError:
            data = b""
        if not data:
            raise self._gone()
        self._pending += data
        if not self._pending.endswith(b"\n"):
            return None
        answer: Answer = json.loads(self._pending)
        self._pending = b""
        if "error" in answer:
            raise Retryable(f"bench: {self.name} failed: {answer['error']}")
        return answer

    def _gone(self) -> Retryable:
        line = last_line(self._log)
        return Retryable(f"bench: {self.name} died" + (f": {line}" if line else ""))


def collect(links: Sequence[WorkerLink], timeout_s: float = ANSWER_S) -> list[Answer]:
    """One answer of each, in their order. Raises Retryable as soon as one of them fails, and at the deadline."""
    deadline = time.monotonic() + timeout_s
    answers: dict[WorkerLink, Answer] = {}
    with selectors.DefaultSelector() as waiting:  # select knows descriptors below 1024 only
        for each in links:
            waiting.register(each, selectors.EVENT_READ, each)
        while waiting.get_map():
            readable = waiting.select(max(0.0, deadline - time.monotonic()))
            if not readable:
                late = next(link for link in links if link not in answers)
                raise Retryable(f"bench: {late.name} did not answer within {timeout_s:g} s")
            for key, _ in readable:
                link: WorkerLink = key.data
                if (answer := link.read()) is not None:
                    answers[link] = answer
                    waiting.unregister(link)
    return [answers[link] for link in links]


def ask(links: Iterable[WorkerLink], command: Mapping[str, Any], timeout_s: float = ANSWER_S) -> list[Answer]:
    """Have all do one thing; their answers."""
    asked = list(links)
    for link in asked:
        link.send(command)
    return collect(asked, timeout_s)


LOAD_S = 120.0  # longest time for the imports
FORK_S = 10.0  # longest time for a fork


class Forks:
    """A preloaded process from which workers are forked; `folder` takes their logs."""

    def __init__(self, modules: Sequence[str], folder: Path) -> None:
        self._log = folder / "nursery.log"
        self._folder = folder
        self._count = 0
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, self._log.open("ab") as log:
            command = tied("ft_hsdp.bench.workers.nursery", str(theirs.fileno()), *modules)
            env = {**environment(), "GLOO_SOCKET_IFNAME": "lo"}  # FTAR is told its host; so is gloo
            self._process = subprocess.Popen(
                command, env=env, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            self._answer(LOAD_S)
        except BaseException:
            self.close()
            raise

    def fork(self, name: str, entry: str, seat: WorkerSeat) -> WorkerLink:
        """Start a worker; it greets once it is set up. Raises Retryable if it cannot be forked."""
        self._count += 1
        log = self._folder / f"{self._count}.log"
        message = json.dumps({"entry": entry, "seat": dataclasses.asdict(seat)}).encode()
        ours, theirs = socket.socketpair()
        with theirs, log.open("ab") as file:
            socket.send_fds(self._sock, [message], [theirs.fileno(), file.fileno()])
        try:
            _, (pidfd,) = self._answer(FORK_S)
        except BaseException:
            ours.close()
            raise
        return WorkerLink(name, ours, log, pidfd)

    def close(self) -> None:
        """End the nursery; what it forked and nobody killed dies with it."""
        self._sock.close()
        try:
            self._process.wait(GONE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self, timeout_s: float) -> tuple[dict[str, Any], list[int]]:
        self._sock.settimeout(timeout_s)
        try:
            message, fds, _, _ = socket.recv_fds(self._sock, LARGEST, 1)
        except TimeoutError:
            raise Retryable(f"bench: the nursery did not answer within {timeout_s:g} s") from None
        answer: dict[str, Any] = json.loads(message) if message else {"error": last_line(self._log) or "it died"}
        if "error" in answer:
            for fd in fds:
                os.close(fd)
            raise Retryable(f"bench: the nursery failed: {answer['error']}")
        return answer, fds
