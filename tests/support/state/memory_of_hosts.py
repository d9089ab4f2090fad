"""Agents of several hosts in one process, and the ranks of a replica, on threads, that restore from them."""

import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from ft_hsdp.core.grant import Holders
from ft_hsdp.core.state_id import StateId
from ft_hsdp.jsonl import Journal
from ft_hsdp.state.agent.messages import CompleteSnapshot
from ft_hsdp.state.shared_memory import Bytes, InMemorySnapshots, SnapshotBuffer
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.http import StateServer
from ft_hsdp.state.transfer.shard_manifest import HeldShard, ShardManifest
from ft_hsdp.train.state import recovery
from ft_hsdp.train.state.checkpointing import Checkpoints
from ft_hsdp.train.state.known_shards import Recoverer
from ft_hsdp.train.state.recovery import Restoration

TOKEN = "ab" * 32
LAYOUT = shard_manifest.fingerprint(())
NBYTES = 100_000
RANKS = 2
DEADLINE_S = 30.0


def state(step: int) -> StateId:
    return StateId(1, step, f"{step:032x}")


AGAINST = state(2)  # that of the checkpoint


def content(step: int, rank: int) -> Bytes:
    """The bytes of a shard; the same in every replica."""
    return np.random.default_rng((step, rank)).integers(0, 256, NBYTES, dtype=np.uint8)


def manifest_of(step: int, rank: int) -> ShardManifest:
    made = ShardManifest(state(step), rank, RANKS, LAYOUT, NBYTES, (), (step,), ({"lr": 0.1},))
    return shard_manifest.seal(made, content(step, rank).data)


