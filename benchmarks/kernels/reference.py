"""What the kernels must compute, in torch: the reference of the checks, on any device.

Sums of bfloat16 and float16 are formed in float32 and rounded to nearest even at every hop of the ring, as the
wire carries them. Copies keep every bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ft_hsdp.core.ring import RingPlan, operations
from ftar_kernels.flags import Command

HALVES = (torch.bfloat16, torch.float16)


def copy(src: Tensor, dst1: Tensor, dst2: Tensor | None = None) -> None:
    """Copy `src` to one or two destinations of its shape and type."""
    dst1.copy_(src)
    if dst2 is not None:
        dst2.copy_(src)


def added(a: Tensor, b: Tensor) -> Tensor:
    """Return a + b."""
    return (a.float() + b.float()).to(a.dtype) if a.dtype in HALVES else a + b


def run(command: Command, local: Tensor | None, out: Tensor, recv: Tensor, send: Tensor) -> None:
    """Execute one command on flat tensors of one type, as the device of a plane does."""
    size = command.stop - command.start
    own = local[command.start : command.stop] if local is not None else None
    came = recv[command.recv : command.recv + size] if command.recv is not None else None
    if not command.kind.adds and came is not None:
        own = None
    targets = [out[command.start : command.stop]] if command.kind.stores else []
    if command.kind.sends and command.send is not None:
        targets.append(send[command.send : command.send + size])
    for target in targets:
        if own is not None and came is not None:
            copy(added(came, own), target)
        elif own is not None or came is not None:
            copy(own if own is not None else came, target)  # type: ignore[arg-type]
        elif command.kind.stores:
            target.zero_()


def ring_all_reduce(inputs: Sequence[Tensor | None], like: Tensor, chunk: int, slots: int) -> list[Tensor]:
    """Return what each member of a ring ends with (FT-HSDP §4.2), computed chunk by chunk through staged buffers.

    Args:
        inputs: flat tensors, one for each position; None for a member that relays.
        like: gives size, type and device.
        chunk: elements of a chunk.
        slots: chunks in flight to a neighbour at once.
    """
    members = len(inputs)
    plan = RingPlan(like.numel(), members, chunk, slots)
    schedules = [operations(position, members) for position in range(members)]
    outs = [torch.empty_like(like) for _ in inputs]
    for round_ in range(plan.rounds):
        wire: list[Tensor | None] = [None] * members
        for number in range(len(schedules[0])):
            left = [wire[position - 1] for position in range(members)]
            for position in range(members):
                operation = schedules[position][number]
                kind, span = operation.kind, plan.span(operation.shard, round_)
                came, send = left[position], like.new_empty(span.size)
                recv, place = 0 if came is not None else None, 0 if kind.sends else None
                command = Command(kind, span.start, span.stop, recv, place)
                run(command, inputs[position], outs[position], like if came is None else came, send)
                empty = not kind.stores and came is None and inputs[position] is None
                wire[position] = None if empty or not kind.sends else send
    return outs
