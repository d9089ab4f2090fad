"""The members of a storm as its driver sees them, and the process from which they are forked."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.ftar.storm_proxy import Proxy

Message = dict[str, Any]


class Member:
    """A forked member as the driver sees it."""

    def __init__(self, number: int, link: socket.socket, pid: int, pidfd: int, log: Path) -> None:
        self.number = number
        self.link = link
        self.pid = pid
        self.pidfd = pidfd
        self.log = log
        self.said: list[Message] = []
        self.listening = ""
        self.address = ""
        self.proxy: Proxy | None = None
        self.stopped = False
        self.alive = True

    def tell(self, **command: Any) -> None:
        self.link.send(json.dumps(command).encode())

    def signal(self, number: int) -> None:
        """Send a signal to it, and to no other that may have its pid."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)


class Nursery:
    """Forks members from a process that has imported torch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        script = str(Path(__file__).with_name("storm_worker.py"))
        with theirs, (folder / "nursery.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, script, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self._sock.settimeout(120)
        threads = json.loads(self._sock.recv(1 << 16))["threads"]
        assert threads == 1, f"{threads} threads in the process that forks"

    def fork(self, number: int) -> Member:
        self._count += 1
        log = self._folder / f"{self._count}-member-{number}.log"
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, log.open("wb") as file:
            message = json.dumps({"member": number}).encode()
            socket.send_fds(self._sock, [message], [theirs.fileno(), file.fileno()])
        pid, (pidfd,), _, _ = socket.recv_fds(self._sock, 1 << 16, 1)
        return Member(number, ours, int(pid), pidfd, log)

    def close(self) -> None:
        self._sock.close()
        self._process.wait(30)
