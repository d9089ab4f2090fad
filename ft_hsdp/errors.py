"""Every exception that ft_hsdp raises on purpose, with the exit code that it stands for.

Exit codes: 0 done, 64 bad configuration or arguments, 69 lighthouse unreachable, 75 retryable (start the process
again), 76 broken hardware (replace the node). A process that SIGTERM told to end, and that left its job at a step
boundary, exits with 143, as if the signal had ended it: it is not done, and may be started again.
"""

from __future__ import annotations

import errno
import resource
from collections.abc import Callable, Iterator

EXIT_OK = 0
EXIT_USAGE = 2  # of a user's script that does not take its arguments: argparse ends with it
EXIT_CONFIG = 64
EXIT_UNREACHABLE = 69
EXIT_RETRYABLE = 75
EXIT_HARDWARE = 76
EXIT_LEFT = 143

_SHOWN = 120  # characters of a bad value that a message shows


class FtHsdpError(Exception):
    """Base of all exceptions of ft_hsdp; a process that ends with one exits with its `exit_code`."""

    exit_code: int = EXIT_RETRYABLE


class ConfigError(FtHsdpError):
    """A configuration or an argument that cannot be used; `str()` is one line for the user.

    Args:
        key: dotted name of the key or option.
        value: what was given.
        allowed: what may stand there, in words.
    """

    exit_code = EXIT_CONFIG

    def __init__(self, key: str, value: object, allowed: str) -> None:
        super().__init__(key, value, allowed)
        self.key = key
        self.value = value
        self.allowed = allowed

    def __str__(self) -> str:
        return one_line(f"{one_line(self.key)}: got {_short(self.value)}; allowed: {self.allowed}")


class LighthouseUnreachable(FtHsdpError):
    """No lighthouse answered. A process that never joined its job ends with it."""

    exit_code = EXIT_UNREACHABLE


class Retryable(FtHsdpError):
    """This process cannot go on, but a fresh one in its place may."""

    exit_code = EXIT_RETRYABLE


class FTARError(FtHsdpError):
    """An all-reduce across replicas failed (FT-HSDP §5).

    Args:
        message: one line.
        suspect: id of the replica that is held responsible, if one is known.
    """

    def __init__(self, message: str = "", *, suspect: int | None = None) -> None:
        super().__init__(message)
        self.suspect = suspect

    def __str__(self) -> str:
        text = super().__str__() or type(self).__name__
        return text if self.suspect is None else f"{text} (suspect: replica {self.suspect})"


class RecoverableError(FTARError):
    """The ring is lost, the local gradient is not: retry under a larger epoch."""


class PeerDead(RecoverableError):
    """A neighbour closed or reset its connection."""


class PeerTimeout(RecoverableError):
    """A neighbour made no progress before the deadline."""


class RemoteAbort(RecoverableError):
    """Another member saw a failure first and told the ring."""


class StaleEpoch(RecoverableError):
    """A newer grant exists, or the members do not build on the same state."""


class DeviceExpired(RecoverableError):
    """The device has ended an all-reduce by itself, because this process stood still."""


class ConnectFailed(RecoverableError):
    """The ring of a new epoch could not be connected in time."""


class Skipped(RecoverableError):
    """The all-reduce was queued behind one that failed, and was never begun."""


class FatalError(FTARError):
    """Retrying cannot help: the process has to stop."""


class ProtocolViolation(FatalError):
    """A peer sent what the protocol does not allow."""


class DataCorruption(FatalError):
    """Bytes arrived with a wrong checksum."""


class LocalSystemError(FatalError):
    """This machine or its device is at fault."""

    exit_code = EXIT_HARDWARE


class LocalProcessError(LocalSystemError):
    """This process cannot go on. Nothing says that its machine is broken, so a new process is started here."""

    exit_code = EXIT_RETRYABLE


class LocalResourceError(LocalProcessError):
    """This process, or its machine, has run out of descriptors, ports, threads or memory. `exhausted` makes it.

    A new process may get some, so it is retryable. No neighbour is at fault: only the rank that meets it ends.
    """


class InvalidArgument(FatalError):
    """The caller asked for something that can never work."""

    exit_code = EXIT_CONFIG


def exhausted(error: BaseException) -> LocalResourceError | None:
    """Return the error for the resource that ran out and so caused `error`, or what that was raised from.

    None if no resource is the cause.
    """
    for each in raised_from(error):
        if isinstance(each, LocalResourceError):
            return each
        if isinstance(each, MemoryError):
            return LocalResourceError(f"this process has no memory left ({_RESOURCES[errno.ENOMEM]()})")
        if isinstance(each, RuntimeError) and "can't start new thread" in str(each):
            limit = f"RLIMIT_NPROC has {_limit(resource.RLIMIT_NPROC)}; a cgroup may have a lower pids.max"
            return LocalResourceError(f"this process cannot start a thread ({limit})")
        if isinstance(each, OSError) and each.errno in _RESOURCES:
            text = errno.errorcode[each.errno]
            return LocalResourceError(
                f"this process has run out of a resource: {text}, {_RESOURCES[each.errno]()}"
            )
    return None


def raised_from(error: BaseException) -> Iterator[BaseException]:
    """Yield `error`, the members of groups, and what each was raised from."""
    waiting, seen = [error], set[int]()
    while waiting:
        each = waiting.pop(0)
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting += each.exceptions if isinstance(each, BaseExceptionGroup) else ()
        waiting += [cause for cause in (each.__cause__, each.__context__) if cause is not None]


def _limit(which: int) -> str:
    soft, hard = resource.getrlimit(which)
    named = ["unlimited" if each == resource.RLIM_INFINITY else str(each) for each in (soft, hard)]
    return f"soft limit {named[0]}, hard limit {named[1]}"


_RESOURCES: dict[int, Callable[[], str]] = {
    errno.EMFILE: lambda: f"open files of this process: RLIMIT_NOFILE has {_limit(resource.RLIMIT_NOFILE)}",
    errno.ENFILE: lambda: "open files of the whole machine: see /proc/sys/fs/file-nr",
    errno.ENOBUFS: lambda: "memory of the kernel for sockets: see /proc/sys/net/core and the host's memory",
    errno.ENOMEM: lambda: (
        f"memory: RLIMIT_AS has {_limit(resource.RLIMIT_AS)}; see the host's and the cgroup's memory"
    ),
    errno.EADDRNOTAVAIL: lambda: "local ports or addresses: see /proc/sys/net/ipv4/ip_local_port_range",
}
"""What is used up, by the error number of a system call of this process."""


def one_line(text: str) -> str:
    """Return `text` on one line: white space, and what a terminal would not show as it is, become one blank."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _short(value: object) -> str:
    """Return `value` as the user wrote it, on one line and of bounded length."""
    text = one_line(repr(value))
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
