"""The preloaded process from which ranks are forked: they start in a fraction of a second.

`python -m ft_hsdp.launch.backend.zygote FD ENTRY RUN PRELOAD...` talks JSON over the socket FD, one packet each:

    <- {"ready": true} or {"error": "one line"}
    -> {"spawn": id, "mark": text, "env": {}, "run": path, "config": path, "log": path, "called": bool}, with a
       descriptor
    <- {"spawned": id, "pid": 1} or {"failed": id, "error": "one line"}

The descriptor is the rank's socket to its supervisor. On it the rank reports that it is warm, and gets its
incarnation, at once if it is `called`, or later: {"replica": 0, "run_id": "a", "restarts": 0, "log": path}, with
"host" and the "hosts" of all ranks if its machine stands for several, and with the "fatal" units of the data.
A rank is forked by a process between, which ends. So the rank becomes a child of the supervisor, not of this
process, and dies only with the supervisor. This process has one thread and uses no accelerator: neither survives a
fork. The path of the run is an argument only so that the command line of every rank names its run.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ft_hsdp import config as configuration
from ft_hsdp.core.restart import IncarnationId
from ft_hsdp.errors import EXIT_RETRYABLE, FtHsdpError, one_line
from ft_hsdp.launch.backend import rank_end
from ft_hsdp.launch.run.directory import open_log
from ft_hsdp.lifetime import die_with, forgiving, leave, outlive_notices, stop_signals, wear
from ft_hsdp.train.identity import FATAL_VARIABLE, HOST_VARIABLE, HOSTS_VARIABLE, IncarnationSource

Entry = Callable[[configuration.Config, IncarnationSource, Path], int]
_LARGEST = 1 << 20  # bytes of one request


class AssignmentLine:
    """A rank's end of the socket on which its supervisor assigns it an incarnation (`IncarnationSource`)."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.incarnation: IncarnationId | None = None  # if it is known here

    def poll(self) -> IncarnationId | None:
        """Return the incarnation if the supervisor has assigned one; does not block."""
        if self.incarnation is None:
            poll = select.poll()  # select knows descriptors below 1024 only
            poll.register(self._sock, select.POLLIN)
            if poll.poll(0):
                self.take()
        return self.incarnation

    def wait(self) -> IncarnationId:
        """Tell the supervisor that this rank is warm, and return its incarnation. Blocks without an end."""
        if self.poll() is None:
            with contextlib.suppress(OSError):  # the supervisor is gone: taking says so
                self._sock.sendall(b"\n")
            self.take()
        assert self.incarnation is not None
        return self.incarnation

    def take(self) -> None:
        """Wait for the incarnation, and log as a rank of it from then on; end this process if there is none."""
        with self._sock, self._sock.makefile("rb") as stream:
            line = stream.readline()
        if not line.endswith(b"\n"):
            sys.exit(EXIT_RETRYABLE)
        assignment = json.loads(line)
        _redirect(Path(assignment.pop("log")))
        if host := assignment.pop("host", ""):
            os.environ[HOST_VARIABLE] = host
        if hosts := assignment.pop("hosts", ()):
            os.environ[HOSTS_VARIABLE] = ",".join(hosts)
        os.environ[FATAL_VARIABLE] = json.dumps(assignment.pop("fatal", ()))
        self.incarnation = incarnation = IncarnationId(**assignment)
        os.environ["TORCHELASTIC_RUN_ID"] = incarnation.run_id
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(incarnation.restarts)


