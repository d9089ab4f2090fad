"""Files that grow by one JSON line per call: logs of what was done, and the journal of events with reasons.

A disk that is full, read-only or broken costs lines, and never ends the process that writes them: lost lines are
counted, and reported once the disk takes lines again. A disk that hangs delays a control loop by `WAIT_S` once.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeGuard

WAIT_S = 0.1  # longest wait of a caller for the thread that writes its line
CLOSE_S = 2.0  # the same at the end
QUEUE = 4096  # lines that may wait for that thread
DISK = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE}
)  # errors of disks
RESERVED = 1024  # bytes that `reserve` puts aside

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lost:
    """Lines that are missing in a file."""

    file: str  # its name
    lines: int  # how many
    since: float  # Unix seconds of the first one
    until: float  # Unix seconds at which lines were written again
    why: str  # error of the disk

    @property
    def event(self) -> dict[str, object]:
        reason = f"{self.file} lacks {self.lines} lines of {self.until - self.since:.1f} s: {self.why}"
        facts = {"file": self.file, "lines": self.lines, "since": self.since}
        return {"t": self.until, "event": "LogLinesLost", "reason": reason, **facts}


def is_finite(value: object) -> TypeGuard[float]:
    """Return whether `value` is a number, and neither NaN nor infinite; a truth value is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def finite(value: Any) -> Any:
    """Return `value` as strict JSON can express it: numbers that are not finite become None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def strict(row: Mapping[str, object]) -> str:
    """Return `row` as one line of strict JSON.

    If a number in it was not finite, the line says `"finite": false`.
    """
    try:
        return json.dumps(row, separators=(",", ":"), default=str, allow_nan=False)
    except ValueError:
        return json.dumps({**finite(row), "finite": False}, separators=(",", ":"), default=str, allow_nan=False)


def here() -> dict[str, str]:
    """Return this host's name, and which of its starts this is: {"host", "boot"}."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        boot = ""
    return {"host": socket.gethostname(), "boot": boot}


def unused(path: Path) -> Path:
    """Return `path`, or `path` with the first number that makes it new."""
    tries = (path.with_name(f"{path.name}-{n}") for n in range(2, 10_000))
    return path if not os.path.lexists(path) else next(p for p in tries if not os.path.lexists(p))


def set_aside(path: Path, *ends: str) -> Path:
    """Rename what stands at `path` and cannot be used to `NAME.damaged-TIME`, and return that path.

    Args:
        *ends: further files that belong to it have its name with one of these at the end.

    Raises:
        OSError: it cannot be renamed; it stands where it stood.
    """
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    aside = unused(path.with_name(f"{path.name}.damaged-{stamp}"))
    path.rename(aside)
    for end in ends:
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + end).rename(aside.with_name(aside.name + end))
    return aside


def clear_way(path: Path) -> None:
    """Set aside a folder, a named pipe or a socket that stands where a file belongs. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            _log.warning("%s is no file and is set aside: %s", path, set_aside(path).name)


def open_to_append(path: Path) -> BinaryIO:
    """Return a file, open for appending; it and its folder are made, the way is cleared. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    clear_way(path)
    return path.open("ab")


def open_regular(path: Path, *, to_lock: bool = False) -> BinaryIO:
    """Return a file, open to be read. Raises OSError, at once also for a named pipe or a device in its place."""
    flags = os.O_NONBLOCK | os.O_CLOEXEC | (os.O_RDWR if to_lock else os.O_RDONLY)  # NFS locks what can be written
    file = open(path, "rb", opener=lambda name, _: os.open(name, flags))  # noqa: SIM115 - the caller's
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file")
    return file


def read_regular(path: Path) -> bytes:
    """Return what a file has. Raises OSError as `open_regular` does."""
    with open_regular(path) as file:
        return file.read()


