"""How every bench starts its processes, waits for them, and ends them again."""

from __future__ import annotations

import signal
import subprocess
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from ft_hsdp.errors import Retryable
from ft_hsdp.launch.backend.processes import environment, last_line
from ft_hsdp.launch.run.directory import read_json

START_S = 60.0  # longest time until a server listens
PREFIX = "ft-hsdp-bench-"  # of temporary folders

Process = subprocess.Popen[bytes]


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
    with log.open("ab") as file, signals_held_back():
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


def listening(process: Process, file: Path, log: Path, who: str) -> dict[str, Any]:
    """Wait until a server has written ``file``, and return what it says. Raises Retryable."""
    deadline = time.monotonic() + START_S
    while (said := read_json(file)) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            raise Retryable(f"bench: {who} does not listen: {last_line(log) or 'it says nothing'}")
        time.sleep(0.02)
    return dict(said)
