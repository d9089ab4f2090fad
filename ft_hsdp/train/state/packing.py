"""How the tensors of a rank become bytes and come back, and the digest of a whole state.

A shard is packed in the order of its `Layout`, with the checksums that its manifest tells. A digest of a whole
state does not depend on how the state is sharded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import blake3
import numpy as np
import torch
from torch.distributed.tensor import DTensor

from ft_hsdp.core import state_id
from ft_hsdp.state.transfer.shard_manifest import CHUNK_BYTES, Layout, RunningChecksums
from ft_hsdp.train.device import written
from ft_hsdp.train.loop.user_state import Values

PIECE = 256 << 10  # bytes that are copied and hashed together, so that they are in the CPU's cache the second time
STAGE = 4 * CHUNK_BYTES  # bytes that come from a device at once
LANDING = 4  # threads that take over what has come: one alone is slower than the bus


def within(layout: Layout, start: int, stop: int) -> tuple[tuple[int, int, int], ...]:
    """Return what lies in the packed bytes [start, stop).

    Returns:
        (index of the tensor, begin, end) for each piece, in bytes of that tensor.
    """
    cut = ((i, max(start - t.offset, 0), min(stop - t.offset, t.nbytes)) for i, t in enumerate(layout.tensors))
    return tuple((i, a, b) for i, a, b in cut if a < b)


def local(tensor: torch.Tensor) -> torch.Tensor:
    shard: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return shard.detach()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's values as uint8 [nbytes]: its memory, or a copy of a lazy or not contiguous view."""
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _as_array(tensor: torch.Tensor) -> Any:
    """Return what `as_bytes` does for a tensor in host memory, as an array; twice as fast for most of them."""
    if tensor.dtype == torch.float32 and tensor.is_contiguous() and not tensor.is_neg():
        return tensor.numpy().reshape(-1).view(np.uint8)
    return as_bytes(tensor).numpy()


def pack(layout: Layout, sources: Sequence[torch.Tensor], buffer: torch.Tensor) -> tuple[str, ...]:
    """Copy local shards, from any device, into ``buffer`` uint8 [layout.nbytes]. Padding becomes zero.

    Returns:
        The checksum of each chunk (`ShardManifest.checksums`). For tensors in host memory it is computed from the
        tensors, not from the buffer, so a byte that is damaged on its way or in the buffer shows.
    """
    if any(source.device.type != "cpu" for source in sources):
        return pack_staged(layout, sources, buffer)
    packed: Any = buffer.numpy()
    sums = RunningChecksums()
    end = 0
    for place, source in zip(layout.tensors, sources, strict=True):
        if place.offset > end:
            _copy(np.zeros(place.offset - end, dtype=np.uint8), packed[end : place.offset], sums)
        end = place.offset + place.nbytes
        if place.nbytes:
            _copy(_as_array(local(source)), packed[place.offset : end], sums)
    _copy(np.zeros(layout.nbytes - end, dtype=np.uint8), packed[end:], sums)
    return sums.end()


def _copy(source: Any, target: Any, sums: RunningChecksums) -> None:
    begin = 0
    while begin < len(source):
        piece = source[begin : begin + PIECE]
        np.copyto(target[begin : begin + len(piece)], piece)
        sums.add(piece.data)
        begin += len(piece)


def pack_staged(layout: Layout, sources: Sequence[torch.Tensor], buffer: torch.Tensor) -> tuple[str, ...]:
    """Copy local shards into ``buffer``, as `pack` does, through pinned memory, which the device fills by itself.

    Meanwhile threads take over what has come, and hash it. Reads on the current stream; blocks until all is there.
    """
    held = [as_bytes(local(source)) for source in sources]
    away = next((each for each in held if each.is_cuda), held[0])
    rooms: SimpleQueue[torch.Tensor] = SimpleQueue()
    for _ in range(LANDING + 2):
        rooms.put(torch.empty(min(STAGE, layout.nbytes), dtype=torch.uint8, pin_memory=away.is_cuda))
    landed: list[Future[tuple[str, ...]]] = []
    with ThreadPoolExecutor(LANDING, "snapshot-landing") as pool:
        for begin in range(0, layout.nbytes, STAGE):
            end, room, filled = min(begin + STAGE, layout.nbytes), rooms.get(), 0
            for index, a, b in within(layout, begin, end):
                at = layout.tensors[index].offset + a - begin
                room[filled:at].zero_()
                filled = at + b - a
                room[at:filled].copy_(held[index][a:b], non_blocking=True)
            room[filled : end - begin].zero_()
            landed.append(pool.submit(_land, written(away), room, buffer[begin:end], rooms))
    return tuple(each for future in landed for each in future.result())


def _land(
    after: torch.cuda.Event | None, room: torch.Tensor, into: torch.Tensor, rooms: SimpleQueue[torch.Tensor]
) -> tuple[str, ...]:
    """Take over what has come into ``room`` when it is there, and give the room back; return its checksums."""
    try:
        if after is not None:
            after.synchronize()
        source: Any = room.numpy()[: len(into)]
        sums = RunningChecksums()
        _copy(source, into.numpy(), sums)
        return sums.end()
    finally:
        rooms.put(room)


def unpack(layout: Layout, buffer: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    for place, target in zip(layout.tensors, targets, strict=True):
        if place.nbytes:
            piece = buffer[place.offset : place.offset + place.nbytes]
            flat = local(target)
            flat.copy_(piece.view(flat.dtype).view(flat.shape))


def state_digest(
    params: Mapping[str, torch.Tensor],
    optim: Mapping[str, torch.Tensor],
    hyper: Sequence[dict[str, Any]],
    user: Mapping[str, torch.Tensor] | None = None,
    values: Values | None = None,
) -> str:
    """Return the blake3 of a state in hex, independent of its sharding; a collective if there are DTensors.

    Over the sorted names of (name, dtype, global shape, blake3 of the full row-major bytes) of parameters,
    then of optimizer tensors and of those of the user, then canonical JSON of the hyper-parameters before lr_scale
    and of the user's values, if there are any.
    """
    total = blake3.blake3()
    for named in (params, optim, user or {}):
        for name in sorted(named):
            tensor = named[name]
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            array: Any = as_bytes(full.detach().cpu()).numpy()
            content = blake3.blake3(memoryview(array)).hexdigest()
            dtype = str(full.dtype).removeprefix("torch.")
            total.update(state_id.canonical([name, dtype, list(full.shape), content]).encode())
    total.update(state_id.canonical(hyper).encode())
    if values:
        total.update(state_id.canonical(values).encode())
    return total.hexdigest()