class Zygote:
    """Serves one client, and ends when the client closes its connection."""

    def __init__(self, sock: socket.socket, entry: Entry) -> None:
        self._sock = sock
        self._entry = entry
        self._supervisor = os.getppid()
        # Slurm and systemd tell every process of a job to end. The ranks leave, and the server goes after them.
        outlive_notices()
        self._before = {number: signal.signal(number, signal.SIG_IGN) for number in stop_signals()}

    def serve(self) -> None:
        """Answer requests until the client closes its end."""
        while True:
            data, lines, _, _ = socket.recv_fds(self._sock, _LARGEST, 1)
            if not data:
                return
            request = json.loads(data)
            try:
                if not lines:  # it was lost on its way
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                pid = self._fork(request, lines[0])
            except OSError as error:  # no memory, descriptors or pids: the other ranks go on
                answer = {"failed": request["spawn"], "error": f"{error.strerror}"}
            else:
                answer = {"spawned": request["spawn"], "pid": pid}
            finally:
                for line in lines:
                    os.close(line)
            self._sock.sendall(json.dumps(answer).encode())

    def _fork(self, request: dict[str, Any], line: int) -> int:
        """Fork a rank, which becomes the supervisor's child, and return its pid; raise OSError if that fails."""
        reader, writer = os.pipe()
        try:
            between = os.fork()
            if between == 0:
                self._between(request, line, (reader, writer))
            os.close(writer)
            writer = -1
            data = os.read(reader, 64)
            os.waitpid(between, 0)  # it has ended: the kernel has found the rank another parent
        finally:
            for fd in (reader, writer):
                if fd >= 0:
                    os.close(fd)
        pid = int(data or b"0")
        if pid <= 0:
            number = -pid or errno.ECHILD
            raise OSError(number, os.strerror(number))
        return pid

    def _between(self, request: dict[str, Any], line: int, pipe: tuple[int, int]) -> NoReturn:
        """In the process between: fork the rank, write its pid into the pipe, and end."""
        between = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            pid = -(error.errno or errno.EAGAIN)
        if pid == 0:
            for fd in pipe:
                os.close(fd)
            self._become(request, between, socket.socket(fileno=line))
        os.write(pipe[1], str(pid).encode())
        os._exit(0)

    def _become(self, request: dict[str, Any], between: int, line: socket.socket) -> NoReturn:
        """In the rank: close what belongs to the server, run the entry, exit with its code."""
        code, ours = EXIT_RETRYABLE, AssignmentLine(line)
        try:
            while os.getppid() == between:  # until it has ended
                time.sleep(0.0002)
            die_with(self._supervisor)
            for number, handler in self._before.items():
                signal.signal(number, handler)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.close(self._sock.detach())
            _redirect(Path(request["log"]))
            rank_end.reserve()
            os.environ.update(request["env"])
            wear(request["mark"])
            config = configuration.load(Path(request["config"]))
            if request["called"]:
                ours.take()
            code = self._entry(config, ours, Path(request["run"]))
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else EXIT_RETRYABLE
        except FtHsdpError as error:
            code = error.exit_code
            self._tell(request, ours, error)
            print(f"{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201 - this is the rank's log
        except BaseException as error:
            self._tell(request, ours, error)
            traceback.print_exc()
        finally:
            leave(code)

    def _tell(self, request: dict[str, Any], line: AssignmentLine, error: BaseException) -> None:
        """In the rank: write down which error ends it, if it is a rank of an incarnation."""
        incarnation = line.incarnation
        if incarnation is not None:
            run, rank = Path(request["run"]), int(request["env"]["RANK"])
            rank_end.tell(run, incarnation.replica, rank, str(incarnation), error)


def _redirect(log: Path) -> None:
    """Read stdin from /dev/null, and append stdout and stderr to `log`; a full or hanging disk loses output."""
    with open(os.devnull, "rb") as nothing, open_log(log) as file:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = forgiving(1, patient=True), forgiving(2, patient=True)


def _load(entry: str, preload: Sequence[str]) -> Entry:
    """Import everything that ranks need, with one thread."""
    module, _, function = entry.partition(":")
    for name in (*preload, module):
        importlib.import_module(name)
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(1)
            if torch.cuda.is_initialized():
                raise RuntimeError(f"the import of {name} uses a GPU, which a fork of it could not")
        threads = len(os.listdir("/proc/self/task"))
        if threads != 1:
            raise RuntimeError(f"the import of {name} left {threads} threads running; a fork of them would hang")
    loaded: Entry = getattr(sys.modules[module], function)
    return loaded


def main(argv: Sequence[str]) -> int:
    """Load the entry point, then fork ranks on request."""
    sock = socket.socket(fileno=int(argv[0]))
    try:
        entry = _load(argv[1], argv[3:])
    except BaseException as error:
        line = one_line(f"{type(error).__name__}: {error}")
        sock.sendall(json.dumps({"error": f"cannot load {argv[1]}: {line}"}).encode())
        return EXIT_RETRYABLE
    gc.collect()
    gc.freeze()  # the children share these pages until a process writes to them
    zygote = Zygote(sock, entry)
    sock.sendall(b'{"ready": true}')
    with contextlib.suppress(ConnectionError):
        zygote.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
