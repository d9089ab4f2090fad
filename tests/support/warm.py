"""Runs `launcher.py` and the Python processes that it starts as forks of a process that has imported everything.

A job of three replicas takes some 20 seconds of CPU time to start, half of it for imports: those of the launcher,
of the lighthouse and of the fork server. Here the launcher is forked from a template, one for each worker of
pytest, and what it starts with `python -m` is forked from the launcher. They are processes like others: with a
pid, a command line, an environment, descriptors and signals of their own, and children of who started them. Ranks
and state agents come from where they always come from.

With FT_HSDP_COLD_JOBS=1 each process is an interpreter of its own, as for a user.
"""

import asyncio
import atexit
import contextlib
import ctypes
import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

from ft_hsdp.launch.backend.processes import ONE_THREAD
from ft_hsdp.lifetime import forgiving

COLD = "FT_HSDP_COLD_JOBS"
SPACES = {"net": 0x40000000, "uts": 0x04000000, "ipc": 0x08000000, "mount": 0x00020000, "pid": 0x20000000}
PRELOAD = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "ft_hsdp.launch.backend.entry",
    "ft_hsdp.launch.run.replay",
    "ft_hsdp.launch.local",
    "lighthouse.__main__",
    "tests.support.warm",
    "room_for_command_lines" * 400,  # there is no such module, which is no error
]


class Forked:
    """A forked launcher, with what tests use of `subprocess.Popen`."""

    def __init__(
        self, command: Sequence[str], cwd: Path, env: Mapping[str, str], log: Path, inside: int | None
    ) -> None:
        arguments = (list(command), cwd, dict(env), log, inside)
        self._process = fork(_launch, arguments)
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired(["launcher.py"], timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # the template has reaped it, and has yet to say so
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Process = subprocess.Popen[bytes] | Forked


_libc = ctypes.CDLL(None, use_errno=True)
_template = forkserver.ForkServer()  # beside the one that other tests start, which imports nothing


def fork(target: Callable[..., None], arguments: tuple[Any, ...]) -> multiprocessing.context.ForkServerProcess:
    """Call `target` in a fork of the template, which is started at the first call; the process, which runs."""
    _template.set_forkserver_preload(PRELOAD)
    process = multiprocessing.get_context("forkserver").Process(target=target, args=arguments, daemon=True)
    with patch.dict(os.environ, ONE_THREAD):  # OpenMP reads it when torch is imported
        _template.ensure_running()
    with patch.object(forkserver, "connect_to_new_process", _template.connect_to_new_process):
        process.start()
    return process


def start(
    command: Sequence[str], folder: Path, log: Path, env: Mapping[str, str] = os.environ, inside: int | None = None
) -> Process:
    """Start a process in `folder`, which logs to `log`; a fork of the template if it is a launcher.

    inside: the pid of a process in whose namespaces it runs; `folder` is a folder there.
    """
    if COLD not in os.environ and command[0] == sys.executable and command[1].endswith("/launcher.py"):
        return Forked(command, folder, env, log, inside)
    if inside is not None:
        command, folder = [*enter(inside), f"--wdns={folder}", "setpriv", "--pdeathsig=KILL", *command], Path("/")
    with log.open("ab") as out:
        return subprocess.Popen(
            command, cwd=folder, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )


def enter(inside: int) -> list[str]:
    """The words before a command that runs in the namespaces of a process."""
    return ["nsenter", "--target", str(inside), *(f"--{space}" for space in SPACES)]


def move(target: int, *spaces: str) -> None:
    """Move this thread, and its later children, to some namespaces: of a pidfd, or the one of an open file."""
    if _libc.setns(target, sum(SPACES[space] for space in spaces)):
        raise OSError(ctypes.get_errno(), f"setns {spaces}")


def _enter(inside: int) -> None:
    """Go on in the namespaces of a process, as a child of this one, which passes signals on, and ends with it."""
    move(os.pidfd_open(inside), *SPACES)
    if child := os.fork():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: os.kill(child, number))
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    _libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def _launch(command: list[str], cwd: Path, env: dict[str, str], log: Path, inside: int | None) -> None:
    """In the fork: be the launcher."""
    with log.open("ab") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    if inside is not None:
        _enter(inside)
    os.setsid()
    _become(command, str(cwd), env)
    launcher, execute = os.getpid(), subprocess._fork_exec  # type: ignore[attr-defined]

    def fork_exec(args: Sequence[bytes | str], executables: Any, close_fds: bool, keep: Any, *rest: Any) -> int:
        words = [os.fsdecode(word) for word in args]
        if os.getpid() != launcher or words[:2] != [sys.executable, "-m"] or rest[-2] is not None:
            return int(execute(args, executables, close_fds, keep, *rest))
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            try:
                _child(words, keep, *rest)
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(1)
        return pid

    subprocess._fork_exec = fork_exec  # type: ignore[attr-defined]
    subprocess._USE_POSIX_SPAWN = False  # type: ignore[attr-defined]
    _run_and_exit(lambda: runpy.run_path(command[1], run_name="__main__"))


