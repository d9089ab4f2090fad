"""Ranks that hang or are slow, on purpose, inside and between collectives: kinds for `debug.faults`.

A job that has `preload: [tests.support.hangs]` and `debug.faults: true` takes them as files in its folder
`faults`; `order` writes one. They replace functions of torch and of FTAR in the one rank that is hit, so they are
no part of the product.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ft_hsdp import fault_injection
from ft_hsdp.fault_injection import FOLDER

MODULE = "tests.support.hangs"
SLOWER_S = 0.03  # for each collective of a slow rank
SLOW_LINK = 1_500_000  # bytes per second to the right
SO_MAX_PACING_RATE = 47
COLLECTIVES = ("all_gather_single", "reduce_scatter_single")  # what FSDP2 calls


def order(run: Path, kind: str, replica: int, rank: int, **more: float) -> Callable[[], None]:
    """Have one rank fail in the way of `kind`, from within 50 ms on; return what lifts it."""
    folder = run / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    file = folder / f"{kind}-{replica}-{rank}.json"
    part = file.with_suffix(".part")
    part.write_text(json.dumps({"kind": kind, "replica": replica, "rank": rank, **more}))
    os.replace(part, file)
    return lambda: file.unlink(missing_ok=True)


@contextlib.contextmanager
def _around(before: Callable[[], None], after: Callable[[], None]) -> Iterator[None]:
    """Call functions around each collective of FSDP2 on the main thread."""
    import torch.distributed as dist

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def collective(*args: Any, **more: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return original(*args, **more)  # backward runs on a thread of autograd
            before()
            work = original(*args, **more)
            after()
            return work

        return collective

    originals = {name: getattr(dist, name) for name in COLLECTIVES}
    for name, original in originals.items():
        setattr(dist, name, wrap(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _nothing() -> None:
    pass


@contextlib.contextmanager
def _hang(place: str) -> Iterator[None]:
    lifted = threading.Event()

    def wait() -> None:
        lifted.wait()

    try:
        with _around(wait, _nothing) if place == "before" else _around(_nothing, wait):
            yield
    finally:
        lifted.set()


@contextlib.contextmanager
def _engine_hangs() -> Iterator[None]:
    """Have the thread of FTAR stop in the middle of an all-reduce."""
    from ft_hsdp.ftar.allreduce import Exchange

    lifted, arrived = threading.Event(), Exchange.arrived

    def hang(self: Exchange, chunk: Any) -> None:
        lifted.wait()
        arrived(self, chunk)

    Exchange.arrived = hang  # type: ignore[method-assign]
    try:
        yield
    finally:
        Exchange.arrived = arrived  # type: ignore[method-assign]
        lifted.set()


@contextlib.contextmanager
def _loses() -> Iterator[None]:
    """Have all chunks to the right neighbour vanish: they count as sent."""
    from ft_hsdp.ftar.transport.sender import StreamSender

    send = StreamSender.send

    def lose(self: StreamSender, head: bytes, payload: Any, small: bool) -> None:
        self.frames += 1

    StreamSender.send = lose  # type: ignore[method-assign]
    try:
        yield
    finally:
        StreamSender.send = send  # type: ignore[method-assign]


@contextlib.contextmanager
def _slow_link() -> Iterator[None]:
    def pace(rate: int) -> None:
        for sock in list(fault_injection.ring_sockets):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate.to_bytes(4, sys.byteorder))

    pace(SLOW_LINK)
    try:
        yield
    finally:
        pace(2**32 - 1)


def _kind(make: Callable[[], contextlib.AbstractContextManager[None]]) -> Callable[..., Any]:
    return lambda order, run: make()


KINDS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "hang_before": lambda: _hang("before"),
    "hang_after": lambda: _hang("after"),
    "hang_in": _engine_hangs,
    "lost_message": _loses,
    "slow_link": _slow_link,
}
fault_injection.fakes.update({name: _kind(make) for name, make in KINDS.items()})
fault_injection.fakes["slow_rank"] = lambda order, run: _around(
    lambda: time.sleep(order.seconds or SLOWER_S), _nothing
)
