"""Both ends of a worker: a process that does what the bench says over a socket, in JSON lines.

    <- {"address": "", "pid": 1}          once, when it is set up
    -> {...}        <- {...}              for each command
    <- {"error": "one line"}              when something fails; then the worker ends

The bench has a `WorkerLink` to each worker; `spawn_worker` starts one. The worker calls `run_worker`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

from ft_hsdp.bench.scope import spawn
from ft_hsdp.errors import EXIT_OK, EXIT_RETRYABLE, Retryable
from ft_hsdp.launch.backend.processes import last_line, tied

ANSWER_S = 120.0  # longest time for one answer
GONE_S = 10.0  # longest time for a killed process to go

Answer = dict[str, Any]


class WorkerLink:
    """Socket and life of one worker."""

    def __init__(self, name: str, sock: socket.socket, log: Path) -> None:
        self.name = name  # in messages
        self.address = ""
        self.pid = 0
        self._sock = sock
        self._log = log
        self._pidfd: int | None = None
        self._pending = b""

    def greet(self, answer: Answer) -> None:
        """Take the worker's first answer."""
        self.address, self.pid = answer["address"], answer["pid"]
        self._pidfd = os.pidfd_open(self.pid)  # it waits for us, so it is still that process

    def send(self, command: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Send a command, with copies of ``fds``. Raises Retryable if the worker is gone."""
        try:
            line = json.dumps(command).encode() + b"\n"
            if fds:
                socket.send_fds(self._sock, [line], fds)
            else:
                self._sock.sendall(line)
        except ConnectionError:
            raise self._gone() from None

    def kill(self) -> float:
        """SIGKILL the worker, and return the moment before. No other process can be hit."""
        assert self._pidfd is not None
        moment = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        return moment

    def close(self) -> None:
        """Kill the worker and wait until it is gone."""
        if self._pidfd is not None:
            self.kill()
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            poll.poll(GONE_S * 1e3)
            os.close(self._pidfd)
            self._pidfd = None
        self._sock.close()

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._sock.fileno()

    def read(self) -> Answer | None:
        """Take what has arrived; return an answer once it is whole.

        Raises:
            Retryable: The worker failed or is gone.
        """
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


def spawn_worker(
    stack: ExitStack,
    name: str,
    module: str,
    arguments: Sequence[str],
    log: Path,
    env: Mapping[str, str] | None = None,
    within: Callable[..., list[str]] | None = None,
) -> WorkerLink:
    """Start a module that serves the bench over a socket, whose number is its first argument.

    Args:
        stack: what ends the process and the link.
        name: of the worker in messages.
        module: what is run.
        arguments: after the socket.
        log: what it writes to.
        env: added to its environment.
        within: returns the command that runs the given words in a network namespace.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        command = tied(module, str(theirs.fileno()), *arguments)
        spawn(stack, within(*command) if within else command, log, env, (theirs.fileno(),))
    link = WorkerLink(name, ours, log)
    stack.callback(link.close)
    return link


def greet(links: Sequence[WorkerLink]) -> None:
    """Wait until all workers are set up. Raises Retryable."""
    for link, answer in zip(links, collect(links), strict=True):
        link.greet(answer)


def collect(links: Sequence[WorkerLink], timeout_s: float = ANSWER_S) -> list[Answer]:
    """Return one answer of each worker, in their order.

    Raises:
        Retryable: One of them failed, or did not answer within ``timeout_s``.
    """
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


def ask(links: Iterable[WorkerLink], command: Mapping[str, Any]) -> list[Answer]:
    """Have all workers do one thing; return their answers."""
    asked = list(links)
    for link in asked:
        link.send(command)
    return collect(asked)


Obey = Callable[[Mapping[str, Any]], Answer]
"""Carries out a command, and returns the answer."""

SetUp = Callable[[], tuple[Answer, Obey]]
"""Prepares a worker; returns what it says when it is set up, and what carries out its commands."""


def serve(sock: socket.socket, set_up: SetUp) -> int:
    """Set up, then obey until the bench closes its end; return the exit code."""
    with sock, sock.makefile("rw", encoding="utf-8") as stream:

        def say(answer: Answer) -> None:
            stream.write(json.dumps(answer) + "\n")
            stream.flush()

        try:
            greeting, obey = set_up()
            say({"address": "", "pid": os.getpid(), **greeting})
            for line in stream:
                say(obey(json.loads(line)))
        except Exception as error:  # of any kind: the bench gets it as one line, the log as a traceback
            traceback.print_exc()
            with contextlib.suppress(OSError):
                say({"error": " ".join(f"{type(error).__name__}: {error}".split())})
            return EXIT_RETRYABLE
    return EXIT_OK


def run_worker(set_up: SetUp) -> NoReturn:
    """Serve over the socket whose number is the first argument, and exit without waiting for other threads."""
    code = serve(socket.socket(fileno=int(sys.argv[1])), set_up)
    sys.stderr.flush()
    os._exit(code)
