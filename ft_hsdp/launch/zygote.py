"""The preloaded process from which ranks are forked: they start in a fraction of a second.

`python -m ft_hsdp.launch.zygote FD ENTRY RUN PRELOAD...` talks JSON lines over the socket FD:

    <- {"ready": true, "threads": 1} or {"error": "one line"}
    -> {"spawn": id, "env": {}, "run": path, "config": path, "log": path, "call": null or {...}}
    <- {"spawned": id, "pid": 1}     <- {"exited": id, "pid": 1, "code": -9}
    <- {"warm": id, "pid": 1}        -> {"call": {...}, "pid": 1}
    -> {"signal": 9, "pid": 1}

A call {"replica": 0, "run_id": "a", "restarts": 0, "log": path} tells a rank who it is: with its fork, or later.
One thread, no accelerator: a fork of either is broken. The path of the run is an argument only so that the
command line of every rank names the run to which it belongs.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ft_hsdp import config as configuration
from ft_hsdp.errors import EXIT_RETRYABLE, FtHsdpError
from ft_hsdp.launch.processes import die_with
from ft_hsdp.train.calling import Call, Calling

Entry = Callable[[configuration.Config, Calling, Path], int]
_LARGEST = 1 << 20  # bytes of one request


class Line:
    """A rank's end of its line to the server: where it is told who it is. From then on it logs as that."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._call: Call | None = None

    def heard(self) -> Call | None:
        """What the rank was told, if it was."""
        if self._call is None and select.select([self._sock], [], [], 0)[0]:
            self._take()
        return self._call

    def wait(self) -> Call:
        """Say that all is warm, and wait."""
        if self.heard() is None:
            self._sock.sendall(b"\n")
            self._take()
        assert self._call is not None
        return self._call

    def _take(self) -> None:
        with self._sock, self._sock.makefile("rb") as stream:
            line = stream.readline()
        if not line.endswith(b"\n"):
            sys.exit(EXIT_RETRYABLE)  # the server is gone: nobody can call any more
        told = json.loads(line)
        _redirect(Path(told.pop("log")))
        self._call = call = Call(**told)
        os.environ["TORCHELASTIC_RUN_ID"] = call.run_id
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(call.restarts)


class Zygote:
    """Serves one client; ends when the client does."""

    def __init__(self, sock: socket.socket, entry: Entry) -> None:
        self._sock = sock
        self._entry = entry
        self._children: dict[int, int] = {}  # pid -> id of the request
        self._lines: dict[int, socket.socket] = {}  # pid -> our end of its line
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Slurm and systemd tell every process of a job to end. The ranks leave, and the server goes after them.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Answer requests and report exits until the client closes its end."""
        pending, sock = b"", self._sock.fileno()
        while True:
            ours = {line.fileno(): pid for pid, line in self._lines.items()}
            readable, _, _ = select.select([sock, self._wake_read, *ours], [], [])
            if self._wake_read in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
            for fd in ours.keys() & set(readable):
                self._hear(ours[fd])
            self._reap()
            if sock not in readable:
                continue
            data = self._sock.recv(65536)
            if not data or len(pending) > _LARGEST:
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                self._handle(json.loads(line))

    def _handle(self, request: dict[str, Any]) -> None:
        if "signal" in request:
            if request["pid"] in self._children:  # not reaped yet, so the pid is still the child's
                os.kill(request["pid"], request["signal"])
            return
        if "spawn" not in request:
            self._call(request["pid"], request["call"])
            return
        try:
            pid, ours = self._fork(request)
        except OSError as error:  # no memory, descriptors or pids: the other ranks go on
            self._send({"failed": request["spawn"], "error": f"{error.strerror}"})
            return
        self._children[pid] = request["spawn"]
        self._lines[pid] = ours
        self._send({"spawned": request["spawn"], "pid": pid})

    def _fork(self, request: dict[str, Any]) -> tuple[int, socket.socket]:
        """A rank's pid, and our end of its line. Raises OSError."""
        parent = os.getpid()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                if request["call"] is not None:  # before it runs: it need not wait
                    ours.sendall(_encode(request["call"]))
                pid = os.fork()
            except OSError:
                ours.close()
                raise
            if pid == 0:
                ours.close()
                self._become(request, parent, theirs)
        return pid, ours

    def _call(self, pid: int, call: dict[str, Any]) -> None:
        """Tell a rank who it is; one that is gone has been reported, or will be."""
        line = self._lines.get(pid)
        if line is not None:
            with contextlib.suppress(ConnectionError):
                line.sendall(_encode(call))

    def _hear(self, pid: int) -> None:
        """A rank is warm, or has hung up."""
        said = b""
        with contextlib.suppress(ConnectionError):
            said = self._lines[pid].recv(64)
        if said:
            self._send({"warm": self._children[pid], "pid": pid})
        else:
            self._lines.pop(pid).close()

    def _reap(self) -> None:
        """Report every child that has ended."""
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            request, line = self._children.pop(pid, None), self._lines.pop(pid, None)
            if line is not None:
                line.close()
            if request is not None:
                self._send({"exited": request, "pid": pid, "code": os.waitstatus_to_exitcode(status)})

    def _send(self, message: dict[str, Any]) -> None:
        self._sock.sendall(_encode(message))

    def _become(self, request: dict[str, Any], parent: int, line: socket.socket) -> NoReturn:
        """In the child: shed what belongs to the server, run the entry, exit with its code."""
        code = EXIT_RETRYABLE
        try:
            die_with(parent)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for fd in (self._sock.detach(), self._wake_read, self._wake_write):
                os.close(fd)
            for other in self._lines.values():
                other.close()
            self._lines.clear()
            self._children.clear()
            _redirect(Path(request["log"]))
            os.environ.update(request["env"])
            config = configuration.load(Path(request["config"]))
            code = self._entry(config, Line(line), Path(request["run"]))
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else EXIT_RETRYABLE
        except FtHsdpError as error:
            code = error.exit_code
            print(f"{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201 - this is the rank's log
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)


def _encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _redirect(log: Path) -> None:
    """stdin from nowhere, stdout and stderr to the end of `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(os.devnull, "rb") as nothing, log.open("ab") as file:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # they are text files here


def _load(entry: str, preload: Sequence[str]) -> Entry:
    """Import everything that ranks need, with one thread."""
    module, _, function = entry.partition(":")
    for name in (*preload, module):
        importlib.import_module(name)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"the imports left {threads} threads running; a fork of them would hang")
    loaded: Entry = getattr(sys.modules[module], function)
    return loaded


def main(argv: Sequence[str]) -> int:
    """Load, then serve."""
    sock = socket.socket(fileno=int(argv[0]))
    try:
        entry = _load(argv[1], argv[3:])
    except BaseException as error:
        line = " ".join(f"{type(error).__name__}: {error}".split())
        sock.sendall(json.dumps({"error": f"cannot load {argv[1]}: {line}"}).encode() + b"\n")
        return EXIT_RETRYABLE
    gc.collect()
    gc.freeze()  # the children share these pages for as long as nobody writes to them
    zygote = Zygote(sock, entry)
    sock.sendall(b'{"ready": true}\n')
    with contextlib.suppress(ConnectionError):
        zygote.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
