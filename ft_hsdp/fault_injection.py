"""Failures on purpose, for tests and chaos: failpoints in the code, and faults that an operator orders.

Failpoints are named places at which a process can be made to fail. `debug.failpoints` says which replicas, which
rank and which incarnation fail there, at which step. Each fires once in a process, when the place is first reached
at that step or a later one. They are off unless they are configured.

Faults are what a rank does wrong while an order says so: no packet passes between it and a peer. One of them
happens once: the connections to its neighbours are reset. An order is a file in the run's folder `faults`, and in
force as long as it is there. A rank that `watch`es the folder carries out the orders for it. Code that sends
messages asks for a partition, and code that connects to neighbours says so. A module that `preload` names can add
kinds.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import json
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

INJECTED_BY_TESTS = "tests inject it, with preload: [tests.support.os_faults]"
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
    "evaluation": "a batch of an evaluation is computed, and the replica's loss is not known",
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
    "check-flip": "a bit of a product flips, of which hosts.check knows what it should be",
    "copy-out": "there is no memory for a copy of another host's shard: it is refused",
    "record-lost": "the ring broke in doubt: the record is forgotten, as a loss of memory would",
}


class Failpoint(Protocol):
    @property
    def replicas(self) -> Collection[int]: ...

    @property
    def rank(self) -> int: ...

    @property
    def life(self) -> int:
        """Number of restarts before the incarnation that fails."""

    @property
    def step(self) -> int:
        """It fails at this step, or the first time after it."""

    @property
    def signal(self) -> str: ...


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
HOOKED = ("partition", "reset")
"""The kinds of faults that a rank has to carry out itself."""
RESET_S = 5.0  # how long an order to reset connections is there for the ranks that it hits
FOLDER = "faults"
LIGHTHOUSE = "lighthouse"
LOOK_S = 0.05  # between two looks at the folder, and at a partition that holds a message back

Peer = int | str
"""A replica's id, or LIGHTHOUSE."""


@dataclass(frozen=True, slots=True)
class FaultOrder:
    kind: str  # as in `chaos.kind`
    replica: int | None = None  # replica that is hit
    rank: int | None = None  # rank of it that is hit; None: each
    edge: tuple[Peer, Peer] | None = None  # with partition: between which two nothing passes
    reject: bool = False  # with partition: connections are refused, not left waiting
    seconds: float = 0.0  # of a kind that `fakes` has
    until: float | None = None  # monotonic seconds at which it ends if it is not lifted before; None: never
    host: str | None = None  # with host: its name

    def hits(self, replica: int, rank: int) -> bool:
        if self.edge is not None:
            return replica in self.edge
        return self.replica == replica and self.rank in (None, rank)


fakes: dict[str, Callable[[FaultOrder, Path], contextlib.AbstractContextManager[None]]] = {}
"""Carry out the kinds that a module of `preload` adds, for the job in a folder; the product itself has none."""

ring_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()  # connections to neighbours
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
        ring_sockets.add(sock)


def reset(sock: socket.socket) -> None:
    """Reset a TCP connection: both ends get an error, and no byte that was sent arrives any more.

    A connection that has ended stays as it is.
    """
    unspecified = ctypes.create_string_buffer(16)  # a socket address of no family: the kernel sends RST
    with contextlib.suppress(OSError):
        ctypes.CDLL(None, use_errno=True).connect(sock.fileno(), unspecified, len(unspecified))


def watch(run: Path, replica: int, rank: int) -> None:
    """Carry out from now on the orders for this rank of the job in `run`."""
    folder = run.resolve() / FOLDER
    if folder in _watched:
        return
    _watched.add(folder)
    folder.mkdir(mode=0o700, exist_ok=True)
    threading.Thread(target=_watch, args=(folder, replica, rank), name="faults", daemon=True).start()


def _watch(folder: Path, replica: int, rank: int) -> None:
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
                    order = parse((folder / name).read_bytes())
                    if order.until is None or now < order.until:
                        yield order


def hosts_down(run: Path, replica: int | None = None) -> list[str]:
    """Return the hosts that orders for the job in `run` have taken away: those of a replica, or with None all."""
    found = (o.host for o in _orders(run / FOLDER) if o.kind == HOST and replica in (None, o.replica))
    return sorted({host for host in found if host is not None})


def parse(text: bytes) -> FaultOrder:
    """Return an order from the content of its file.

    Raises:
        ValueError: it is none.
        TypeError: it is none.
    """
    said: dict[str, Any] = json.loads(text)
    edge = said.pop("edge", None)
    return FaultOrder(**said, edge=None if edge is None else (edge[0], edge[1]))


def enforce(orders: Iterable[FaultOrder], run: Path, replica: int, faked: contextlib.ExitStack) -> None:
    """Put these faults into force, in place of all others, until `faked` is closed."""
    global _cut
    partitions = [(o.edge, o.reject) for o in orders if o.kind == "partition" and o.edge is not None]
    _cut = {peer: reject for edge, reject in partitions for peer in edge if peer != replica}
    for order in orders:
        if order.kind in fakes:
            faked.enter_context(fakes[order.kind](order, run))
        elif order.kind == "reset" and order not in _reset:
            _reset.add(order)
            for sock in list(ring_sockets):
                reset(sock)
