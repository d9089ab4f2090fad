"""A real etcd of one member, for tests: on free loopback ports, with its data in a folder that goes away."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import httpx

from lighthouse.ha.etcd import Etcd, EtcdEntry, EtcdUnreachable
from tests.support.programs import program
from tests.support.waiting import until

START_S = 20.0


def _reserved() -> socket.socket:
    """Hold a free port that the kernel gives to nobody: tests beside this one get one from it each moment."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        with contextlib.suppress(OSError):
            return socket.create_server(("127.0.0.1", random.randrange(1024, first)))


class EtcdServer:
    """An etcd that can be killed, stopped, started again and wiped; a context that leaves nothing behind."""

    def __init__(self) -> None:
        self._program = program("etcd", "etcd-server")
        self._folder = Path(tempfile.mkdtemp(prefix="ft_hsdp-etcd-"))
        with contextlib.ExitStack() as held:
            ports = [held.enter_context(_reserved()) for _ in range(2)]
            self.url, self._peer = (f"http://127.0.0.1:{sock.getsockname()[1]}" for sock in ports)
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def __enter__(self) -> EtcdServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self._folder)

    def start(self) -> None:
        """Run it, and wait until it serves."""
        flags = {
            "data-dir": self._folder / "data",
            "listen-client-urls": self.url,
            "advertise-client-urls": self.url,
            "listen-peer-urls": self._peer,
            "initial-advertise-peer-urls": self._peer,
            "initial-cluster": f"default={self._peer}",
            "logger": "zap",
            "log-level": "error",
        }
        command = [self._program, *(f"--{name}={value}" for name, value in flags.items())]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        until(self.serves, "etcd serves", START_S, (self._folder / "log").read_text)

    def serves(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/health", trust_env=False, timeout=2.0).json().get("health") == "true"
        return False

    def kill(self) -> None:
        """SIGKILL; its data stays."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(10)

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)


class LossyEtcd(Etcd):
    """A client that remembers its lease and writes, and while ``loses`` loses the answers to what it writes.

    While it ``repeats``, it writes all twice, as if one member of the cluster did not answer in time.
    """

    lease = 0
    loses = repeats = False
    campaigns = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.writes: list[tuple[Any, ...]] = []

    def grant(self, ttl_s: int) -> tuple[int, float]:
        """Return the lease and how long it holds."""
        self.lease, holds_s = super().grant(ttl_s)
        return self.lease, holds_s

    def create(self, key: str, value: str, lease: int) -> EtcdEntry:
        """Campaign."""
        found = super().create(key, value, lease)
        self.campaigns += 1
        self._lose()
        return found

    def put_if(self, *write: Any) -> dict[str, EtcdEntry] | None:
        """Write."""
        self.writes.append(write)
        for _ in range(1 + self.repeats):
            found = super().put_if(*write)
        self._lose()
        return found

    def _lose(self) -> None:
        if self.loses:
            raise EtcdUnreachable("the answer was lost")