def parsed(data: bytes | str, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """Return the value of a JSON text. Raises ValueError, also if it is nested too deeply."""
    try:
        return json.loads(data, parse_constant=parse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if there is none that can be read."""
    try:
        found = parsed(read_regular(path))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class LineWriter:
    """A JSONL file to which several processes may append. Thread-safe; it blocks as long as the disk does.

    When `write` returns, the line has left the process, either whole or not at all. A short write leaves a
    piece, which is overwritten in place as a row of its own, `{"torn":true}`: that needs no space on the disk.

    Args:
        lost: called with lines that were lost, once a line was written again, and by `close`.
    """

    def __init__(self, path: Path, lost: Callable[[Lost], None] | None = None) -> None:
        self.path = path
        self._tell = lost
        self._descriptor: int | None = None
        self._torn = False  # the file may end within a line
        self._count = 0
        self._since = 0.0
        self._why = ""
        self._lock = threading.Lock()
        with contextlib.suppress(OSError):  # the first line tries again
            self._open()

    def write(self, row: Mapping[str, object]) -> bool:
        """Append one row, and return whether it is in the file."""
        return self.append(strict(row).encode() + b"\n")

    def append(self, line: bytes) -> bool:
        with self._lock:
            try:
                descriptor = self._open()
                if not (self._whole(descriptor, line) or self._whole(descriptor, line)):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                self._miss(1, error.strerror or str(error))
                return False
            lost = self._settle()
        if lost is not None and self._tell is not None:
            self._tell(lost)
        return True

    def missed(self, lines: int, why: str) -> None:
        """Count lines that were lost before they came here."""
        with self._lock:
            self._miss(lines, why)

    def close(self) -> None:
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
            lost = self._settle()
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        if lost is not None and self._tell is not None:
            self._tell(lost)

    def _miss(self, lines: int, why: str) -> None:
        if not self._count:
            self._since = time.time()
            _log.warning("%s loses lines: %s", self.path, why)
        self._count, self._why = self._count + lines, why

    def _settle(self) -> Lost | None:
        if not self._count:
            return None
        found = Lost(self.path.name, self._count, self._since, time.time(), self._why)
        _log.warning("%s", found.event["reason"])
        self._count = 0
        return found

    def _open(self) -> int:
        if self._descriptor is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            clear_way(self.path)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            size = os.fstat(self._descriptor).st_size
            # The process before this one may have been killed within a line.
            self._torn = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"
        return self._descriptor

    def _whole(self, descriptor: int, line: bytes) -> bool:
        """Append a line. Return False if only a piece of it was written, which is a line of its own then."""
        given = b"\n" + line if self._torn else line
        done = os.write(descriptor, given)
        self._torn = False
        if done == len(given):
            return True
        self._torn = done > 0
        if done > 0:
            end = os.lseek(descriptor, 0, os.SEEK_CUR)  # of the piece, whatever others have appended since
            with contextlib.suppress(OSError):
                # The other descriptor can only append.
                over = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    self._torn = os.pwrite(over, _filler(done), end - done) != done
                finally:
                    os.close(over)
        return False


def replace_json(path: Path, value: object) -> None:
    """Replace `path` by `value` as JSON: a reader sees the old file or the new one, whole.

    On a full disk the file is overwritten where it stands, which needs no space: for a moment a reader may find
    no JSON. What `reserve` has put aside is used.

    Raises:
        OSError: it cannot be written.
    """
    data = json.dumps(value, allow_nan=False).encode() + b"\n"
    part = _part(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        clear_way(path)
        clear_way(part)
        _overwrite(part, data, os.O_CREAT)
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        try:
            if path.stat().st_blocks * 512 < len(data):
                raise error
        except FileNotFoundError:
            raise error from None
        _overwrite(path, data)


def reserve(path: Path) -> None:
    """Put some space aside for this process's first `replace_json` of `path`, if there is any."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(f".{path.name}.*.part"):  # of those before this process
            left.unlink()
        _overwrite(_part(path), b" " * RESERVED, os.O_CREAT)


def _part(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.part")


def _overwrite(path: Path, data: bytes, flags: int = 0) -> None:
    """Write `data` to `path`, in the blocks that the file has as far as they go. A named pipe is an OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags, 0o666)
    try:
        if os.write(descriptor, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(descriptor, len(data))
    finally:
        os.close(descriptor)


def _filler(length: int) -> bytes:
    """Return a line of `length` bytes that is strict JSON, or empty."""
    row = b'{"torn":true}' if length > 13 else b"{}" if length > 2 else b""
    return row.ljust(length - 1) + b"\n"


class _Lines(Protocol):
    """Takes lines, and blocks as long as what is behind it does: a `LineWriter`, or a terminal."""

    def append(self, line: bytes, /) -> bool: ...
    def missed(self, lines: int, why: str) -> None: ...
    def close(self) -> None: ...


class Queued:
    """A file or another sink of lines for a control loop: a thread writes the lines. Thread-safe.

    A caller waits at most `WAIT_S` for its line, and not at all while lines before it are overdue. Lines that
    find no place in the queue are lost.
    """

    def __init__(self, to: Path | _Lines, lost: Callable[[Lost], None] | None = None) -> None:
        self._lines: _Lines = LineWriter(to, lost) if isinstance(to, Path) else to
        self._queue: deque[bytes] = deque()
        self._taken = self._written = self._missed = 0
        self._late = False
        self._closed = False
        self._changed = threading.Condition()
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None

    def write(self, row: Mapping[str, object]) -> None:
        self.append(strict(row).encode() + b"\n")

    def append(self, line: bytes) -> None:
        if self._pid != os.getpid():  # a fork has no thread, and another one may have held the lock for ever
            self._lines.append(line)
            return
        with self._changed:
            if self._closed or len(self._queue) >= QUEUE:
                self._missed += 1
                return
            self._queue.append(line)
            self._taken += 1
            mine = self._taken
            if self._thread is None:  # not before the first line: a process that forks must have no threads
                self._thread = threading.Thread(target=self._run, name="log", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            if threading.current_thread() is self._thread:
                return  # it tells of lines that were lost
            wait_s = 0.0 if self._late and self._written < mine - 1 else WAIT_S
            self._late = not self._changed.wait_for(lambda: self._written >= mine, wait_s)

    def flush(self, wait_s: float = CLOSE_S) -> bool:
        """Wait until all lines are written or lost, and return False after `wait_s` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._written >= self._taken, wait_s)

    def drain(self) -> None:
        """Wait until all lines are written or lost, for as long as one of them is within `CLOSE_S`."""
        before = -1
        while before < self._written and not self.flush(0.0):
            before = self._written
            self.flush()

    def close(self) -> None:
        done = self.flush()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if done:
            if self._thread is not None:
                self._thread.join(CLOSE_S)
            self._lines.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue) or self._closed)
                if not self._queue:
                    return
                line = self._queue.popleft()
                missed, self._missed = self._missed, 0
            if missed:
                self._lines.missed(missed, "the disk did not answer")
            self._lines.append(line)
            with self._changed:
                self._written += 1
                self._changed.notify_all()


