"""A small packed shard and its snapshot; what a process may lack."""

import threading
from dataclasses import dataclass

import pytest
import torch

from ft_hsdp.core.state_id import StateId
from ft_hsdp.state.shared_memory import SnapshotBuffer
from ft_hsdp.state.transfer import fetch, shard_manifest
from ft_hsdp.state.transfer.shard_manifest import Layout, ShardManifest
from ft_hsdp.train.state import packing

TOKEN = "ab" * 32
STATE = StateId(3, 7, "0123456789abcdef" * 2)
HYPER = ({"lr": 0.1, "betas": [0.9, 0.95], "foreach": None},)


@dataclass(frozen=True, slots=True)
class Snapshot:
    manifest: ShardManifest
    room: SnapshotBuffer

    @property
    def data(self) -> memoryview:
        return self.room.memory


def no_thread(monkeypatch: pytest.MonkeyPatch, *names: str, left: int = 0) -> list[threading.Thread]:
    """Refuse to start threads with these names, or any, after so many; return those that were to start."""
    start, asked = threading.Thread.start, list[threading.Thread]()

    def refused(thread: threading.Thread) -> None:
        if not names or thread.name in names:
            asked.append(thread)
            if len(asked) > left:
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    return asked


def chunks_of(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Have each checksum cover so many bytes, which are received and verified together."""
    monkeypatch.setattr(shard_manifest, "CHUNK_BYTES", nbytes)
    monkeypatch.setattr(fetch, "PART_BYTES", nbytes)


def tensors(seed: int = 0, size: int = 1000) -> dict[str, torch.Tensor]:
    """Parameters of several types and shapes, an empty shard and a scalar among them."""
    g = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(size, generator=g),
        "empty": torch.empty(0, 4),
        "scalar": torch.randn((), generator=g),
        "half": torch.randn(3, 5, generator=g).to(torch.bfloat16),
        "step": torch.tensor([2**40], dtype=torch.int64),
        "flags": torch.randint(0, 255, (7,), generator=g, dtype=torch.uint8),
    }


def sealed(state: StateId = STATE, rank: int = 0, size: int = 1000, seed: int = 0) -> tuple[Snapshot, Layout]:
    params = tensors(seed, size)
    place = Layout.of(params, {})
    room = SnapshotBuffer(place.nbytes)
    packing.pack(place, list(params.values()), torch.from_numpy(room.bytes))
    header = ShardManifest(state, rank, 2, place.fingerprint, place.nbytes, place.tensors, (4, 5), HYPER)
    return Snapshot(shard_manifest.seal(header, room.memory), room), place
