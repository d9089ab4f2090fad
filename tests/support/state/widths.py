"""One state, cut for any number of ranks: its shards, their manifests, and servers that have them."""

import numpy as np

from ft_hsdp.core.state_id import StateId
from ft_hsdp.state.shared_memory import Bytes, InMemorySnapshots, SnapshotBuffer
from ft_hsdp.state.transfer import parts, shard_manifest
from ft_hsdp.state.transfer.http import StateServer
from ft_hsdp.state.transfer.shard_manifest import Layout, PackedTensor, ShardManifest

TOKEN = "cd" * 32
STATE = StateId(1, 7, "e" * 32)
SHAPES: dict[str, tuple[tuple[int, ...], str]] = {  # as FSDP2 and AdamW leave them
    "embed": ((101, 33), "float32"),
    "norm": ((7,), "bfloat16"),
    "one": ((1, 5), "float32"),
    "scalar.step": ((), "float32"),
    "wide": ((3, 70_000), "float32"),
    "embed.exp_avg": ((101, 33), "float32"),
    "empty": ((0, 4), "float32"),
    "counters": ((9,), "int64"),
}
WHOLE = ("scalar.step", "counters")


def tensors() -> tuple[PackedTensor, ...]:
    """The tensors of the state, as one rank alone has them."""
    made = [
        PackedTensor(name, "param", dtype, shape, shape, 0, 0, "whole" if name in WHOLE else "rows")
        for name, (shape, dtype) in SHAPES.items()
    ]
    return parts.layout_at(made, 1, 0).tensors


def layout(width: int, rank: int) -> Layout:
    return parts.layout_at(tensors(), width, rank)


def whole(name: str) -> Bytes:
    """The bytes of a whole tensor."""
    (tensor,) = (each for each in tensors() if each.name == name)
    return np.random.default_rng(len(name)).integers(0, 256, tensor.nbytes, dtype=np.uint8)


def content(width: int, rank: int) -> Bytes:
    """The packed shard of a rank, made from the whole tensors by numpy's cut."""
    place = layout(width, rank)
    packed = np.zeros(place.nbytes, dtype=np.uint8)
    for tensor in place.tensors:
        data = whole(tensor.name)
        if tensor.name not in WHOLE:
            chunk = -(-tensor.global_shape[0] // width)
            size = data.nbytes // max(1, tensor.global_shape[0])
            data = data[rank * chunk * size : (rank + 1) * chunk * size]
        packed[tensor.offset : tensor.offset + tensor.nbytes] = data
    return packed


def manifest(width: int, rank: int, lr: float = 0.1) -> ShardManifest:
    place = layout(width, rank)
    made = ShardManifest(STATE, rank, width, place.fingerprint, place.nbytes, place.tensors, (7,), ({"lr": lr},))
    return shard_manifest.seal(made, content(width, rank).data)


class Serving(InMemorySnapshots):
    """A state server with the shards of some ranks."""

    def __init__(self, width: int, *ranks: int, lr: float = 0.1) -> None:
        super().__init__()
        self.rooms = {}
        for rank in ranks:
            made = manifest(width, rank, lr)
            room = self.rooms[rank] = SnapshotBuffer(made.nbytes)
            room.bytes[: made.nbytes] = content(width, rank)
            self.put(made, room)
        self.server = StateServer("127.0.0.1", 0, self, TOKEN)
        self.address = self.server.address

    def close(self) -> None:
        self.server.close()