class DiskThread:
    """Does a control loop's writes, one after the other, on a thread. For one thread at a time.

    A caller waits at most `wait_s` for its write, and not at all while one before it is overdue.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._pool = ThreadPoolExecutor(1, "disk")
        self._last: Future[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether the last write is not done yet."""
        return self._last is not None and not self._last.done()

    def run(self, write: Callable[[], None]) -> None:
        """Do `write`, and raise what it raises.

        Raises:
            TimeoutError: the disk does not answer. This write is done when it does, or was not begun.
        """
        if not self.busy:
            self._last = self._pool.submit(write)
            if wait([self._last], self._wait_s).done:
                return self._last.result()
        raise TimeoutError("the disk does not answer")

    def close(self) -> bool:
        """Take no more writes; return whether the last one is done, for which this waits `CLOSE_S`."""
        self._pool.shutdown(wait=False)
        return self._last is None or bool(wait([self._last], CLOSE_S).done)


class Journal(Queued):
    """Events: what was decided, and why.

    A disk that is full or hangs costs lines, never a decision.

    Args:
        tee: called with each row, on the thread that writes it.
        **fixed: facts that are in every line: which process writes.
    """

    def __init__(
        self, path: Path, tee: Callable[[Mapping[str, object]], None] | None = None, **fixed: object
    ) -> None:
        self._tee = tee
        self._fixed = fixed
        super().__init__(path, self.lost)

    def __call__(self, row: Mapping[str, object]) -> None:
        self.write(row)
        if self._tee is not None:
            self._tee(row)

    def event(self, event: str, reason: str, **facts: object) -> None:
        """Append an event (past tense) with its reason and the time, in Unix seconds."""
        self.note(time.time(), event, reason, **facts)

    def note(self, t: float, event: str, reason: str, **facts: object) -> None:
        """Append an event that happened at `t`, in Unix seconds."""
        self({"t": t, "event": event, **self._fixed, "reason": reason, **facts})

    def lost(self, lost: Lost) -> None:
        self({**self._fixed, **lost.event})
