"""The first steps on a device. Each rung needs one mechanism more: the first that fails names the fault.

`order` shows what a missing wait between streams does.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.checks import drain, empty, fresh, programs
from benchmarks.kernels.ring import PinnedSegment
from benchmarks.kernels.stepped import SteppedPlane
from ft_hsdp.core.ring import OperationKind
from ftar_kernels.flags import Command, Status, host_buffer
from ftar_kernels.plane import StagedPlane

N = 1 << 16  # elements of fp32
SILENCE_S = 3.0  # a rung that fails ends within this time
SLEEP_CYCLES = 200_000_000  # about 0.1 s of a device


def plane_of(
    device: torch.device,
    *,
    registered: bool = False,
    nbytes: int = 1 << 20,
    kind: type[StagedPlane] = StagedPlane,
    **options: Any,
) -> StagedPlane:
    """Return a plane on a buffer of `nbytes`: pinned memory, or shared memory that is registered."""
    if registered:
        segment = PinnedSegment(nbytes)
        segment.pin()
        buffer = segment.bytes
    else:
        buffer = host_buffer(nbytes, device)
    options = {"programs": programs(), "depth": 16, "silence_s": SILENCE_S, **options}
    return kind(device, buffer, buffer, **options)


def words(plane: StagedPlane) -> dict[str, Any]:
    """Return the flags of a plane, for a report."""
    page = plane.page
    status = [page.status(program).name for program in range(page.programs)]
    return {"posted": page.posted, "done": page.done(), "status": status}


class Ladder:
    """The rungs on one device. `run` climbs all of them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._x = fresh(N, torch.float32, device)
        self._out = empty(N, torch.float32, device)

    def run(self) -> dict[str, Any]:
        """Return for each rung whether it holds, what it has measured, and the error if not."""
        rungs: dict[str, Callable[[], dict[str, Any]]] = {
            "a kernel reads commands in host memory": lambda: self.copies(1, kind=SteppedPlane),
            "device to pinned memory": lambda: self.to_host(False),
            "the persistent kernel, one program": lambda: self.copies(1, programs=1),
            "the persistent kernel, 64 commands": lambda: self.copies(64, depth=64),
            "abort": self.abort,
            "silence": self.silence,
        }
        if self._device.type == "cuda":
            rungs["device to registered memory"] = lambda: self.to_host(True)
        rows = []
        for name, climb in rungs.items():
            begin = time.perf_counter()
            try:
                row = {"ok": True, **climb()}
            except Exception as error:
                row = {"ok": False, "error": f"{type(error).__name__}: {error}"[:300]}
            rows.append({"rung": name, **row, "s": time.perf_counter() - begin})
            sys.stderr.write(f"{rows[-1]}\n")
        return {"ok": all(row["ok"] for row in rows), "rows": rows}

    def to_host(self, registered: bool) -> dict[str, Any]:
        """Copy to host memory."""
        plane = plane_of(self._device, registered=registered)
        job = plane.open(self._x, self._out, 1)
        job.post(Command(OperationKind.COPY_SEND, 0, N, None, 0))
        drain(job, 1, SILENCE_S)
        job.close(failed=False)
        return self._compare(plane.send.view(torch.float32)[:N], plane)

    def copies(self, count: int, **options: Any) -> dict[str, Any]:
        """Copy on the device, as often as `count`."""
        self._out.zero_()
        plane = plane_of(self._device, **options)
        job = plane.open(self._x, self._out, count)
        for _ in range(count):
            job.post(Command(OperationKind.STORE, 0, N))
        try:
            drain(job, count, 5)
        except TimeoutError as error:
            raise TimeoutError(f"{error}: {words(plane)}") from None
        job.close(failed=False)
        return self._compare(self._out, plane)

    def abort(self) -> dict[str, Any]:
        """Measure how long a kernel that waits takes to end after an abort."""
        plane, times = plane_of(self._device), []
        plane.warm_up((torch.float32,))
        for _ in range(20):
            job = plane.open(self._x, self._out, 4)
            while not job.begun:
                time.sleep(1e-4)
            begin = time.perf_counter()
            plane.abort()
            job.close(failed=True)
            times.append(time.perf_counter() - begin)
        return {"p50_us": 1e6 * sorted(times)[10], "max_us": 1e6 * max(times)}

    def silence(self) -> dict[str, Any]:
        """Measure when a kernel ends by itself because the engine is silent."""
        plane = plane_of(self._device, silence_s=0.2)
        job, begin = plane.open(self._x, self._out, 1), time.perf_counter()
        while plane.page.status(0) in (Status.QUEUED, Status.RUNNING) and time.perf_counter() < begin + 5:
            time.sleep(1e-4)
        waited = time.perf_counter() - begin
        job.close(failed=True)
        found = {plane.page.status(program) for program in range(plane.programs)}
        if found != {Status.EXPIRED}:
            raise RuntimeError(f"the kernel did not end by itself: {words(plane)}")
        return {"asked_s": 0.2, "waited_s": waited}

    def _compare(self, out: Tensor, plane: StagedPlane) -> dict[str, Any]:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        wrong = int((out.cpu() != self._x.cpu()).sum())
        if wrong:
            raise RuntimeError(f"{wrong} of {N} elements are wrong: {words(plane)}")
        plane.close()
        return {}


def order(device: torch.device) -> dict[str, Any]:
    """Show that sums which are cleared after the gradient's event was recorded are overwritten with zeros.

    `Reducer` makes and clears its sums before the first attempt for this reason.
    """
    plane = plane_of(device, silence_s=10.0)
    plane.warm_up((torch.float32,))
    local, side, rows = torch.ones(N, device=device), torch.cuda.Stream(), []
    for after_clearing in (False, True):
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            ready = side.record_event()
            torch.cuda._sleep(SLEEP_CYCLES)  # what else is queued there
            out = torch.empty_like(local).zero_()
            ready = side.record_event() if after_clearing else ready
        job = plane.open(local, out, 1, ready)
        job.post(Command(OperationKind.STORE, 0, N))
        drain(job, 1)
        job.close(failed=False)
        torch.cuda.synchronize()
        rows.append({"event after the clearing": after_clearing, "wrong": int((out != 1).sum())})
    return {"ok": rows[1]["wrong"] == 0, "rows": rows}
