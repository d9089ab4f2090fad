"""Failures on purpose, for tests and chaos: failpoints in the code, and faults that an operator orders.

Failpoints are named places at which a process can be made to fail. `debug.failpoints` says which replicas, which
rank and which incarnation fail there, at which step. Each fires once in a process, when the place is first reached
at that step or a later one. They are off unless they are configured.

Faults are what a process does wrong while an order says so: its disk is full or slow, its wall clock is wrong, or
no packet passes between it and a peer. One of them happens once: the connections to its neighbours are reset. An
order is a file in the run's folder `faults`; removing the file lifts the fault. A process that `watch`es
the folder carries out the orders for it. Disk and clock are faked below ft_hsdp's code, in the functions that it
calls; code that sends messages asks for a partition, and code that connects to neighbours says so.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import ctypes
import errno
import fcntl
import io
import json
import os
import signal
import socket
import stat
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

PLACES = {
    "reduce-begin": "the first bucket is about to enter the ring",
    "micro-batch": "a micro-batch of a step, but not its first one, is about to be trained",
    "refill": "more of the step is asked for, because another replica was lost, and nothing of it is trained",
    "reduce-copy": "an own chunk is about to be sent",
    "reduce-scatter": "a partial sum is about to be made (reduce-scatter)",
    "reduce-boundary": "a shard's final sum is about to be made, which no member has yet",
    "reduce-gather": "a final sum of another member is about to be stored (all-gather)",
    "vote": "the rank is about to vote",
    "token-first": "the leader is about to pass the token on in pass 1",
    "token-second": "the verdict is decided here, and not passed on yet",
    "apply-begin": "the commit is logged, nothing is applied yet",
    "apply-middle": "the weights are updated, ledger and name are not",
    "apply-end": "the step is applied, and no snapshot of it is taken",
    "snapshot": "a snapshot is copied, and its agent does not know that it is complete",
    "snapshot-kept": "a snapshot is complete, and its agent knows it",
    "fetch": "a part of the state that is fetched has arrived",
    "checkpoint-write": "the files of a checkpoint are written, its manifest is not",
    "checkpoint-rename": "a checkpoint is complete, and does not have its name yet",
    "quorum-reply": "the lighthouse has answered, nothing was done about it",
    "state-flip": "a bit of the state flips, as a broken machine would have it",
    "live-flip": "a bit of the state flips after its snapshot was taken",
    "snapshot-flip": "a bit of a complete snapshot flips",
    "snapshot-out": "there is no memory for a snapshot: it is left out",
    "copy-out": "there is no memory for a copy of another host's shard: it is refused",
    "record-lost": "the ring broke in doubt: the record is forgotten, as a loss of memory would",
}


class Failpoint(Protocol):
    """Which process fails at a place, and when."""

    @property
    def replicas(self) -> Collection[int]:
        """Ids of the replicas that fail."""

    @property
    def rank(self) -> int:
        """The rank that fails in each."""

    @property
    def life(self) -> int:
        """Number of restarts before the incarnation that fails."""

    @property
    def step(self) -> int:
        """It fails at this step, or the first time after it."""

    @property
    def signal(self) -> str:
        """The signal that it sends itself: KILL or STOP."""


_armed: dict[str, Failpoint] = {}


def arm(points: Mapping[str, Failpoint], replica: int, rank: int, life: int) -> None:
    """Arm the failpoints for this process, in place of all others."""
    _armed.clear()
    _armed.update({n: p for n, p in points.items() if replica in p.replicas and (p.rank, p.life) == (rank, life)})


def hit(place: str, step: int) -> bool:
    """Return whether `place` fails now, at `step`; it does so once."""
    if not _armed:
        return False
    point = _armed.get(place)
    if point is None or step < point.step:
        return False
    del _armed[place]
    return True


def reach(place: str, step: int) -> None:
    """End, or stop, this process if `place` fails now."""
    if not _armed:
        return
    point = _armed.get(place)
    if point is not None and hit(place, step):
        # To this thread: of a signal to the process, its thread may hear a little later.
        signal.pthread_kill(threading.get_ident(), getattr(signal, f"SIG{point.signal}"))


HOST = "host"  # the kind that takes a host away: only a backend heeds its orders, when it places a replica
HOOKED = ("disk_full", "slow_disk", "partition", "reset", "clock")
"""The kinds of faults that a process has to carry out itself."""
RESET_S = 5.0  # how long an order to reset connections is there for the ranks that it hits
FOLDER = "faults"
LIGHTHOUSE = "lighthouse"
SUPERVISOR = "supervisor"
LOOK_S = 0.05  # between two looks at the folder, and at a partition that holds a message back

Peer = int | str
"""A replica's id, or LIGHTHOUSE."""


@dataclass(frozen=True, slots=True)
class FaultOrder:
    """One fault that a process carries out."""

    kind: str  # as in `chaos.kind`
    replica: int | None = None  # replica that is hit
    rank: int | None = None  # rank of it that is hit; None: each
    supervisor: bool = False  # the supervisor is hit
    edge: tuple[Peer, Peer] | None = None  # with partition: between which two nothing passes
    reject: bool = False  # with partition: connections are refused, not left waiting
    seconds: float = 0.0  # by how much the clock is wrong, or how long a write takes
    until: float | None = None  # monotonic seconds at which it ends if it is not lifted before; None: never
    host: str | None = None  # with host: its name

    def hits(self, replica: int | None, rank: int | None) -> bool:
        """Return whether it is for this rank, or, with None, for the supervisor."""
        if replica is None:
            return self.supervisor
        if self.edge is not None:
            return replica in self.edge
        return self.replica == replica and self.rank in (None, rank)


