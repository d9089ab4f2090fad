"""Failures around a rank, on purpose: a full or slow disk, a wrong clock, no descriptors, no memory, strangers.

They replace functions of Python, lower the limits of a process or flood its listeners, so they are no part of the
product. `inflict` takes these kinds beside those of `chaos`. Disk and clock are faked within the ranks, below the
code of ft_hsdp: their job needs ``preload: [tests.support.os_faults]`` and ``debug.faults: true``.

`poor` takes abilities from the file system of a folder; with `POOR` in the environment, in each process that
imports this module.
"""

import builtins
import contextlib
import errno
import fcntl
import io
import itertools
import os
import resource
import stat
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ft_hsdp import address, fault_injection
from ft_hsdp.fault_injection import FaultOrder
from ft_hsdp.launch import injection
from ft_hsdp.launch.chaos import Injection
from ft_hsdp.launch.injection import Inflicted, Lift
from ft_hsdp.launch.run.directory import RunDir
from ft_hsdp.mounts import Ability
from tests.support.flood import Flood

POOR = "FT_HSDP_TESTED_POOR"  # a folder, and abilities that its file system lacks; with colons between
FAKED = ("disk_full", "slow_disk", "clock")
KINDS = (*FAKED, "descriptors", "memory", "garbage")
MODULE = "tests.support.os_faults"
ROOM = 16 << 20  # bytes of address space that kind memory leaves to a process
STRANGERS_PER_S = 50  # connections that kind garbage opens in a second


def inflict(run: RunDir, one: Injection, seconds: float = 0.0) -> Inflicted:
    """Inject a failure, as `injection.inflict` does, or one of `KINDS`.

    Args:
        run: Of the job.
        one: The failure.
        seconds: By how much the clock is wrong, or how long each write takes.
    """
    if one.kind not in KINDS:
        return injection.inflict(run, one)
    assert one.replica is not None
    pid: int | None = None
    if one.kind in FAKED:
        lift = injection.ordered(run, one, seconds)
    else:
        pid, _ = injection.rank_process(run, one.replica, one.rank or 0)
        lift = {"descriptors": _descriptors, "memory": _memory, "garbage": _garbage}[one.kind](pid)
    event = {
        "t": time.time(),
        "event": "FailureInjected",
        "source": "chaos",
        "kind": one.kind,
        "pid": pid,
        "replica": one.replica,
        "rank": one.rank,
        "for_s": one.for_s,
        "target": one.victim,
        "incarnation": next(iter(injection.incarnations(run, one)), None),
        "lives": injection.incarnations(run, one),
        "reason": f"{one.victim}: {one.kind}",
    }
    return Inflicted(event, lift)


def _descriptors(pid: int) -> Lift:
    """Leave `pid` without a free descriptor: its limit becomes its lowest free number."""
    used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    return _limited(pid, resource.RLIMIT_NOFILE, next(n for n in itertools.count() if n not in used))


def _memory(pid: int) -> Lift:
    """Leave `pid` with `ROOM` bytes of address space."""
    return _limited(pid, resource.RLIMIT_AS, psutil.Process(pid).memory_info().vms + ROOM)


def _limited(pid: int, what: int, soft: int) -> Lift:
    before = resource.prlimit(pid, what)
    resource.prlimit(pid, what, (soft, before[1]))

    def lift() -> None:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, what, before)

    return lift


def _garbage(pid: int) -> Lift:
    """Call the listeners of `pid` with hostile first frames, until lifted."""
    over = contextlib.ExitStack()
    over.enter_context(Flood([address.join(host, port) for host, port in listeners(pid)], STRANGERS_PER_S))
    return over.close


def listeners(pid: int) -> list[tuple[str, int]]:
    """Return the addresses at which `pid` listens for TCP; raise psutil.Error if there is no such process."""
    found = psutil.Process(pid).net_connections("tcp")
    return [(str(c.laddr.ip), int(c.laddr.port)) for c in found if c.status == psutil.CONN_LISTEN]


def _late(seconds: float | None) -> None:
    """Delay a write, or, with None, fail with ENOSPC instead."""
    if seconds is None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    time.sleep(seconds)


def _room(descriptor: int) -> int:
    """Return how many bytes the next write finds in blocks that the file has: a full disk takes those."""
    told = os.fstat(descriptor)
    appends = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND
    at = told.st_size if appends else os.lseek(descriptor, 0, os.SEEK_CUR)
    return max(0, told.st_blocks * 512 - at)


