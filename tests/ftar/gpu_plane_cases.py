"""Cases of the GPU plane on a CPU device, whose kernels are interpreted; test_kernels_interpreted runs them in a
process of its own. One interpreted kernel runs at a time there, so at most one member has a persistent one."""

import asyncio
import contextlib
import itertools
import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.stepped import SteppedPlane
from ft_hsdp.core.ring import RingPlan, operations
from ft_hsdp.errors import (
    DeviceExpired,
    FTARError,
    InvalidArgument,
    LocalProcessError,
    LocalResourceError,
    LocalSystemError,
    PeerDead,
    ProtocolViolation,
)
from ft_hsdp.ftar.allreduce import AllReduceOrder, AllReduceResult, Ring
from ft_hsdp.ftar.connections import MemberIdentity
from ft_hsdp.ftar.dataplane.base import Plane
from ft_hsdp.ftar.dataplane.cpu import CpuPlane
from ft_hsdp.ftar.dataplane.gpu import GpuPlane
from ft_hsdp.ftar.frame import Frame, Key
from ft_hsdp.ftar.group import Group, GroupEvents
from ft_hsdp.ftar.settings import Settings
from ft_hsdp.ftar.transport import receiver
from ft_hsdp.ftar.transport.arena import Arena
from ftar_kernels import plane as kernels
from ftar_kernels import summary
from tests.support.ftar.ring_helpers import LAYOUT, TOKEN, grant
from tests.support.ftar.ring_rig import DEADLINE_S, DyingPlane, Engines, Flavour, Shape
from tests.support.ftar.ring_values import KEY, entry, folded, same, values
from tests.support.waiting import async_until

CPU = torch.device("cpu")
CHUNK, SLOTS, N = 256, 2, 901
RING_OF_ONE = Settings(chunk_bytes=CHUNK, chunks=SLOTS)
Make = Callable[[Arena], Plane]


def stepped(arena: Arena) -> GpuPlane:
    return GpuPlane(CPU, arena, 20.0, staged=SteppedPlane)


def persistent(arena: Arena) -> GpuPlane:
    return GpuPlane(CPU, arena, 20.0)


def adds(arena: Arena) -> CpuPlane:
    return CpuPlane()


