"""A process under test that obeys what a pipe says; the server that forks it has imported what it needs."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["ft_hsdp.ftar", "ft_hsdp.compat.torchft"])


class Forked:
    """Runs ``main(pipe, *arguments)``."""

    def __init__(self, main: Callable[..., None], *arguments: Any) -> None:
        self.pipe, theirs = _context.Pipe()
        self._process = _context.Process(target=main, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def hear(self) -> Any:
        """What it says next."""
        assert self.pipe.poll(30), "it says nothing"
        return self.pipe.recv()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        self._process.kill()
        self._process.join(10)
        self._process.close()
        self.pipe.close()
