"""Checks kernels, commands and rings against the reference, on fresh random data, on a GPU or interpreted."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels import reference, stepped
from benchmarks.kernels.ring import KernelRingMember, RingMemoryLayout
from ft_hsdp.core.ring import OperationKind
from ftar_kernels.flags import Command, host_buffer
from ftar_kernels.handshake import INTERPRETED
from ftar_kernels.plane import StagedPlane
from ftar_kernels.reduce_copy import DTYPES, vector
from ftar_kernels.summary import reference as summary_reference
from ftar_kernels.summary import summarize

SIZES = (1, 3, 16, 511, 8192, 20_000, 70_001)
LARGE = (1_000_003, 8_388_608)


def programs() -> int:
    """Return how many programs a plane has here.

    Interpreted programs run one after the other, so they cannot wait for each other: one only.
    """
    return 1 if INTERPRETED else 2


def empty(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a flat uninitialized tensor aligned to 16 bytes."""
    if device.type == "cuda":
        return torch.empty(elements, dtype=dtype, device=device)
    return host_buffer(elements * dtype.itemsize, device).view(dtype)


def fresh(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a flat tensor of random numbers.

    The interpreter rounds halves of a bfloat16 away from zero, so there they are small integers.
    """
    if dtype.is_floating_point and not (INTERPRETED and dtype == torch.bfloat16):
        numbers = torch.randn(elements) * 4
    else:
        numbers = torch.randint(-32, 33, (elements,))
    out = empty(elements, dtype, device)
    out.copy_(numbers)
    return out


@contextmanager
def watchdog(seconds: float, *planes: StagedPlane) -> Iterator[None]:
    """Abort the planes if the block takes longer than `seconds`, so that nothing on the device waits forever."""

    def bark() -> None:
        for plane in planes:
            plane.abort()

    timer = threading.Timer(seconds, bark)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def kernels(device: torch.device) -> dict[str, Any]:
    """Check reduce-copy and copy to one and two destinations, for all types and odd sizes."""
    wrong = []
    cases = 0
    for dtype in DTYPES:
        for size in SIZES + (LARGE if device.type == "cuda" else ()):
            a, b = fresh(size, dtype, device), fresh(size, dtype, device)
            for reduces in (True, False):
                for two in (True, False):
                    got = [empty(size, dtype, device) for _ in range(2)]
                    want = [torch.empty_like(a) for _ in range(2)]
                    second = (got[1], want[1]) if two else (None, None)
                    stepped.reduce_copy(a, b if reduces else None, got[0], second[0])
                    reference.copy(reference.added(a, b) if reduces else a, want[0], second[1])
                    cases += 1
                    if not all(torch.equal(g, w) for g, w in zip(got[: 1 + two], want[: 1 + two], strict=True)):
                        wrong.append(f"{dtype} {size} reduces={reduces} two={two}")
    return {"ok": not wrong, "cases": cases, "wrong": wrong}


def summaries(device: torch.device) -> dict[str, Any]:
    """Check digests and squares of random values, of spans, and of values that lie elsewhere in memory."""
    wrong = []
    for size in SIZES + (LARGE if device.type == "cuda" else ()):
        values = fresh(size, torch.float32, device)
        spans = [(0, size), (size // 3, size // 2)]
        found, want = summarize(values, spans)(), summary_reference(values, spans)
        elsewhere = torch.cat([values[:1], values])[1:]
        close = all(abs(a - b) <= 1e-12 * b for a, b in zip(found[1], want[1], strict=True))
        if found[0] != want[0] or not close or summarize(elsewhere, ())()[0] != found[0]:
            wrong.append(f"{size}: {found} instead of {want}")
    return {"ok": not wrong, "cases": len(SIZES), "wrong": wrong}


def drain(job: Any, count: int, seconds: float = 30.0) -> list[Command]:
    """Wait until `count` commands of `job` are finished, and return them.

    Raises:
        TimeoutError: they are not finished after `seconds`.
    """
    done: list[Command] = []
    deadline = time.monotonic() + seconds
    while len(done) < count:
        done += job.completed()
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(done)} of {count} commands finished")
        time.sleep(2e-5)
    return done


def _random_command(kind: OperationKind, elements: int, lanes: int, receives: bool) -> Command:
    start = random.randrange(elements)
    stop = random.randrange(start, elements + 1)
    send = start if kind.sends else None
    return Command(kind, start, stop, 2 * lanes + start % lanes if receives else None, send)


def commands(device: torch.device, elements: int = 3000, repeat: int = 2) -> dict[str, Any]:
    """Check every kind of command, with and without a received chunk, contributing and relaying, at odd places."""
    wrong = []
    cases = 0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        nbytes = (elements + 64) * dtype.itemsize
        plane = StagedPlane(
            device, host_buffer(nbytes // 16 * 16, device), host_buffer(nbytes // 16 * 16, device),
            programs=programs(), depth=4, silence_s=20,
        )  # fmt: skip
        plane.warm_up((dtype,))
        for kind in list(OperationKind) * repeat:
            for receives in (True, False):
                for contributes in (True, False):
                    command = _random_command(kind, elements, vector(dtype), receives)
                    local = fresh(elements, dtype, device)
                    out, send = fresh(elements, dtype, device), plane.send.view(dtype)
                    recv = plane.recv.view(dtype)
                    recv.copy_(fresh(recv.numel(), dtype, torch.device("cpu")))
                    own = local if contributes else None
                    want, sent = out.cpu().clone(), send.clone()
                    reference.run(command, None if own is None else own.cpu(), want, recv, sent)
                    with watchdog(20, plane):
                        job = plane.open(own, out, 1)
                        job.post(command)
                        drain(job, 1)
                        job.close(failed=False)
                    cases += 1
                    if not (torch.equal(out.cpu(), want) and torch.equal(send, sent)):
                        wrong.append(f"{dtype} {command} contributes={contributes}")
        plane.close()
    return {"ok": not wrong, "cases": cases, "wrong": wrong}


def ring(
    device: torch.device, members: int, elements: int, chunk_bytes: int, slots: int,
    dtype: torch.dtype = torch.float32, repeat: int = 1, relay: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Run `repeat` all-reduces of `members` threads of this process.

    All members must end with the bytes of the reference.
    """
    layout = RingMemoryLayout(members, chunk_bytes, slots)
    memory = host_buffer(layout.nbytes, device)
    nbytes = max(elements * dtype.itemsize, 16)
    team = [
        KernelRingMember(
            memory, layout, i, device, -(-nbytes // 16) * 16, stepped.kind_of(device), programs=programs()
        )
        for i in range(members)
    ]
    for member in team:
        member.plane.warm_up((dtype,))
    inputs = [None if i == relay else fresh(elements, dtype, device) for i in range(members)]
    outs = [empty(elements, dtype, device) for _ in range(members)]
    want = reference.ring_all_reduce(inputs, outs[0], chunk_bytes // dtype.itemsize, slots)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    errors: list[str] = []
    times = []

    def run(i: int) -> None:
        try:
            team[i].all_reduce(inputs[i], outs[i])
        except Exception as error:  # a thread's error belongs into the report
            errors.append(f"member {i}: {error!r}")
            team[i].mark_dead()

    with watchdog(60, *(member.plane for member in team)):
        for _ in range(repeat):
            for out in outs:
                out.zero_()
            begin = time.perf_counter()
            threads = [threading.Thread(target=run, args=(i,)) for i in range(members)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            times.append(time.perf_counter() - begin)
            if errors:
                break
    same = all(torch.equal(o, w) for o, w in zip(outs, want, strict=True))
    for member in team:
        member.close()
    seconds = sorted(times)[len(times) // 2]
    return {
        "ok": same and not errors, "errors": errors, "members": members, "mib": nbytes / 2**20, "dtype":
        str(dtype), "ms": 1e3 * seconds, "gb_s": nbytes / seconds / 1e9,
    }  # fmt: skip
