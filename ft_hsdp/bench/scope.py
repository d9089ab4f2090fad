"""How every bench starts its processes, waits for them, and ends them again."""

from __future__ import annotations

import signal
import socket
import subprocess
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from ft_hsdp.bench.workers.link import WorkerLink
from ft_hsdp.errors import Retryable
from ft_hsdp.launch.backend.processes import environment, last_line, tied
from ft_hsdp.launch.run.directory import read_json

START_S = 60.0  # longest time until a server listens


class Scope(ABC):
    """A context: on entry `_begin` starts things one after the other, on exit they end in the opposite order.

    If one of them does not start, those before it end at once.
    """

    prefix = "ft-hsdp-bench-"  # of the temporary folder

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._begin(stack, Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=self.prefix))))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @abstractmethod
    def _begin(self, stack: ExitStack, folder: Path) -> None:
        """Start everything, and register on ``stack`` what ends it. ``folder`` is removed at the end."""


def spawn(
    stack: ExitStack,
    command: Sequence[str],
    log: Path,
    env: Mapping[str, str] | None = None,
    pass_fds: tuple[int, ...] = (),
) -> subprocess.Popen[bytes]:
    """Start a process that writes to ``log`` and is killed by ``stack``; ``env`` is added to its environment."""
    with log.open("ab") as file, signals_held_back():
        process = subprocess.Popen(
            command,
            env={**environment(), **(env or {})},
            pass_fds=pass_fds,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
        stack.callback(_kill, process)
    return process


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Deliver SIGINT and SIGTERM at the end of the block.

    An exception of a handler between the start of a process and the registration of what ends it would leave the
    process running. The signals are not blocked, because a child inherits the mask. Python runs handlers in the
    main thread, so the block changes nothing in other threads.
    """
    came: list[int] = []
    with ExitStack() as restored:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if callable(handler := signal.getsignal(number)):
                    restored.callback(signal.signal, number, handler)
                    signal.signal(number, lambda number, _: came.append(number))
        yield
    for each in came:
        signal.raise_signal(each)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def spawn_worker(
    stack: ExitStack,
    name: str,
    module: str,
    arguments: Sequence[str],
    log: Path,
    within: Callable[..., list[str]] | None = None,
) -> WorkerLink:
    """Start a module that takes orders over a socket, whose number is its first argument.

    Args:
        stack: what ends the process and the link.
        name: of the worker in messages.
        module: what is run.
        arguments: after the socket.
        log: what it writes to.
        within: returns the command that runs the given words in a network namespace.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        command = tied(module, str(theirs.fileno()), *arguments)
        spawn(stack, within(*command) if within else command, log, pass_fds=(theirs.fileno(),))
    link = WorkerLink(name, ours, log)
    stack.callback(link.close)
    return link


def listening(process: subprocess.Popen[bytes], file: Path, log: Path, who: str) -> dict[str, Any]:
    """Wait until a server has written ``file``, and return what it says. Raises Retryable."""
    deadline = time.monotonic() + START_S
    while (said := read_json(file)) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            raise Retryable(f"bench: {who} does not listen: {last_line(log) or 'it says nothing'}")
        time.sleep(0.02)
    return dict(said)
