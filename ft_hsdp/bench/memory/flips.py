"""Bytes that flip in a copy: at rest in a state agent's memory, and on the way to another host.

Each time one byte of a copy is changed, in a place of its own. At rest, the agent has to find it when the copy
is read, and drop the copy. On the way, the reader has to find it. Then the next source is asked, as in a recovery,
and has to deliver the right bytes.
"""

from __future__ import annotations

import logging
import os
import random
import secrets
import threading

from ft_hsdp.bench.results import SEED, ProgressLog, ResultRow
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import DataCorruption
from ft_hsdp.state.agent.store import Owner, SnapshotStore
from ft_hsdp.state.shared_memory import InMemorySnapshots, SnapshotBuffer
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.fetch import Donor, FetchRequest, NotFetched, fetch
from ft_hsdp.state.transfer.http import StateServer
from ft_hsdp.state.transfer.shard_manifest import ExpectedShard, PackedTensor, ShardManifest

STATE = StateId(1, 1, "ab" * 16)
NBYTES = 16 << 10  # of the shard
FETCH_S = 10.0  # longest time of one fetch
SAY_EVERY = 1000
HOST = "127.0.0.1"


def flips(count: int, log: ProgressLog) -> list[ResultRow]:
    """Return a row: flip ``count`` bytes, every other one at rest.

    Raises:
        DataCorruption: The source after the damaged one delivered wrong bytes.
        NotFetched: It delivered nothing.
    """
    chance = random.Random(SEED)
    content = chance.randbytes(NBYTES)
    found = {"at rest": 0, "on the way": 0}
    with _Sources(content) as sources:
        for number in range(count):
            kind = "on the way" if number % 2 else "at rest"
            place, bit = chance.randrange(NBYTES), 1 << chance.randrange(8)
            found[kind] += sources.at_rest(place, bit) if kind == "at rest" else sources.on_the_way(place, bit)
            if (number + 1) % SAY_EVERY == 0:
                log.say(f"{number + 1} bytes flipped, {sum(found.values())} found")
    asked = {"at rest": count - count // 2, "on the way": count // 2}
    return [
        {"bytes": NBYTES, "flips": count, "asked": asked, "found": found, "missed": count - sum(found.values())}
    ]


class _Sources:
    """An agent whose copy is damaged, a donor that damages what it sends, and a donor that is well."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._token = secrets.token_hex(32)
        tensors = (PackedTensor("weight", "param", "uint8", (NBYTES,), (NBYTES,), 0, NBYTES),)
        header = ShardManifest(STATE, 0, 1, shard_manifest.fingerprint(tensors), NBYTES, tensors, (), ())
        right = SnapshotBuffer(NBYTES)
        right.memory[:] = content
        self._manifest = shard_manifest.seal(header, right.memory)
        self._damaged = SnapshotBuffer(NBYTES)
        self._damaged.memory[:] = content
        self._into = SnapshotBuffer(NBYTES)
        self._servers = [self._serve(right), self._serve(self._damaged)]

    def _serve(self, buffer: SnapshotBuffer) -> StateServer:
        source = InMemorySnapshots()
        source.put(self._manifest, buffer)
        return StateServer(HOST, 0, source, self._token)

    def __enter__(self) -> _Sources:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()

    def at_rest(self, place: int, bit: int) -> bool:
        """Flip a byte of a copy in an agent's memory; return whether the agent drops it when it is read."""
        store = SnapshotStore()
        logging.getLogger(SnapshotStore.__module__).setLevel(logging.CRITICAL)  # each flip is an error there
        try:
            key = store.admit(Owner(0, 1, NBYTES))
            store.prepare(key)
            number = store.stage(key, STATE)
            assert number is not None
            fd = store.slots(key)[number]
            os.pwrite(fd, self._content, 0)
            store.staged(key, STATE, shard_manifest.encode(self._manifest))
            os.pwrite(fd, bytes([self._content[place] ^ bit]), place)
            served = store.borrow(STATE, 0)
            if served is not None:
                store.give_back(served)
                return False
            found = len(store.damaged(key)) == 1 and not store.list(key)
            store.forget(key)
        finally:
            store.close()
        self._next_source()
        return found

    def on_the_way(self, place: int, bit: int) -> bool:
        """Have a donor send a byte that is not that of its manifest; return whether the reader drops the donor."""
        self._damaged.bytes[place] ^= bit
        try:
            self._fetch(self._servers[1])
        except NotFetched as error:
            self._next_source()
            return "checksum" in str(error)
        finally:
            self._damaged.bytes[place] ^= bit
        return False

    def _next_source(self) -> None:
        self._fetch(self._servers[0])
        if bytes(self._into.memory[:NBYTES]) != self._content:
            raise DataCorruption("the source after the damaged one delivered wrong bytes")

    def _fetch(self, server: StateServer) -> None:
        self._into.bytes[:] = 0
        layout = self._manifest.layout
        expected = ExpectedShard(STATE, 0, 1, layout, NBYTES)
        request = FetchRequest.exactly(expected, self._into.memory[:NBYTES], awaited=False)
        donor = Donor(0, server.address)
        fetch([donor], request, self._token, FETCH_S, threading.Event(), lambda *_: None)