def _child(words: list[str], keep: tuple[int, ...], cwd: Any, env: Any, *rest: Any) -> NoReturn:
    """In a fork of the launcher: be what `subprocess` would have executed, in the same order."""
    from_stdin, _, _, to_stdout, _, to_stderr, _, errors, _, new_session, *_ = rest
    for fd, at in ((from_stdin, 0), (to_stdout, 1), (to_stderr, 2)):
        if fd != -1:
            os.dup2(fd, at)
    kept = sorted({fd for fd in keep if fd != errors} | {0, 1, 2})
    for low, high in zip([-1, *kept], [*kept, 1 << 20], strict=True):
        if low + 1 < high:  # CPython 3.11 closes everything for (0, 0)
            os.closerange(low + 1, high)
    for fd in kept:
        os.set_inheritable(fd, True)
    if new_session:
        os.setsid()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) not in (signal.SIG_IGN, signal.SIG_DFL, None):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    asyncio._set_running_loop(None)
    asyncio.set_event_loop(None)
    atexit._clear()
    texts = [os.fsdecode(each).partition("=") for each in env] if env is not None else None
    _become(words, cwd, dict(os.environ) if texts is None else {name: value for name, _, value in texts})
    os.execv = lambda _, args: _module(list(args))  # type: ignore
    _run_and_exit(lambda: _module(words))


def _module(words: list[str]) -> NoReturn:
    """Run `python -m MODULE ARGUMENTS`."""
    _name(words)
    sys.argv = words[2:]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'.*' found in sys.modules", RuntimeWarning)
        runpy.run_module(words[2], run_name="__main__", alter_sys=True)
    sys.exit(0)


def _become(words: list[str], cwd: Any, env: dict[str, str]) -> None:
    """Take the folder, the environment, the path of modules, the output and the command line of a new process."""
    if cwd is not None:
        os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    first = os.getcwd() if words[1] == "-m" else str(Path(words[1]).parent)
    before = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = dict.fromkeys([first, *before, *_installed()])
    sys.argv = words[1:]
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    multiprocessing.set_start_method(None, force=True)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    sys.stdout, sys.stderr = (forgiving(fd) for fd in (1, 2))
    _name(words)


def _installed() -> list[str]:
    """What is on the path of modules without PYTHONPATH and the folder of a script."""
    ours = (sys.prefix, sys.base_prefix)
    return [path for path in sys.path if path.startswith(ours) or path.endswith("site-packages")]


def _run_and_exit(run: Any) -> NoReturn:
    """Run a main program; end as the interpreter does."""
    code = 0
    try:
        run()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code & 0xFF)


def _name(words: Sequence[str]) -> None:
    """Show these words as the command line of this process: in the place of the template's, which has room."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    data = b"\0".join(os.fsencode(word) for word in words) + b"\0"
    assert len(data) < end - start, f"{len(data)} bytes of a command line, {end - start} have room"
    ctypes.memmove(start, data.ljust(end - start, b"\0"), end - start)