class AgentOfHost(InMemorySnapshots):
    """The state agent of one replica on one host, with its server."""

    def __init__(self, replica: int, host: str) -> None:
        super().__init__()
        self.replica, self.host = replica, host
        self.layout = LAYOUT
        self.asked = 0  # how often for what it keeps
        self.forgets = False  # it loses what it keeps after it has said what that is
        self.damaged: set[tuple[StateId, int]] = set()
        self.rooms: dict[tuple[StateId, int], SnapshotBuffer] = {}
        self._server = StateServer("127.0.0.1", 0, self, TOKEN)
        self.address = self._server.address

    def keep(self, step: int, rank: int) -> None:
        room = SnapshotBuffer(NBYTES)
        room.bytes[:] = content(step, rank)
        self.add(manifest_of(step, rank), room)

    def add(self, manifest: ShardManifest, room: SnapshotBuffer) -> None:
        self.put(manifest, room)
        self.rooms[manifest.state, manifest.rank] = room

    def flip(self, step: int, rank: int) -> None:
        self.rooms[state(step), rank].bytes[NBYTES // 2] ^= 1
        self.damaged.add((state(step), rank))

    def keeps(self, step: int, rank: int) -> bool:
        """Whether it keeps a shard, every bit of it right."""
        room = self.rooms.get((state(step), rank))
        return room is not None and bool((room.bytes == content(step, rank)).all())

    def held(self) -> list[HeldShard]:
        """What GET /v1/held answers."""
        self.asked += 1
        rows = sorted(self.rooms, key=lambda each: -each[0].step)
        return [
            HeldShard(kept, self.replica, rank, RANKS, self.layout, NBYTES, True, self.host) for kept, rank in rows
        ]

    def close(self) -> None:
        self._server.close()


class OwnAgent:
    """A rank's line to the agent of its host: the part of `SnapshotWriter` that a recovery uses."""

    def __init__(self, agent: AgentOfHost, rank: int) -> None:
        self._agent, self._rank = agent, rank
        self.address = agent.address
        self._room: SnapshotBuffer | None = None

    def list(self) -> tuple[CompleteSnapshot, ...]:
        """The snapshots of this rank, newest first."""
        steps = sorted((kept for kept, rank in self._agent.rooms if rank == self._rank), key=lambda s: -s.step)
        return tuple(CompleteSnapshot(kept, settled=True) for kept in steps)

    def acquire(self, wanted: StateId) -> tuple[ShardManifest, Bytes] | None:
        room = self._agent.rooms.get((wanted, self._rank))
        if room is None or self._agent.forgets or (wanted, self._rank) in self._agent.damaged:
            return None
        return manifest_of(wanted.step, self._rank), room.bytes

    def release_taken(self) -> None:
        """Nothing is kept back here."""

    def release(self) -> None:
        self._room = None

    def allocate(self, _: StateId) -> Bytes:
        self._room = SnapshotBuffer(NBYTES)
        return self._room.bytes

    def complete(self, manifest: ShardManifest) -> None:
        assert self._room is not None
        self._agent.add(manifest, self._room)


class Live:
    layout = SimpleNamespace(fingerprint=LAYOUT, nbytes=NBYTES)

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.state = state(0)
        self.right = True
        self.changes: tuple[object, ...] = ()
        self.read = 0  # checkpoints

    def load(self, manifest: ShardManifest, packed: Bytes) -> None:
        assert (manifest.rank, manifest.ranks) == (self._rank, RANKS)
        self.right = bool((packed == content(manifest.state.step, self._rank)).all())
        self.state = manifest.state


class Together:
    """What the threads exchange: the collectives of `ReplicaGroup`."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(RANKS, timeout=DEADLINE_S)
        self._told: list[bytes] = [b""] * RANKS

    def of(self, rank: int) -> Any:
        def gather(mine: bytes) -> list[bytes]:
            self._told[rank] = mine
            self._barrier.wait()
            told = list(self._told)
            self._barrier.wait()
            return told

        return SimpleNamespace(rank=rank, size=RANKS, gather=gather, broadcast=lambda mine=b"": gather(mine)[0])


class Lighthouse:
    """What it answers: a head, the agents, and, at each call, whether others train."""

    def __init__(self, head: int, agents: Sequence[AgentOfHost], stands: Sequence[bool] = (False,)) -> None:
        named: dict[int, list[str]] = {}
        for agent in agents:
            named.setdefault(agent.replica, []).append(agent.address)
        self._agents = {replica: tuple(addresses) for replica, addresses in named.items()}
        self._head = state(head) if head else None
        self._stands = list(stands)

    def holders(self, _: float) -> Holders:
        """The answer."""
        stands = self._stands.pop(0) if len(self._stands) > 1 else self._stands[0]
        return Holders(stands, self._head, self._agents)


class Restored:
    nbytes = NBYTES

    def __init__(self, lives: Sequence[Live], file: Path) -> None:
        self.states = [live.state for live in lives]
        self.right = all(live.right for live in lives)
        self.read = sum(live.read for live in lives)
        self._rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def events(self, name: str, **where: object) -> list[dict[str, Any]]:
        return [r for r in self._rows if r["event"] == name and where.items() <= r.items()]


def restored(
    folder: Path,
    own: Sequence[AgentOfHost],
    lighthouse: Lighthouse | None,
    *,
    current: bool = True,
    checkpoint: bool = True,
    published: StateId | None = None,
    limit_s: float = DEADLINE_S,
    number: int = 1,
) -> Restored:
    """Restore replica 0, whose rank n is on the host of ``own[n]``.

    ``checkpoint``: whether there is one, of `AGAINST`; ``published``: the name that it has in the folder.
    """
    if published is not None:
        (folder / f"step-{published.step}-epoch-{published.commit_epoch}-0-x-0").mkdir()
    file = folder / "events.jsonl"
    together, lives = Together(), [Live(rank) for rank in range(RANKS)]

    def load(live: Live, *_: object) -> Any:
        live.read += 1
        if not checkpoint:
            return None
        live.state = AGAINST
        return SimpleNamespace(state=AGAINST, path="checkpoint", seconds=0.0, skipped=(), other_data="")

    def run(rank: int) -> None:
        journal = Journal(file, rank=rank)
        holders = (lambda _: None) if lighthouse is None else lighthouse.holders
        about = Recoverer(0, number, own[rank].host, TOKEN, holders, 0.0, limit_s)
        writer: Any = OwnAgent(own[rank], rank)
        live: Any = lives[rank]
        checkpoints = Checkpoints(folder, "", 1, 1, (1, 1), None)
        Restoration(live, writer, together.of(rank), checkpoints, current, journal, about).run()
        journal.close()

    folder.mkdir(exist_ok=True)
    with mock.patch.object(recovery, "load_checkpoint", load), ThreadPoolExecutor(RANKS) as threads:
        for done in [threads.submit(run, rank) for rank in range(RANKS)]:
            done.result(DEADLINE_S)
    return Restored(lives, file)
