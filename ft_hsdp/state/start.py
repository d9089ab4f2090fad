"""Start: a state agent in a process of its own, on a host that has none yet."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from ft_hsdp.state import messages

TOKEN_VARIABLE = "FT_HSDP_TOKEN"  # noqa: S105 - the name of a variable


@dataclass(slots=True)
class Starter:
    """Starts the agent of ``replica`` at ``host``; it logs to ``log``.

    It ends with the process ``guard``, and when no rank was there for ``linger_s`` seconds.
    """

    token: str
    replica: int
    host: str
    guard: int
    log: Path
    linger_s: float
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)  # they outlive this process

    def ensure(self, port: int = 0) -> None:
        """Start one on ``port`` (0: any), unless one listens already. `connect` waits for it."""
        if self._listens():
            return
        self.log.parent.mkdir(parents=True, exist_ok=True)
        place = ("--replica", str(self.replica), "--host", self.host, "--port", str(port))
        life = ("--guard", str(self.guard), "--linger", str(self.linger_s))
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "ft_hsdp.state.agent", *place, *life],
                env={**os.environ, TOKEN_VARIABLE: self.token},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.started = [p for p in self.started if p.poll() is None] + [process]

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            try:
                sock.connect(messages.agent_name(self.token, self.replica))
            except OSError:
                return False
            return True
