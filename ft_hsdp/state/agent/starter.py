"""The process of a state agent, as a rank sees it: which one listens, and how another one is started.

`Starter` starts the agent of a replica in a process of its own, and replaces one that no longer answers. To load
what an agent needs takes most of a second of CPU time, so a rank that was just forked from a process which has
loaded it forks the agent (`ForkedAgent`): nothing of the user's has run there yet, and there is one thread.
`connect_newest` finds the agent that a rank has to talk to. `visit` has it wait for ranks that may come back late.
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
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, TypeAlias

from ft_hsdp import caller_gate, handshake
from ft_hsdp.errors import EXIT_RETRYABLE
from ft_hsdp.handshake import Purpose
from ft_hsdp.jsonl import open_to_append
from ft_hsdp.lifetime import UNMARKED, entitle, forgiving, unmarked, wear
from ft_hsdp.secret import TOKEN_VARIABLE
from ft_hsdp.state.agent import messages

LOAD_S = 60.0  # after which an agent that was started and does not listen is killed
VISIT_S = 2.0  # for each part of an agent's answer to a visit
KILLED_S = 5.0  # to wait for a killed agent to be gone: freeing much memory takes time
_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid

AgentMain: TypeAlias = Callable[[Sequence[str]], int]  # `server.main`
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


def visit(token: str, replica: int, name: str = "") -> None:
    """Have an agent of this host go on as if a rank of its replica had been there until now. Blocks.

    Args:
        name: That of this host, if its machine has several.

    Raises:
        OSError: No agent is there, or it is too late.
        ProtocolViolation: What listens there does not know the token.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(VISIT_S)
        connect_newest(sock, token, replica, name)
        handshake.call_blocking(sock, token, Purpose.AGENT)
        sock.sendall(messages.frame(messages.Hello(0, 1, 0, "visit")))


@dataclass(slots=True)
class Starter:
    token: str
    replica: int
    host: str  # at which the agent serves snapshots over HTTP
    guard: int | None  # the agent ends with the process of this id; None: `end` ends it, or `linger_s`
    log: Path
    linger_s: float  # the agent ends when no rank was connected, and nobody has visited it, for so long
    tls: str = "auto"  # network.tls
    name: str = ""  # of this host, if its machine has several
    started: list[subprocess.Popen[bytes] | ForkedAgent] = field(default_factory=list)  # they outlive this process
    began: float = 0.0  # when the last one was started

    def ensure(self, port: int = 0, *, fork: AgentMain | None = None) -> Listener | None:
        """Start an agent, unless one listens or is being started. Does not wait for it.

        Args:
            port: On which it serves snapshots; 0: any.
            fork: It may be a fork of this process, which has loaded what an agent needs, if this has one thread:
                `server.main`.

        Returns:
            The one that listens already.
        """
        found = self._found()
        if found is None and not self._loading:
            self._start(port, 0, fork if len(os.listdir("/proc/self/task")) == 1 else None)
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

    def _start(self, port: int, generation: int, fork: AgentMain | None = None) -> None:
        name = ("--replica", str(self.replica), *(("--name", self.name) if self.name else ()))
        place = ("--host", self.host, "--port", str(port), "--generation", str(generation))
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
        command = [sys.executable, "-m", "ft_hsdp.state.agent.server", *name, *place, *life]
        with open_to_append(self.log) as log:
            if fork is not None:
                self.started.append(ForkedAgent(fork, command, self.token, log.fileno(), detached))
            else:
                process = subprocess.Popen(
                    command,
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


class ForkedAgent:
    """An agent that is a fork of this process, with the methods of `subprocess.Popen` that `Starter` needs."""

    def __init__(self, main: AgentMain, command: list[str], token: str, log: int, detached: bool) -> None:
        """Fork it.

        Args:
            main: What it runs.
            command: The command line that would start it, which it shows.
            token: The worker's.
            log: The descriptor of its log.
            detached: It is in a session that no terminal ends.

        Raises:
            OSError: There is no memory or no pid for it.
        """
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _become(main, command, token, log, detached)

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal; None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)  # not reaped yet: no other process has its pid


def _become(main: AgentMain, command: list[str], token: str, log: int, detached: bool) -> NoReturn:
    """In the fork: keep nothing of the rank, be the agent, and end with its exit code."""
    code = EXIT_RETRYABLE
    try:
        if detached:
            os.setpgid(0, 0)
        else:
            os.setsid()
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, own in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, own)
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > 2:
                with contextlib.suppress(OSError):  # the one of this list is closed
                    os.close(descriptor)
        sys.stdout, sys.stderr = forgiving(1), forgiving(2)
        wear(UNMARKED)
        entitle(command)
        os.environ[TOKEN_VARIABLE] = token
        code = main(command[3:])
    except BaseException:
        traceback.print_exc()  # into its log
    finally:
        os._exit(code)
