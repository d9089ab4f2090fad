"""Agents of several hosts in one process, and the ranks of a replica, on threads, that restore from them.

A shard is (step, width, rank): of a state of `tests.support.state.widths`, whose counters tell the step.
"""

import functools
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from ft_hsdp.core.grant import Holders
from ft_hsdp.core.state_id import StateId
from ft_hsdp.jsonl import Journal
from ft_hsdp.state.agent.messages import CompleteSnapshot
from ft_hsdp.state.shared_memory import Bytes, InMemorySnapshots, SnapshotBuffer
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.http import StateServer
from ft_hsdp.state.transfer.shard_manifest import HeldShard, Layout, ShardManifest
from ft_hsdp.train.state import recovery
from ft_hsdp.train.state.checkpointing import Checkpoints
from ft_hsdp.train.state.known_shards import Recoverer
from ft_hsdp.train.state.recovery import Restoration
from tests.support.state import widths
from tests.support.state.agent_helpers import state
from tests.support.state.thread_group import ThreadGroup
from tests.support.state.widths import TOKEN, layout

RANKS = 2
NBYTES = tuple(layout(RANKS, rank).nbytes for rank in range(RANKS))
DEADLINE_S = 30.0
Key = tuple[int, int, int]
AGAINST = state(2)  # that of the checkpoint


@functools.cache
def shard(step: int, width: int, rank: int) -> tuple[ShardManifest, Bytes]:
    """Its manifest and bytes; the same in every replica."""
    data = widths.content(width, rank)
    place = layout(width, rank).tensors[-1]
    data[place.offset : place.offset + place.nbytes] = step
    made = replace(widths.manifest(width, rank), state=state(step), cursors=(step,))
    return shard_manifest.seal(made, data.data), data


class AgentOfHost(InMemorySnapshots):
    """The state agent of one replica on one host, with its server."""

    def __init__(self, replica: int, host: str, *kept: Key) -> None:
        super().__init__()
        self.replica, self.host = replica, host
        self.asked = 0  # how often for what it keeps
        self.forgets = False  # it loses what it keeps after it has said what that is
        self.flipped: set[Key] = set()
        self.rooms: dict[Key, SnapshotBuffer] = {}
        for key in kept:
            self.keep(*key)
        self._server = StateServer("127.0.0.1", 0, self, TOKEN)
        self.address = self._server.address

    def keep(self, step: int, width: int, rank: int) -> None:
        manifest, data = shard(step, width, rank)
        room = SnapshotBuffer(len(data))
        room.bytes[:] = data
        self.add(manifest, room)

    def add(self, manifest: ShardManifest, room: SnapshotBuffer) -> None:
        self.put(manifest, room)
        self.rooms[manifest.state.step, manifest.ranks, manifest.rank] = room

    def flip(self, step: int, width: int, rank: int) -> None:
        self.rooms[step, width, rank].bytes[0] ^= 1
        self.flipped.add((step, width, rank))

    def keeps(self, *key: int) -> bool:
        """Whether it keeps a shard, every bit of it right."""
        step, width, rank = key
        room = self.rooms.get((step, width, rank))
        return room is not None and bool((room.bytes == shard(step, width, rank)[1]).all())

    def held(self) -> list[HeldShard]:
        """What GET /v1/held answers."""
        self.asked += 1
        return [
            HeldShard(
                state(k[0]),
                self.replica,
                k[2],
                k[1],
                layout(*k[1:]).fingerprint,
                room.bytes.nbytes,
                True,
                self.host,
            )
            for k, room in sorted(self.rooms.items(), reverse=True)
        ]

    def close(self) -> None:
        self._server.close()


class OwnAgent:
    """A rank's line to the agent of its host: the part of `SnapshotWriter` that a recovery uses."""

    def __init__(self, agent: AgentOfHost, width: int, rank: int) -> None:
        self._agent, self._of = agent, (width, rank)
        self.address = agent.address
        self._room = SnapshotBuffer(0)

    def list(self) -> tuple[CompleteSnapshot, ...]:
        """The snapshots of this rank, newest first."""
        steps = sorted((step for step, *of in self._agent.rooms if tuple(of) == self._of), reverse=True)
        return tuple(CompleteSnapshot(state(step), settled=True) for step in steps)

    def acquire(self, wanted: StateId) -> tuple[ShardManifest, Bytes] | None:
        key = (wanted.step, *self._of)
        room = self._agent.rooms.get(key)
        if room is None or self._agent.forgets or key in self._agent.flipped:
            return None
        return shard(*key)[0], room.bytes

    def release_taken(self) -> None:
        """Nothing is kept back here."""

    def release(self) -> None: ...

    def allocate(self, _: StateId) -> Bytes:
        self._room = SnapshotBuffer(layout(*self._of).nbytes)
        self._room.bytes[:] = 255
        return self._room.bytes

    def complete(self, manifest: ShardManifest) -> None:
        self._agent.add(manifest, self._room)


class Live:
    def __init__(self, width: int, rank: int, place: Layout) -> None:
        self._of = width, rank
        self.layout = place
        self.state = state(0)
        self.right = True
        self.changes: tuple[object, ...] = ()
        self.read = 0  # checkpoints

    def load(self, manifest: ShardManifest, packed: Bytes) -> None:
        made, data = shard(manifest.state.step, *self._of)
        assert manifest == made, "as if it had always been of this width"
        self.right = bool((packed == data).all())
        self.state = manifest.state


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
    layouts: Callable[[int, int], Layout] = layout,
) -> Restored:
    """Restore replica 0, whose rank n is on the host of ``own[n]``.

    ``checkpoint``: whether there is one, of `AGAINST`; ``published``: the name that it has in the folder.
    """
    if published is not None:
        (folder / f"step-{published.step}-epoch-{published.commit_epoch}-0-x-0").mkdir()
    file = folder / "events.jsonl"
    ranks = len(own)
    groups, lives = ThreadGroup.of(ranks), [Live(ranks, rank, layouts(ranks, rank)) for rank in range(ranks)]

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
        writer: Any = OwnAgent(own[rank], ranks, rank)
        live: Any = lives[rank]
        checkpoints = Checkpoints(folder, "", 1, 1, (1, 1), None)
        Restoration(live, writer, groups[rank], checkpoints, current, journal, about).run()
        journal.close()

    folder.mkdir(exist_ok=True)
    with mock.patch.object(recovery, "load_checkpoint", load), ThreadPoolExecutor(ranks) as threads:
        for done in [threads.submit(run, rank) for rank in range(ranks)]:
            done.result(DEADLINE_S)
    return Restored(lives, file)
