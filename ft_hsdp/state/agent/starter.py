"""The process of a state agent, as a rank sees it: which one listens, and how another one is started.

`Starter` starts the agent of a replica in a process of its own, and replaces one that no longer answers.
`connect_newest` finds the agent that a rank has to talk to.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from ft_hsdp import caller_gate
from ft_hsdp.jsonl import open_to_append
from ft_hsdp.lifetime import unmarked
from ft_hsdp.secret import TOKEN_VARIABLE
from ft_hsdp.state.agent import messages

LOAD_S = 60.0  # after which an agent that was started and does not listen is killed
KILLED_S = 5.0  # to wait for a killed agent to be gone: freeing much memory takes time
_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid

Listener: TypeAlias = tuple[int, int]  # an agent that listens: its generation, its pid; pid 0: unknown


def connect_newest(sock: socket.socket, token: str, replica: int, name: str = "") -> int:
    """Connect ``sock`` to the newest agent of a replica on this host, and return its generation.

    Args:
        name: That of this host, if its machine has several.

    Raises:
        BlockingIOError: An agent is there, but its queue of connections is full (a non-blocking ``sock``).
        OSError: No agent is there.
    """
    for generation in reversed(range(messages.GENERATIONS)):
        try:
            sock.connect(messages.agent_name(token, replica, generation, name))
        except ConnectionRefusedError:
            continue
        return generation
    raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


@dataclass(slots=True)
class Starter:
    token: str
    replica: int
    host: str  # at which the agent serves snapshots over HTTP
    guard: int | None  # the agent ends with the process of this id; None: `end` ends it, or `linger_s`
    log: Path
    linger_s: float  # the agent ends when no rank was connected for so long
    tls: str = "auto"  # network.tls
    name: str = ""  # of this host, if its machine has several
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)  # agents outlive this process
    began: float = 0.0  # when the last one was started

    def ensure(self, port: int = 0) -> Listener | None:
        """Start an agent on ``port`` (0: any), unless one listens or is being started. Does not wait for it.

        Returns:
            The one that listens already.
        """
        found = self._found()
        if found is None and not self._loading:
            self._start(port, 0)
        return found

    def renew(self, silent: Listener | None, port: int = 0) -> str:
        """Kill an agent that listens but does not answer, and start another. Blocks for at most KILLED_S.

        An agent that does not die keeps its name and port; the new one gets the next name.

        Args:
            silent: The agent that listened before it was asked, from `ensure`. One that has come to listen since
                then had less time to answer, and stays.

        Returns:
            What was done, in words; "" if nothing had to be replaced.
        """
        found = self.ensure(port)
        if found is None or found != silent:
            return ""
        generation, pid = found
        if self._kill(pid):
            self._start(port, 0)
            return f"the state agent (pid {pid}) did not answer and was killed, another one is started"
        if generation + 1 < messages.GENERATIONS:
            self._start(0, generation + 1)
            return f"the state agent (pid {pid}) neither answers nor dies, another one is started beside it"
        return ""

    def end(self) -> None:
        """Have an agent end that outlives who started its ranks: the job has ended. Does not wait for it."""
        found = self._found() if self.guard is None else None
        if found is not None and found[1] > 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(found[1], signal.SIGTERM)

    @property
    def _loading(self) -> bool:
        """Whether an agent that was started here still runs, asked when none listens. Kills one after LOAD_S."""
        for process in tuple(self.started):  # in place: the writer's thread may be adding one
            if process.poll() is not None:
                with contextlib.suppress(ValueError):  # that thread has removed it
                    self.started.remove(process)
        if self.started and time.monotonic() - self.began > LOAD_S:
            self.started[-1].kill()
            return False
        return bool(self.started)

    def _start(self, port: int, generation: int) -> None:
        place = ("--replica", str(self.replica), "--host", self.host, "--port", str(port))
        name = ("--generation", str(generation), *(("--name", self.name) if self.name else ()))
        life = (
            *(() if self.guard is None else ("--guard", str(self.guard))),
            "--linger",
            str(self.linger_s),
            "--tls",
            self.tls,
            "--hello",
            str(caller_gate.hello_s()),
        )
        # A forked rank has its fork server's session, which no terminal ends; its supervisor reaps all in it.
        detached = os.getsid(0) != os.getsid(os.getppid())
        with open_to_append(self.log) as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "ft_hsdp.state.agent.server", *place, *name, *life],
                env={**unmarked(), TOKEN_VARIABLE: self.token},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=not detached,
                process_group=0 if detached else None,
            )
        self.started.append(process)
        self.began = time.monotonic()

    def _found(self) -> Listener | None:
        """Return the newest agent that listens, or None. Never blocks."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            try:
                generation = connect_newest(sock, self.token, self.replica, self.name)
                pid = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[0]
            except BlockingIOError:
                return self._crowded()
            except OSError:
                return None
            return generation, int(pid)

    def _crowded(self) -> Listener:
        """Return an agent whose queue of connections is full.

        The pid is known only if the agent was started here.
        """
        living = [process.pid for process in self.started if process.poll() is None]
        return 0, living[-1] if living else 0

    def _kill(self, pid: int) -> bool:
        if pid <= 0:
            return False
        try:
            process = os.pidfd_open(pid)
        except OSError:
            return self._found() is None
        try:
            if self._found() not in [(g, pid) for g in range(messages.GENERATIONS)]:
                return self._found() is None  # that agent ended meanwhile, and its pid may be another process's
            signal.pidfd_send_signal(process, signal.SIGKILL)
            poll = select.poll()
            poll.register(process, select.POLLIN)
            poll.poll(KILLED_S * 1e3)
        except ProcessLookupError:
            pass
        finally:
            os.close(process)
        return self._found() is None
