"""What the ring's engine drives: it posts commands, asks which are finished, and never waits for the device.

While a persistent kernel runs, the engine calls no function of CUDA: a thread that loads a kernel holds the driver
until the device is idle, and the device is idle only when the engine has posted. The engine reads and writes words
in pinned memory; another thread asks the driver whether the device has failed.

The buffers, the flags and the stream live as long as the plane. The engine's thread owns a plane; only `abort` may
come from other threads.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch
from torch import Tensor

from ft_hsdp.core.ring import OperationKind
from ftar_kernels.flags import Command, FlagPage, Status, host_buffer
from ftar_kernels.persistent import persistent_kernel
from ftar_kernels.reduce_copy import OPTIONS, PROGRAMS, check, shape, vector
from ftar_kernels.streams import DeviceStream, HostStream

POLL_S = 2e-5
CHECK_S = 0.1  # how often a silent device is asked whether it has failed
SILENCE_S = 30.0  # a program ends if the engine is silent for so long
GRACE_S = 5.0  # a program that runs ends within this time after an abort
HOLD_S = 60.0  # how long the end waits for a kernel that is queued behind other work


class PlaneError(RuntimeError):
    """The all-reduce on this plane did not finish."""


class Aborted(PlaneError):
    """The abort word was set."""


class Expired(PlaneError):
    """A program has ended by itself, because this process was silent: it was stopped, or was kept from running."""


class Stuck(PlaneError):
    """The device did not end what was aborted. Its memory must not be used again: end the process."""


class StagedPlane:
    """Copies and adds on a device, between GPU tensors and the staging buffers of one ring.

    Args:
        device: a CUDA device. On a CPU device the kernels are interpreted (TRITON_INTERPRET=1), with one program
            only.
        recv: receive buffer, a flat uint8 tensor aligned to 16 bytes that both CPU and device reach (`staging`).
        send: send buffer, likewise; may be the same tensor.
        programs: number of SMs that are used.
        depth: how many commands may be posted and not finished; a power of two.
        silence_s: a program of the kernel ends by itself if the engine neither posts nor asks what is
            finished for so long. However long peers take, a program waits.
        grace_s: how long a kernel that runs may take to end what was finished or aborted.
        hold_s: how long `StagedJob.close` waits for a kernel that is still queued behind other work of the device.
        stages: pipeline stages of the kernels' loads.
    """

    def __init__(
        self,
        device: torch.device,
        recv: Tensor,
        send: Tensor,
        *,
        programs: int = PROGRAMS,
        depth: int = 64,
        silence_s: float = SILENCE_S,
        grace_s: float = GRACE_S,
        hold_s: float = HOLD_S,
        stages: int = 1,
    ) -> None:
        self.device = device
        self.recv = recv
        self.send = send
        self.programs = programs
        self.depth = depth
        self.stages = stages
        self.silence_ns = int(silence_s * 1e9)
        self.grace_s = grace_s
        self.hold_s = hold_s
        self.page = FlagPage(host_buffer(FlagPage.nbytes(programs, depth), device), programs, depth)
        self.stream: DeviceStream | HostStream = DeviceStream(device) if device.type == "cuda" else HostStream()
        self._job: StagedJob | None = None

    def warm_up(
        self, dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16), wire: torch.dtype | None = None
    ) -> None:
        """Compile and load the kernels, for values that travel as `wire`; None: as they are.

        Blocks. The driver loads a kernel only when the device is idle. So nothing may wait for the host meanwhile,
        neither a kernel that spins nor a stream: the command is posted before the device waits for it.
        """
        for dtype in dtypes:
            empty = torch.zeros(16, dtype=dtype, device=self.device)
            job = self._prepare(empty, empty, 1, None, wire)
            job.post(Command(OperationKind.STORE, 0, 0))
            job.begin()
            deadline = time.monotonic() + 300
            while not job.completed():
                if time.monotonic() > deadline:
                    raise Stuck("a kernel did not come up")
                time.sleep(POLL_S)
            job.close(failed=False)

    def open(
        self,
        local: Tensor | None,
        out: Tensor,
        count: int,
        after: torch.cuda.Event | None = None,
        wire: torch.dtype | None = None,
    ) -> StagedJob:
        """Begin an all-reduce of `count` commands. Does not wait for the device.

        Args:
            local: flat tensor on the device with this member's values; None: relay.
            out: flat tensor on the device, of the same size and type, that receives the sum.
            count: how many commands will be posted.
            after: event that completes `local`; None: what the caller's current stream holds.
            wire: type of values in the buffers, to which sums are rounded; None: that of `out`.

        Raises:
            ValueError: the kernels cannot take a tensor.
        """
        job = self._prepare(local, out, count, after, wire)
        job.begin()
        return job

    def _prepare(
        self,
        local: Tensor | None,
        out: Tensor,
        count: int,
        after: torch.cuda.Event | None,
        wire: torch.dtype | None,
    ) -> StagedJob:
        """Return an all-reduce that has not begun on the device; the arguments are those of `open`."""
        assert self._job is None, "one all-reduce at a time"
        check(out, out.dtype)
        for buffer in (self.recv, self.send):
            check(buffer.view(wire or out.dtype), wire or out.dtype)
        if local is not None:
            check(local, out.dtype)
            if local.numel() != out.numel():
                raise ValueError(f"{local.numel()} elements into {out.numel()}")
        self.page.reset()
        self.stream.after(after)
        self._job = self.make_job(local, out, count, wire)
        return self._job

    def make_job(self, local: Tensor | None, out: Tensor, count: int, wire: torch.dtype | None) -> StagedJob:
        """Return the job of an all-reduce that has not begun; the arguments are those of `open`."""
        return StagedJob(self, local, out, count, wire)

    def abort(self) -> None:
        """End the running all-reduce at once; its output is undefined. Any thread, any number of times."""
        self.page.abort()

    def close(self) -> None:
        """Abort a running all-reduce and close the stream; blocks until the device has ended.

        Raises:
            Stuck: the device does not end.
        """
        if self._job is not None:
            self._job.close(failed=True)
        self.stream.close()

    def release(self, job: StagedJob) -> None:
        """Forget `job`, which has ended on the device."""
        assert self._job is job
        self._job = None


class StagedJob:
    """One all-reduce on a plane; `StagedPlane.open` makes it."""

    def __init__(
        self, plane: StagedPlane, local: Tensor | None, out: Tensor, count: int, wire: torch.dtype | None
    ) -> None:
        self._plane = plane
        self._page = plane.page
        self._stream = plane.stream
        self._local = local
        self._out = out
        self._count = count
        self._wire = wire
        self._recv = plane.recv.view(wire or out.dtype)
        self._send = plane.send.view(wire or out.dtype)
        self._vector = vector(wire or out.dtype)
        self._posted: deque[Command] = deque()
        self._finished = 0
        self._heard = time.monotonic()  # when the device was last seen to work

    def begin(self) -> None:
        """Let the device begin; later commands may be posted from now on. Does not wait."""
        self._stream.launch(self._launch)

    def post(self, command: Command) -> None:
        """Post one command. Does not wait.

        Raises:
            ValueError: the chunk is not in the buffers, or more commands are posted than were announced.
            BufferError: `depth` commands of the plane are not finished.
        """
        size = command.stop - command.start
        if not 0 <= command.start <= command.stop <= self._out.numel():
            raise ValueError(f"elements {command.start} to {command.stop} of {self._out.numel()}")
        for buffer, place in ((self._recv, command.recv), (self._send, command.send)):
            if place is not None and not 0 <= place <= place + size <= buffer.numel():
                raise ValueError(f"{size} elements at {place} of a buffer of {buffer.numel()}")
        if self._page.posted == self._count:
            raise ValueError(f"more than the {self._count} commands that were announced")
        self._page.post(command, self._local is not None, self._vector)
        self._posted.append(command)

    @property
    def begun(self) -> bool:
        return Status.QUEUED not in self._statuses()

    def completed(self) -> list[Command]:
        """Return the commands that were finished since the last call, in the order of posting. Does not wait.

        Each call tells the programs that the engine lives.

        Raises:
            Aborted: the plane was aborted.
            Expired: a program has ended by itself.
            RuntimeError: the device has failed.
        """
        if self._page.aborted:
            raise Aborted("the data plane was aborted")
        self._page.beat()
        done = self._page.done() - self._finished
        if done:
            self._finished += done
            self._heard = time.monotonic()
            return [self._posted.popleft() for _ in range(done)]
        if time.monotonic() - self._heard > CHECK_S:
            self._heard = time.monotonic()
            self._stream.check()
            if Status.EXPIRED in self._statuses():
                raise Expired("the device ended by itself: this process was silent for too long")
        return []

    def close(self, *, failed: bool) -> None:
        """End the all-reduce; block until the device has ended it.

        A kernel that is queued behind other work ends when its turn comes. Until then its memory is in use.

        Args:
            failed: abort what is not finished. False: all commands are finished.

        Raises:
            Stuck: the device does not end.
            RuntimeError: the device has failed.
        """
        if failed:
            self._page.abort()
        assert failed or self._finished == self._count, "close before all is finished"
        asked = begun = time.monotonic()
        while not self.ended:
            self._stream.check()
            now = time.monotonic()
            if not self.begun:
                begun = now
            if now > begun + self._plane.grace_s:
                raise Stuck(f"the device has not ended {self._plane.grace_s} s after its last command")
            if now > asked + self._plane.hold_s:
                raise Stuck(f"the device has not begun for {self._plane.hold_s} s: other work is queued before it")
            time.sleep(POLL_S)
        self._plane.release(self)

    @property
    def ended(self) -> bool:
        """Whether the device neither reads nor writes memory of it any more."""
        return not self._statuses() & {Status.QUEUED, Status.RUNNING}

    def _statuses(self) -> set[Status]:
        return {self._page.status(program) for program in range(self._page.programs)}

    def _launch(self) -> None:
        persistent_kernel[(self._plane.programs,)](
            *self._pointers(), self._count, self._plane.silence_ns, **self._shape()
        )

    def _pointers(self) -> tuple[Tensor, ...]:
        local = self._out if self._local is None else self._local
        return local, self._out, self._send, self._recv, self._page.words, self._page.commands

    def _shape(self) -> dict[str, Any]:
        return {
            "DEPTH": self._plane.depth,
            "STAGES": self._plane.stages,
            **OPTIONS,
            **shape(self._out.dtype, self._wire),
        }