def plan(elements: int, itemsize: int, members: int) -> RingPlan:
    return RingPlan(elements, members, CHUNK // itemsize, SLOTS)


class Scene(Engines):
    """A ring of engines, a plane of its own each; tensors are in memory that both CPU and device reach."""

    def __init__(self, planes: Sequence[Make], transport: str = "tcp") -> None:
        names = [5 + i for i in range(len(planes))]
        super().__init__(Flavour(transport, transport), names, Shape(CHUNK, SLOTS, 5.0), planes)

    def sum(
        self, locals_: Sequence[Tensor | None], outs: Sequence[Tensor], wire: torch.dtype | None = None
    ) -> list[Future[AllReduceResult]]:
        weights = [int(local is not None) for local in locals_]
        return [
            self.submit(i, AllReduceOrder(KEY, local, out, entry(self.names[i], weights[i]), None, wire))
            for i, (local, out) in enumerate(zip(locals_, outs, strict=True))
        ]

    def check(self, n: int, dtype: torch.dtype = torch.float32, relays: Sequence[int] = (), seed: int = 0) -> None:
        """Everybody gets the sum that the CPU plane would make, and its input is as it was."""
        members = len(self.names)
        given = [None if i in relays else x for i, x in enumerate(values(members, n, dtype, seed))]
        locals_ = [None if x is None else Arena().empty(n, dtype).copy_(x) for x in given]
        outs = [Arena().empty(n, dtype).fill_(77) for _ in given]
        works = self.sum(locals_, outs)
        expected = folded(plan(n, dtype.itemsize, members), self.names, given, dtype)
        for work, out, local, x in zip(works, outs, locals_, given, strict=True):
            assert [e.replica for e in work.result(DEADLINE_S).entries] == self.names
            assert same(out, expected)
            assert local is None or x is None or same(local, x)

    def close(self, keep: bool = False) -> None:
        """End the ring; ``keep`` the planes open for another one."""
        super().close()
        for plane in () if keep else self.planes:
            if isinstance(plane, GpuPlane):
                plane.close()


@contextlib.contextmanager
def scene(*planes: Make, transport: str = "tcp") -> Iterator[Scene]:
    made = Scene(planes, transport)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("members", [2, 3])
def test_rings_of_devices_sum_as_the_cpu_does(members: int, transport: str) -> None:
    with scene(*[stepped] * members, transport=transport) as ring:
        ring.check(N, relays=[0] if members == 3 else [])
        ring.check(2, seed=1)  # some chunks are empty, and the buffers are used again
        ring.check(N, torch.float16, seed=2)  # bfloat16 is rounded otherwise by the interpreter


@pytest.mark.parametrize("relays", [(), (0,), (1,), (0, 1, 2)])
def test_what_travels_as_bf16_is_summed_alike_by_devices_and_cpus(relays: Sequence[int]) -> None:
    """Of numbers whose sums bf16 has: the interpreter rounds otherwise than a device."""
    given = [None if i in relays else x.mul(8).round().clamp(-40, 40) for i, x in enumerate(values(3, N))]
    with scene(adds, persistent, adds) as ring:
        locals_ = [None if x is None else Arena().empty(N).copy_(x) for x in given]
        outs = [Arena().empty(N).fill_(77) for _ in given]
        for work in ring.sum(locals_, outs, torch.bfloat16):
            work.result(DEADLINE_S)
        expected = folded(plan(N, 2, 3), ring.names, given, torch.bfloat16).float()
        assert all(same(out, expected) for out in outs)


def test_a_member_alone_rounds_too() -> None:
    given = torch.tensor([1.0, 1.0 + 2**-7, 3.0, -257.0])
    outs = []
    for make in (adds, persistent):
        with scene(make) as ring:
            outs.append(Arena().empty(4).fill_(77))
            ring.sum([Arena().empty(4).copy_(given)], [outs[-1]], torch.bfloat16)[0].result(DEADLINE_S)
    assert outs[0].tolist() == [1.0, 1.0 + 2**-7, 3.0, -256.0]
    assert outs[1][:3].tolist() == outs[0][:3].tolist()
    assert outs[1][3] != given[3], "it was not rounded"


def test_a_device_in_a_ring_of_cpus() -> None:
    with scene(adds, persistent, adds) as ring:
        ring.check(N)
        ring.check(N, relays=[1], seed=1)
        ring.check(N, relays=[0, 2], seed=2)
        ring.check(N, relays=[0, 1, 2], seed=3)


@pytest.mark.parametrize("make", [stepped, persistent])
def test_a_neighbour_that_dies_in_the_middle_leaves_nothing_running_on_the_device(make: Make) -> None:
    with scene(make, lambda _: DyingPlane()) as ring:
        device, dying = ring.planes
        assert isinstance(device, GpuPlane)
        assert isinstance(dying, DyingPlane)
        dying.ring, dying.left = ring.rings[1], 5
        locals_ = [Arena().empty(N).copy_(x) for x in values(2, N)]
        works = ring.sum(locals_, [Arena().empty(N) for _ in locals_])
        errors = [w.exception(DEADLINE_S) for w in works]
        assert all(isinstance(e, PeerDead) for e in errors), errors
        local, out = locals_[0], Arena().empty(N)
        again = Ring(2, [5], 0, None, None, device, Settings(chunk_bytes=CHUNK, chunks=SLOTS))
        again.all_reduce(AllReduceOrder(KEY, local, out, entry(5)))  # the plane serves the next ring
        assert same(out, local)


def test_a_device_that_has_begun_and_finishes_nothing_ends_the_process() -> None:
    plane, out = GpuPlane(CPU, Arena(), DEADLINE_S), Arena().empty(8)
    order = AllReduceOrder(KEY, None, out, entry(5))
    Ring(1, [5], 0, None, None, plane, RING_OF_ONE).all_reduce(order)  # compiles the kernel, which may take long
    plane._timeout_s = 0.2  # of the next all-reduce, which finishes nothing
    staged = plane._staged
    assert staged is not None
    with (
        mock.patch.object(staged.page, "post"),
        pytest.raises(LocalProcessError, match="nothing was finished for 0") as failed,
    ):
        Ring(2, [5], 0, None, None, plane, RING_OF_ONE).all_reduce(order)
    assert failed.value.exit_code == 75
    Ring(3, [5], 0, None, None, plane, RING_OF_ONE).all_reduce(order)
    plane.close()


def test_a_kernel_that_is_queued_behind_other_work_is_waited_for() -> None:
    """The device has not begun, so nothing says that it is broken: a backward pass may take long."""
    plane, out = GpuPlane(CPU, Arena(), -1.0), Arena().empty(8).fill_(3)
    plane.reserve(plan(8, 4, 1), torch.float32)
    ring = Ring(1, [5], 0, None, None, plane, RING_OF_ONE)
    held, looks = threading.Event(), itertools.count()

    def look(job: Any) -> list[Any]:
        if next(looks) == 20:
            held.set()
        return [] if not held.is_set() else completed(job)

    completed = kernels.StagedJob.completed
    with (
        mock.patch.object(kernels.StagedJob, "completed", look),
        mock.patch.object(kernels.StagedJob, "begun", property(lambda _: False)),
    ):
        ring.all_reduce(AllReduceOrder(KEY, None, out, entry(5)))
    assert not out.any()
    plane.close()


@pytest.mark.parametrize(
    ("text", "kind", "code"),
    [
        ("CUDA error: an illegal memory access was encountered", LocalProcessError, 75),
        ("CUDA error: device-side assert triggered", LocalProcessError, 75),
        ("CUDA driver error 719: unspecified launch failure", LocalProcessError, 75),
        ("Failed to find C compiler. Please specify via CC environment variable", LocalProcessError, 75),
        ("CUDA error: out of memory", LocalResourceError, 75),
        ("CUDA driver error 214: uncorrectable ECC error encountered", LocalSystemError, 76),
        ("CUDA error: hardware stack error", LocalSystemError, 76),
        ("CUDA error: no CUDA-capable device is detected", LocalSystemError, 76),
    ],
)
def test_only_an_error_that_names_broken_hardware_condemns_the_host(text, kind, code) -> None:
    plane, out = stepped(Arena()), Arena().empty(8)
    plane.reserve(plan(8, 4, 1), torch.float32)
    assert plane._staged is not None
    stream = plane._staged.stream
    ring = Ring(1, [5], 0, None, None, plane, RING_OF_ONE)
    with (
        mock.patch.object(stream, "launch"),  # nothing is ever finished
        mock.patch.object(stream, "_error", RuntimeError(text)),
        pytest.raises(kind, match=text.split(".", maxsplit=1)[0]) as failed,
    ):
        ring.all_reduce(AllReduceOrder(KEY, None, out, entry(5)))
    assert failed.value.exit_code == code
    stream.close()


# Waits: a kernel ends by itself only when its own engine stands still, however long peers take.

SILENCE_S = 0.05


class Pausing:
    """A plane whose jobs pause for `pause_s` before the `at`th call of what is named."""

    at, pause_s, named = 0, 0.0, ""

    def open(self, *order: Any) -> Any:
        job = super().open(*order)  # type: ignore[misc]
        calls, call = itertools.count(), getattr(job, self.named)

        def later(*given: Any) -> Any:
            if next(calls) == self.at:
                time.sleep(self.pause_s)
            return call(*given)

        setattr(job, self.named, later)
        return job


class Late(Pausing, CpuPlane):
    """A neighbour that pauses before one of its chunks."""

    named = "post"


class Stopped(Pausing, GpuPlane):
    """The plane of an engine that stands still before it looks."""

    named = "completed"


def test_orders_of_waits_and_silences() -> None:
    """A late neighbour is waited for; an engine that stood still fails the all-reduce at most, never its process.

    FT_HSDP_ORDERS says how many orders are tried.
    """
    chance, arena = random.Random(5), Arena()
    plane = Stopped(CPU, arena, DEADLINE_S, silence_s=SILENCE_S)
    plane.reserve(plan(N, 4, 1), torch.float32)
    expired = 0
    for order in range(int(os.environ.get("FT_HSDP_ORDERS", "6"))):
        ours, theirs = math.exp(chance.uniform(-2.3, 2.7)), math.exp(chance.uniform(-2.3, 4.6))
        late = Late()
        plane.at, plane.pause_s = chance.randrange(40), (ours if order % 2 else 0.0) * SILENCE_S
        late.at, late.pause_s = chance.randrange(15), theirs * SILENCE_S
        for _ in range(5):  # a busy machine may keep an engine from running for as long
            with mock.patch.object(receiver, "WAIT_S", SILENCE_S / 5):
                ring = Scene([lambda _: plane, lambda _, n=late: n])  # type: ignore[misc]
            try:
                ring.check(N, seed=order)
                break
            except DeviceExpired:
                expired += 1
                plane.pause_s = 0.0  # the step is tried again
            finally:
                ring.close(keep=True)
        else:
            pytest.fail(f"order {order} never succeeds")
    plane.close()
    assert expired, "no order has stopped an engine for long enough"


def test_what_the_kernels_cannot_take_is_refused() -> None:
    with scene(stepped) as ring:
        odd = Arena().empty(9)[1:]
        (work,) = ring.sum([odd], [Arena().empty(8)])
        assert isinstance(work.exception(DEADLINE_S), InvalidArgument)


def test_memory_that_the_device_cannot_reach_ends_the_process_and_not_the_job() -> None:
    """Triton's launcher says so with a ValueError, as if an argument were wrong."""
    plane, out = stepped(Arena()), Arena().empty(8)
    plane.reserve(plan(8, 4, 1), torch.float32)
    wrong = ValueError("Pointer argument (at 2) cannot be accessed from Triton (cpu tensor?)")
    with mock.patch.object(plane._staged, "open", side_effect=wrong), pytest.raises(LocalProcessError) as failed:
        plane.open(None, out, plan(8, 4, 1))
    assert failed.value.exit_code == 75
    plane.close()


def test_more_chunks_than_slots_are_refused() -> None:
    plane, out, cut = stepped(Arena()), Arena().empty(N), plan(N, 4, 3)
    job = plane.open(None, out, cut)
    operation = operations(0, 3)[1]
    frames = [Frame(operation, r, s := cut.span(operation.shard, r), 4 * s.size, 0, False) for r in range(3)]
    places = {job.buffer_for(frame).data_ptr() for frame in frames[:SLOTS]}
    assert len(places) == SLOTS
    with pytest.raises(ProtocolViolation, match="more chunks than"):
        job.buffer_for(frames[SLOTS])
    job.close(failed=True)
    plane.close()
    assert issubclass(ProtocolViolation, FTARError)


async def test_groups_use_it_from_epoch_to_epoch() -> None:
    """As the trainer does: the plane's memory is the group's, and a neighbour on the host reads it in place."""
    connected: list[tuple[int, int]] = []
    groups, planes = [], []
    for name in (0, 1):
        arena = Arena()
        events = GroupEvents(lambda e, n=name: connected.append((n, e)), *[lambda _: None] * 3)  # type: ignore[misc]
        settings = Settings("auto", CHUNK, SLOTS, timeout_s=5.0)
        planes.append(stepped(arena))
        groups.append(Group(MemberIdentity(name, 0, LAYOUT, TOKEN), settings, events, planes[-1], arena))
    addresses = {n: group.listen("127.0.0.1") for n, group in enumerate(groups)}
    locals_ = [Arena().empty(N).copy_(x) for x in values(2, N)]
    for epoch, names in ((1, (0, 1)), (2, (0,))):
        given = grant(epoch, {n: addresses[n] for n in names})
        for n in names:
            groups[n].configure(given)
        await async_until(lambda e=epoch, m=names: all((n, e) in connected for n in m), "the ring")  # type: ignore[misc]
        outs = [Arena().empty(N) for _ in names]
        key = Key(epoch, 1, 0, 0, "00" * 16)
        works = [groups[n].all_reduce(key, locals_[n], outs[n], entry(n)) for n in names]
        await asyncio.gather(*map(asyncio.wrap_future, works))
        cut = RingPlan.cut(N, 4, len(names), settings.slots, settings.chunk_bytes)
        assert all(same(out, folded(cut, names, [locals_[n] for n in names], torch.float32)) for out in outs)
        assert set(groups[0].transports) <= {"shm"}
    for group, plane in zip(groups, planes, strict=True):
        await group.close()
        plane.close()


class Compiled:
    """Stands for a kernel, and notes for which types and constants it is launched."""

    def __init__(self, kernel: Any, seen: set[tuple[object, ...]]) -> None:
        self._kernel = kernel
        self._seen = seen

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            types = [a.dtype for a in arguments if isinstance(a, Tensor)]
            self._seen.add((self._kernel.__name__, *types, *sorted(constants.items())))
            self._kernel[grid](*arguments, **constants)

        return launch


def test_all_that_a_step_launches_is_loaded_before_it() -> None:
    """The driver loads a kernel when the device is idle: beside an all-reduce, when that has ended."""
    seen: set[tuple[object, ...]] = set()
    with contextlib.ExitStack() as stack:
        for module, name in (kernels, "persistent_kernel"), (summary, "block_kernel"), (summary, "fold_kernel"):
            stack.enter_context(mock.patch.object(module, name, Compiled(getattr(module, name), seen)))
        plane = persistent(Arena())
        plane.reserve(RingPlan.cut(N, 4, 1, SLOTS, CHUNK), torch.float32, torch.bfloat16)
        plane.close()
        summary.warm_up(CPU)
        loaded = seen.copy()
        seen.clear()
        with scene(adds, persistent) as ring:
            for wire in (None, torch.bfloat16):
                outs = [Arena().empty(N) for _ in range(2)]
                for work in ring.sum([Arena().empty(N).fill_(1) for _ in range(2)], outs, wire):
                    work.result(DEADLINE_S)
        for spans in ((0, N),), ((0, 5), (7, 900)), ():
            summary.summarize(outs[1], spans)()
    assert {name for name, *_ in seen} == {"persistent_kernel", "block_kernel", "fold_kernel"}
    assert seen <= loaded
