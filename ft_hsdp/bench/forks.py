"""The bench's end of the nursery: every call forks one worker."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ft_hsdp.bench.link import GONE_S, Link
from ft_hsdp.bench.nursery import LARGEST
from ft_hsdp.bench.rank import Seat
from ft_hsdp.errors import Retryable
from ft_hsdp.launch.backend.processes import environment, last_line, tied

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
            command = tied("ft_hsdp.bench.nursery", str(theirs.fileno()), *modules)
            env = {**environment(), "GLOO_SOCKET_IFNAME": "lo"}  # FTAR is told its host; so is gloo
            self._process = subprocess.Popen(
                command, env=env, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            self._answer(LOAD_S)
        except BaseException:
            self.close()
            raise

    def fork(self, name: str, entry: str, seat: Seat) -> Link:
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
        return Link(name, ours, log, pidfd)

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
