"""A Ray cluster of this machine alone, as `ray start` makes it; it ends with the bench."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import psutil

from ft_hsdp.errors import Retryable
from ft_hsdp.launch.backend.processes import environment, free_port, last_line, tied

START_S = 60.0  # longest time until it runs
STOP_S = 30.0  # longest time for it to end
LEAVE_S = 2.0  # and for the processes below it to follow
STORE_BYTES = 80 << 20  # of its object store, the least: no rank uses it
STARTED = "Ray runtime started"


class Cluster:
    """A context: on entry a head node with all that Ray starts beside it, with a token; on exit nothing is left.

    address: for `submit`; env: what whoever connects needs in its environment.
    """

    def __init__(self) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.env: Mapping[str, str] = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}

    def __enter__(self) -> Cluster:
        with ExitStack() as stack:
            # Not longer: the path of a socket in it has at most 107 bytes.
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-")))
            command = [
                *tied("ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"),
                f"--port={self.address.rpartition(':')[2]}",
                f"--ray-client-server-port={free_port()}",
                f"--dashboard-port={free_port()}",
                f"--dashboard-agent-listen-port={free_port()}",
                f"--object-store-memory={STORE_BYTES}",
                f"--temp-dir={folder}",
            ]
            log = folder / "start.log"
            with log.open("wb") as file:
                self._process = subprocess.Popen(
                    command,
                    env={**environment(), **self.env, "TMPDIR": str(folder)},  # where its processes leave theirs
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                )
            stack.callback(self._end)
            deadline = time.monotonic() + START_S
            while STARTED not in log.read_text(errors="replace"):
                if self._process.poll() is not None:
                    raise Retryable(f"bench: the Ray cluster ended: {last_line(log)}")
                if time.monotonic() > deadline:
                    raise Retryable(f"bench: the Ray cluster does not run after {START_S:g} s: {last_line(log)}")
                time.sleep(0.05)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _end(self) -> None:
        """Have it end its processes; those that it leaves behind are killed."""
        below = []
        with contextlib.suppress(psutil.NoSuchProcess):
            below = psutil.Process(self._process.pid).children(recursive=True)
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()
        _, left = psutil.wait_procs(below, LEAVE_S)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, LEAVE_S)
