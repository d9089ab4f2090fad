"""The processes of a bench: how they are started, told what to do, and ended.

A worker is a process that does what the bench says over a socket, in JSON messages:

    <- {"address": ""}            once, when it is set up
    -> {...}        <- {...}      for each command
    <- {"error": "one line"}      when something fails; then the worker ends

The bench has a `WorkerLink` to each worker; `spawn_worker` starts one. The worker calls `run_worker`. A worker
waits for commands without using a processor, and dies with the bench.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn, Self

from ft_hsdp.errors import EXIT_OK, EXIT_RETRYABLE, Retryable
from ft_hsdp.launch.backend.processes import environment, last_line, tied
from ft_hsdp.launch.run.directory import read_json

START_S = 60.0  # longest time until a server listens
ANSWER_S = 120.0  # longest time for one answer
PREFIX = "ft-hsdp-bench-"  # of temporary folders
LOOPBACK = "127.0.0.1"

Process = subprocess.Popen[bytes]
Answer = dict[str, Any]


class Scope(ABC):
    """A context: on entry `_begin` starts things one after the other, on exit they end in the opposite order.

    If one of them does not start, those before it end at once.
    """

    prefix = PREFIX

    def __enter__(self) -> Self:
        self.stack = ExitStack()  # what ends everything
        try:
            self._begin(Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix=self.prefix))))
        except BaseException:
            self.stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    @abstractmethod
    def _begin(self, folder: Path) -> None:
        """Start everything, and register on ``stack`` what ends it. ``folder`` is removed at the end."""


@contextmanager
def scratch() -> Iterator[tuple[ExitStack, Path]]:
    """Yield a stack that ends what is registered on it, and a temporary folder that is removed after that."""
    with ExitStack() as stack:
        yield stack, Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX)))


def kill(process: Process) -> None:
    """Kill a process and wait until it is gone."""
    process.kill()
    process.wait()


def spawn(
    stack: ExitStack,
    command: Sequence[str],
    log: Path,
    env: Mapping[str, str] | None = None,
    pass_fds: tuple[int, ...] = (),
    end: Callable[[Process], None] = kill,
    cwd: Path | None = None,
) -> Process:
    """Start a process in a session of its own, so that Ctrl-C reaches the bench alone.

    Args:
        stack: what calls ``end`` with the process.
        command: what is run.
        log: the file that takes its output.
        env: added to its environment.
        pass_fds: descriptors that it inherits.
        end: ends it.
        cwd: its working directory; None: that of the bench.
    """
    with log.open("ab") as file:
        process = subprocess.Popen(
            command,
            env={**environment(), **(env or {})},
            pass_fds=pass_fds,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            cwd=cwd,
        )
    stack.callback(end, process)
    return process


def listening(process: Process, file: Path, log: Path, who: str) -> dict[str, Any]:
    """Wait until a server has written ``file``, and return what it says. Raises Retryable."""
    deadline = time.monotonic() + START_S
    while (said := read_json(file)) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            raise Retryable(f"bench: {who} does not listen: {last_line(log) or 'it says nothing'}")
        time.sleep(0.02)
    return dict(said)


class WorkerLink:
    """The bench's end of one worker."""

    def __init__(self, name: str, line: Connection, log: Path) -> None:
        self.name = name  # in messages
        self.address = ""
        self.line = line
        self._log = log

    def send(self, command: Mapping[str, Any]) -> None:
        """Send a command. Raises Retryable if the worker is gone."""
        try:
            self.line.send_bytes(json.dumps(command).encode())
        except OSError:
            raise self._gone() from None

    def receive(self) -> Answer:
        """Return the next answer. Raises Retryable if the worker failed or is gone."""
        try:
            answer: Answer = json.loads(self.line.recv_bytes())
        except (EOFError, OSError):
            raise self._gone() from None
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
) -> WorkerLink:
    """Start a module that serves the bench over a socket, whose number is its first argument.

    Args:
        stack: what ends the process and the link.
        name: of the worker in messages.
        module: what is run.
        arguments: after the socket.
        log: what it writes to.
        env: added to its environment.
    """
    ours, theirs = Pipe()
    with theirs:
        spawn(stack, tied(module, str(theirs.fileno()), *arguments), log, env, (theirs.fileno(),))
    stack.callback(ours.close)
    return WorkerLink(name, ours, log)


def greet(links: Sequence[WorkerLink]) -> None:
    """Wait until all workers are set up. Raises Retryable."""
    for link, answer in zip(links, collect(links), strict=True):
        link.address = answer.get("address", "")


def collect(links: Sequence[WorkerLink]) -> list[Answer]:
    """Return one answer of each worker, in their order.

    Raises:
        Retryable: One of them failed, or did not answer within `ANSWER_S`.
    """
    deadline = time.monotonic() + ANSWER_S
    answers: dict[WorkerLink, Answer] = {}
    waiting: dict[Any, WorkerLink] = {link.line: link for link in links}
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise Retryable(f"bench: {next(iter(waiting.values())).name} did not answer within {ANSWER_S:g} s")
        for line in ready:
            link = waiting.pop(line)
            answers[link] = link.receive()
    return [answers[link] for link in links]


def ask(links: Iterable[WorkerLink], command: Mapping[str, Any]) -> list[Answer]:
    """Have all workers do one thing; return their answers."""
    asked = list(links)
    for link in asked:
        link.send(command)
    return collect(asked)


Obey = Callable[[Mapping[str, Any]], Answer]
"""Carries out a command, and returns the answer."""


def run_worker(set_up: Callable[[], tuple[Answer, Obey]]) -> NoReturn:
    """Serve over the socket whose number is the first argument, and exit without waiting for other threads.

    ``set_up`` prepares the worker; it returns what the worker says then, and what carries out its commands.
    """
    line = Connection(int(sys.argv[1]))
    code = EXIT_OK
    try:
        answer, obey = set_up()
        line.send_bytes(json.dumps(answer).encode())
        for command in _commands(line):
            line.send_bytes(json.dumps(obey(command)).encode())
    except Exception as error:  # of any kind: the bench gets it as one line, the log as a traceback
        traceback.print_exc()
        said = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
        with contextlib.suppress(OSError):
            line.send_bytes(json.dumps(said).encode())
        code = EXIT_RETRYABLE
    sys.stderr.flush()
    os._exit(code)


def _commands(line: Connection) -> Iterator[Mapping[str, Any]]:
    """Yield commands until the bench closes its end."""
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            yield json.loads(line.recv_bytes())