_ring: weakref.WeakSet[socket.socket] = weakref.WeakSet()  # connections to neighbours
_reset: set[FaultOrder] = set()  # orders to reset them that were carried out
_cut: Mapping[Peer, bool] = {}  # peers that nothing reaches -> whether they refuse
_watched: set[Path] = set()


def cut(peer: Peer | None) -> bool:
    """Return whether nothing reaches `peer` at the moment."""
    return peer in _cut


def _never() -> bool:
    return False


async def passes(peer: Peer, most_s: float = float("inf"), given_up: Callable[[], bool] = _never) -> None:
    """Wait until what is sent to `peer` passes, or until `given_up()`.

    Raises:
        ConnectionRefusedError: the partition refuses connections.
        TimeoutError: not within `most_s` seconds.
    """
    end = time.monotonic() + most_s
    while _refusing(peer) and not given_up():
        if time.monotonic() > end:
            raise TimeoutError(errno.ETIMEDOUT, "nothing passes: a fault on purpose")
        await asyncio.sleep(LOOK_S)


def hold(peer: Peer, given_up: Callable[[], bool]) -> None:
    """Block until what is sent to `peer` passes, or until `given_up()`."""
    while _refusing(peer) and not given_up():
        time.sleep(LOOK_S)


def _refusing(peer: Peer) -> bool:
    if peer not in _cut:
        return False
    if _cut[peer]:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "connection refused: a fault on purpose")
    return True


def in_ring(sock: socket.socket) -> None:
    """Note a connection to a neighbour, which a fault may reset."""
    if _watched:
        _ring.add(sock)


def reset(sock: socket.socket) -> None:
    """Reset a TCP connection: both ends get an error, and no byte that was sent arrives any more.

    A connection that has ended stays as it is.
    """
    unspecified = ctypes.create_string_buffer(16)  # a socket address of no family: the kernel sends RST
    with contextlib.suppress(OSError):
        ctypes.CDLL(None, use_errno=True).connect(sock.fileno(), unspecified, len(unspecified))


def watch(run: Path, replica: int | None, rank: int | None) -> None:
    """Carry out from now on the orders for this rank of the job in `run`, or, with None, for its supervisor."""
    folder = run.resolve() / FOLDER
    if folder in _watched:
        return
    _watched.add(folder)
    folder.mkdir(mode=0o700, exist_ok=True)
    threading.Thread(target=_watch, args=(folder, replica, rank), name="faults", daemon=True).start()


def _watch(folder: Path, replica: int | None, rank: int | None) -> None:
    in_force: list[FaultOrder] = []
    with contextlib.ExitStack() as faked:
        while True:
            meant = [o for o in _orders(folder) if o.hits(replica, rank)]
            if meant != in_force:
                in_force = meant
                faked.close()
                enforce(meant, folder.parent, replica, faked)
            time.sleep(LOOK_S)


def _orders(folder: Path) -> Iterator[FaultOrder]:
    """Yield the orders in force. A file that is not whole is no order yet."""
    now = time.monotonic()
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(folder)):
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                if name.endswith(".json"):
                    order = parse(_read(folder / name))
                    if order.until is None or now < order.until:
                        yield order


def hosts_down(run: Path, replica: int | None = None) -> list[str]:
    """Return the hosts that orders for the job in `run` have taken away: those of a replica, or with None all."""
    found = (o.host for o in _orders(run / FOLDER) if o.kind == HOST and replica in (None, o.replica))
    return sorted({host for host in found if host is not None})


def _read(file: Path) -> bytes:
    """Return the content of a file, by calls that no fault fakes."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 65536)
    finally:
        os.close(descriptor)


def parse(text: bytes) -> FaultOrder:
    """Return an order from the content of its file.

    Raises:
        ValueError: it is none.
        TypeError: it is none.
    """
    said: dict[str, Any] = json.loads(text)
    edge = said.pop("edge", None)
    return FaultOrder(**said, edge=None if edge is None else (edge[0], edge[1]))


def enforce(orders: Iterable[FaultOrder], run: Path, replica: int | None, faked: contextlib.ExitStack) -> None:
    """Put these faults into force, in place of all others, until `faked` is closed."""
    global _cut
    partitions = [(o.edge, o.reject) for o in orders if o.kind == "partition" and o.edge is not None]
    _cut = {peer: reject for edge, reject in partitions for peer in edge if peer != replica}
    for order in orders:
        if order.kind == "disk_full":
            faked.enter_context(_disk(run, None))
        elif order.kind == "slow_disk":
            faked.enter_context(_disk(run, order.seconds))
        elif order.kind == "reset" and order not in _reset:
            _reset.add(order)
            for sock in list(_ring):
                reset(sock)
        elif order.kind == "clock":
            faked.enter_context(_clock(order.seconds))


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
    """Replace `where.name` by `fake` meanwhile."""
    own = getattr(where, name)
    setattr(where, name, fake)
    try:
        yield
    finally:
        setattr(where, name, own)