@contextlib.contextmanager
def _disk(run: Path, seconds: float | None) -> Iterator[None]:
    """Make each write below `run` take `seconds`; with None, the disk has no free block and takes no new file."""
    inside = f"{run}{os.sep}"
    write, plain, system = os.write, io.open, os.open

    def named(path: object) -> bool:
        try:
            return os.path.abspath(os.fsdecode(os.fspath(path))).startswith(inside)  # type: ignore[call-overload]
        except TypeError:
            return False

    def ours(descriptor: int) -> bool:
        with contextlib.suppress(OSError):
            regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
            return regular and os.readlink(f"/proc/self/fd/{descriptor}").startswith(inside)
        return False

    def written(descriptor: int, data: Any) -> int:
        if not ours(descriptor):
            return write(descriptor, data)
        room = _room(descriptor) if seconds is None else 0
        if room == 0:
            _late(seconds)
        return write(descriptor, memoryview(data)[:room] if room else data)

    def opened(file: Any, mode: str = "r", *rest: Any, **named_rest: Any) -> Any:
        if set(mode) & set("wax+") and named(file):
            _late(seconds)
        return plain(file, mode, *rest, **named_rest)

    def made(path: Any, flags: int, *rest: Any, **named_rest: Any) -> int:
        if flags & os.O_CREAT and named(path) and not os.path.exists(path):
            _late(seconds)
        return system(path, flags, *rest, **named_rest)

    streams = [_Stream(s, seconds) for s in (sys.stdout, sys.stderr) if s is not None and ours(_descriptor(s))]
    with contextlib.ExitStack() as faked:
        for where, name, fake in (
            (os, "write", written),
            (os, "open", made),
            (io, "open", opened),
            (builtins, "open", opened),
        ):
            faked.enter_context(_replaced(where, name, fake))
        for stream in streams:
            faked.enter_context(_replaced(stream.below, "write", stream.write))
        yield


@dataclass(frozen=True, slots=True)
class _Stream:
    """stdout or stderr, where it is a file of the run."""

    below: Any
    seconds: float | None

    def write(self, text: str) -> int:
        """Print late, or fail, as any other write does."""
        _late(self.seconds)
        return int(type(self.below).write(self.below, text))


def _descriptor(stream: Any) -> int:
    try:
        return int(stream.fileno())
    except (OSError, ValueError, AttributeError):
        return -1


@contextlib.contextmanager
def _clock(seconds: float) -> Iterator[None]:
    """Make the wall clock of this process wrong by `seconds`."""
    right, right_ns, ahead = time.time, time.time_ns, int(seconds * 1e9)
    jumped, jumped_ns = lambda: right() + seconds, lambda: right_ns() + ahead
    with _replaced(time, "time", jumped), _replaced(time, "time_ns", jumped_ns):
        yield


@contextlib.contextmanager
def _replaced(where: Any, name: str, fake: Any) -> Iterator[None]:
    own = getattr(where, name)
    setattr(where, name, fake)
    try:
        yield
    finally:
        setattr(where, name, own)


@contextlib.contextmanager
def poor(folder: Path, *lacking: Ability) -> Iterator[None]:
    """Make the file system of `folder` one that lacks these abilities."""
    inside = f"{folder.resolve()}{os.sep}"
    sync, flock, lockf, link, rename, replace = os.fsync, fcntl.flock, fcntl.lockf, os.link, os.rename, os.replace

    def there(what: Any) -> bool:
        if isinstance(what, str | os.PathLike):
            return f"{os.path.abspath(what)}{os.sep}".startswith(inside)
        number = what if isinstance(what, int) else what.fileno()
        return f"{os.readlink(f'/proc/self/fd/{number}')}{os.sep}".startswith(inside)

    def refused(call: Callable[..., Any], code: int, only: Callable[[Any], bool] = lambda _: True) -> Any:
        def made(what: Any, *rest: Any, **named: Any) -> Any:
            if there(what) and only(what):
                raise OSError(code, os.strerror(code))
            return call(what, *rest, **named)

        return made

    def is_folder(what: Any) -> bool:
        return stat.S_ISDIR(os.stat(what).st_mode)

    fakes = {
        Ability.SYNC: [(os, "fsync", refused(sync, errno.EINVAL, is_folder))],
        Ability.LOCKS: [
            (fcntl, "flock", refused(flock, errno.ENOLCK)),
            (fcntl, "lockf", refused(lockf, errno.ENOLCK)),
        ],
        Ability.LINKS: [(os, "link", refused(link, errno.EPERM))],
        Ability.RENAME: [
            (os, "rename", refused(rename, errno.ENOSYS, is_folder)),
            (os, "replace", refused(replace, errno.ENOSYS, is_folder)),
        ],
    }
    with contextlib.ExitStack() as faked:
        for ability in lacking:
            for fake in fakes[ability]:
                faked.enter_context(_replaced(*fake))
        yield


_for_ever = contextlib.ExitStack()
if POOR in os.environ:
    _where, *_what = os.environ[POOR].split(":")
    _for_ever.enter_context(poor(Path(_where), *map(Ability, _what)))


def _fake_disk(order: FaultOrder, run: Path) -> contextlib.AbstractContextManager[None]:
    return _disk(run, None if order.kind == "disk_full" else order.seconds)


def _fake_clock(order: FaultOrder, run: Path) -> contextlib.AbstractContextManager[None]:
    return _clock(order.seconds)


fault_injection.fakes |= {"disk_full": _fake_disk, "slow_disk": _fake_disk, "clock": _fake_clock}


ME = 1
Enforced = Callable[..., contextlib.ExitStack]


@contextlib.contextmanager
def enforcing(run: Path) -> Iterator[Enforced]:
    """Put orders into force in this process, as replica ME; a call ends what the one before began."""
    with contextlib.ExitStack() as faked:

        def put(*orders: FaultOrder) -> contextlib.ExitStack:
            faked.close()
            fault_injection.enforce(orders, run.resolve(), ME, faked)
            return faked

        yield put
        put()
