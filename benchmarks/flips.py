"""Bytes that flip in copies: at rest in a state agent's memory, and on the way to another host.

A replica of one rank, on host r0h0, has lost its processes and restores its state, as `train.state.recovery` does:
from its own agent, from the copy on r0h1, or from replica 1 on r1h0. Each time one byte is changed, in a place of
its own: of a shard's data or of its manifest, in the memory of an agent, or in what a proxy passes on. The damage
has to be found, and the state has to come, right, from the next rung.

Chunks are smaller here than in a job, so that a shard has several and 10,000 recoveries take minutes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
import secrets
import socket
import tempfile
import threading
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

from ft_hsdp import address
from ft_hsdp.bench.command import rounds_of
from ft_hsdp.bench.results import SEED, ProgressLog, ResultRow, Verdicts, begin_result, finish_result, most
from ft_hsdp.core.grant import Holders
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import DataCorruption
from ft_hsdp.state import shared_memory
from ft_hsdp.state.agent.messages import CompleteSnapshot
from ft_hsdp.state.agent.store import Owner, SnapshotStore
from ft_hsdp.state.shared_memory import Bytes
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.http import StateServer
from ft_hsdp.state.transfer.shard_manifest import PackedTensor, ShardManifest
from ft_hsdp.train.state.checkpointing import Checkpoints
from ft_hsdp.train.state.known_shards import Recoverer
from ft_hsdp.train.state.recovery import Restoration

STATE, INITIAL = StateId(1, 1, "ab" * 16), StateId(0, 0, "00" * 16)
CHUNK_BYTES = 16 << 10
NBYTES = 3 * CHUNK_BYTES + 1000  # of the shard
RESTORE_S = 20.0  # longest time of one recovery
AGAIN = 100  # tries until the damaged way is used: another donor may have given all chunks
SAY_EVERY = 1000
LOOPBACK = "127.0.0.1"
OWN, COPY, OTHER = "r0h0", "r0h1", "r1h0"
PLACES = {
    "own agent": "copy",
    "copy at rest": "replica",
    "copy on its way": "replica",
}  # and the rung after the damage
PARTS = ("data", "manifest")


def options(args: Namespace) -> int:
    """Return how many bytes `bench flips` flips."""
    return rounds_of(args, 10_000)


def goals(result: Mapping[str, Any]) -> Verdicts:
    """Yield the verdicts on a result of `bench flips`."""
    for row in result["flips"]:
        yield most("flipped bytes that were not found", {**row, "bytes": None}, 0, row["missed"])


def run(count: int, stream: TextIO) -> dict[str, Any]:
    """Return the result, ready for JSON; progress goes to ``stream``."""
    log = ProgressLog(stream)
    result, started = begin_result("flips", log)
    result["flips"] = flips(count, log)
    return finish_result(result, goals(result), log, started)


def flips(count: int, log: ProgressLog) -> list[ResultRow]:
    """Return a row: flip ``count`` bytes, in turn at each place and in each part of it.

    A flip counts as found if the damage was noticed, and the right state came from the next rung.
    """
    chance = random.Random(SEED)
    kinds = [f"{place}, {part}" for place in PLACES for part in PARTS]
    asked, found, rungs = dict.fromkeys(kinds, 0), dict.fromkeys(kinds, 0), Counter[str]()
    with _small_chunks(), _Hosts(chance.randbytes(NBYTES)) as hosts:
        for number in range(count):
            kind = kinds[number % len(kinds)]
            place, part = kind.split(", ")
            came = hosts.recovered(place, part, chance)
            asked[kind] += 1
            found[kind] += came.found
            rungs[came.rung] += 1
            if (number + 1) % SAY_EVERY == 0:
                log.say(f"{number + 1} bytes flipped, {sum(found.values())} found")
    return [
        {
            "bytes": NBYTES,
            "chunks": -(-NBYTES // CHUNK_BYTES),
            "flips": count,
            "asked": asked,
            "found": found,
            "rungs": dict(rungs),
            "missed": count - sum(found.values()),
        }
    ]


@contextlib.contextmanager
def _small_chunks() -> Iterator[None]:
    """Have shards of this process cut into chunks of `CHUNK_BYTES`, and do not log each damage."""
    package, before = SnapshotStore.__module__.rpartition(".")[0], shard_manifest.CHUNK_BYTES
    logger = logging.getLogger(package)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    shard_manifest.CHUNK_BYTES = CHUNK_BYTES
    try:
        yield
    finally:
        shard_manifest.CHUNK_BYTES = before
        logger.setLevel(level)


@dataclass(frozen=True, slots=True)
class _CameBack:
    """How a recovery ended."""

    rung: str
    found: bool


class _Hosts:
    """The agents of three hosts, and a rank of replica 0 on the first of them that restores its state."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._token = secrets.token_hex(32)
        tensors = (PackedTensor("weight", "param", "uint8", (NBYTES,), (NBYTES,), 0, NBYTES),)
        header = ShardManifest(STATE, 0, 1, shard_manifest.fingerprint(tensors), NBYTES, tensors, (), ())
        self._manifest = shard_manifest.encode(shard_manifest.seal(header, memoryview(content)))
        self._layout = SimpleNamespace(fingerprint=header.layout, nbytes=NBYTES, tensors=tensors)
        self._agents: dict[str, _Agent] = {}

    def __enter__(self) -> _Hosts:
        with contextlib.ExitStack() as stack:
            for replica, host in ((0, OWN), (0, COPY), (1, OTHER)):
                self._agents[host] = _Agent(replica, host, self._token, keeps_for_others=host == COPY)
                stack.callback(self._agents[host].close)
            self._way = _Way(self._agents[COPY].server.address)
            stack.callback(self._way.close)
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))  # without a checkpoint
            self._stack = stack.pop_all()
        where = {
            self._agents[OWN].server.address: OWN,
            self._way.address: COPY,
            self._agents[OTHER].server.address: OTHER,
        }
        own, way, other = where
        self._holders = Holders(stands=False, head=STATE, agents={0: (own, way), 1: (other,)}, hosts=where)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def recovered(self, place: str, part: str, chance: random.Random) -> _CameBack:
        """Flip a byte, and restore; again, if the byte was not used."""
        size, bit = NBYTES if part == "data" else len(self._manifest), 1 << chance.randrange(8)
        at = chance.randrange(size)
        own, copy, other = (self._agents[host] for host in (OWN, COPY, OTHER))
        content, manifest = bytearray(self._content), bytearray(self._manifest)
        (content if part == "data" else manifest)[at] ^= bit
        for _ in range(AGAIN):
            for each in (own, copy, other):
                each.drop()
            if place != "own agent":
                other.keep(self._content, self._manifest)
            if place == "own agent":
                own.keep(content, bytes(manifest))
                copy.keep(self._content, self._manifest)
                rows, right = self._restore()
                noticed = own.damaged
            elif place == "copy at rest":
                copy.keep(content, bytes(manifest))
                rows, right = self._restore()
                # What has no readable manifest is not even offered.
                noticed = copy.damaged or part == "manifest"
            else:
                copy.keep(self._content, self._manifest)
                self._way.arm(part, at, bit)
                rows, right = self._restore()
                if not self._way.flipped:
                    continue
                noticed = any(row["event"] == "FetchRejected" and row["donor"] == 0 for row in rows)
            rung = next((row["rung"] for row in rows if row["event"] == "StateRestored"), "nothing")
            return _CameBack(rung, noticed and right and rung == PLACES[place])
        raise DataCorruption(f"the way of the copy was not used in {AGAIN} recoveries")

    def _restore(self) -> tuple[list[dict[str, Any]], bool]:
        """Restore the state as a rank does; return its events, and whether it has the right bytes."""
        rows: list[dict[str, Any]] = []
        live: Any = _Live(self._layout)
        agent: Any = _Line(self._agents[OWN])
        ranks: Any = SimpleNamespace(rank=0, size=1, gather=lambda mine: [mine], broadcast=lambda mine=b"": mine)
        journal: Any = SimpleNamespace(event=lambda name, _, **facts: rows.append({"event": name, **facts}))
        checkpoints = Checkpoints(self._folder, "", 2, 1, (1, 1), None)
        about = Recoverer(0, 1, OWN, self._token, lambda _: self._holders, 0.0, RESTORE_S)
        Restoration(live, agent, ranks, checkpoints, True, journal, about).run()
        return rows, live.state == STATE and live.content == self._content


class _Agent:
    """The state agent of one host: its store and its server."""

    def __init__(self, replica: int, host: str, token: str, *, keeps_for_others: bool) -> None:
        self.store = SnapshotStore(replica, host)
        owner = Owner(0, 1, NBYTES)
        if keeps_for_others:
            self.key = self.store.admit_copy(replica, owner, 1, None)
        else:
            self.key = self.store.admit(owner)
        self._copy = keeps_for_others
        self.store.prepare(self.key)
        self.server = StateServer(LOOPBACK, 0, self.store, token)

    def close(self) -> None:
        self.server.close()
        self.store.close()

    def keep(self, content: bytes | bytearray, manifest: bytes) -> None:
        """Keep a shard as complete, whatever its bytes are."""
        number = self.store.allocate(self.key, STATE, copy=self._copy)
        assert number is not None
        os.pwrite(self.store.slots(self.key)[number], content, 0)
        self.store.staged(self.key, STATE, manifest)

    def drop(self) -> None:
        """Keep nothing any more, and forget what was found damaged."""
        self.store.forget(self.key)
        self.store.damaged(self.key)

    @property
    def damaged(self) -> bool:
        """Whether damage was found since the last `drop`; then the shard is dropped."""
        return len(self.store.damaged(self.key)) == 1 and not self.store.list(self.key)


class _Line:
    """A rank's line to the agent of its host: the part of `snapshots.SnapshotWriter` that a recovery uses."""

    def __init__(self, agent: _Agent) -> None:
        self._agent = agent
        self.address = agent.server.address

    def list(self) -> tuple[CompleteSnapshot, ...]:
        return self._agent.store.list(self._agent.key)

    def acquire(self, state: StateId) -> tuple[ShardManifest, Bytes] | None:
        found = self._agent.store.acquire(self._agent.key, state)
        if found is None:
            return None
        return shard_manifest.decode(found[1]), shared_memory.attach(found[0], NBYTES, writable=False)

    def allocate(self, _: StateId) -> None:
        """Have the recovery fetch into memory of its own."""

    def release(self) -> None:
        """Do nothing: nothing was allocated."""

    def release_taken(self) -> None:
        self._agent.store.unpin(self._agent.key)


class _Live:
    """The live state of the rank."""

    def __init__(self, layout: SimpleNamespace) -> None:
        self.layout = layout
        self.state = INITIAL
        self.content = b""

    def load(self, manifest: ShardManifest, packed: Bytes) -> None:
        self.state, self.content = manifest.state, packed.tobytes()


class _Way:
    """A proxy before a state server, which flips one bit of an answer when it is told to."""

    def __init__(self, to: str) -> None:
        self._to = to
        self._part, self._at, self._bit = "", 0, 0
        self._lock = threading.Lock()
        self.flipped = False
        self._listener = address.bound(LOOPBACK, 0)
        self._listener.listen()
        self.address = address.join(LOOPBACK, self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="way", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def arm(self, part: str, at: int, bit: int) -> None:
        """Flip a bit of the next body of this part, "manifest" or "data"; ``at`` wraps if the body is shorter."""
        with self._lock:
            self._part, self._at, self._bit, self.flipped = part, at, bit, False

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._pass, args=(client,), name="way", daemon=True).start()

    def _pass(self, client: socket.socket) -> None:
        """Pass a connection on, both ways, until either end closes it."""
        host, port = address.split(self._to)
        asked: list[bytes] = []  # the path of the newest request
        with client, contextlib.suppress(OSError), socket.create_connection((host, port), RESTORE_S) as server:
            address.tune(client)
            address.tune(server)
            back = threading.Thread(target=self._answers, args=(server, client, asked), name="way", daemon=True)
            back.start()
            while piece := client.recv(1 << 16):
                if match := re.search(rb"GET (\S+) HTTP", piece):
                    asked[:] = [match[1]]
                server.sendall(piece)
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            back.join(RESTORE_S)

    def _answers(self, server: socket.socket, client: socket.socket, asked: list[bytes]) -> None:
        """Pass what the server sends, and flip the bit. What it sends before a request is the handshake."""
        data, left, place = bytearray(), 0, -1  # bytes of the body that are still to come; where to flip in them
        with contextlib.suppress(OSError):
            while piece := server.recv(1 << 16):
                if not asked:
                    client.sendall(piece)
                    continue
                data += piece
                while data:
                    if not left:
                        head, mark, _ = data.partition(b"\r\n\r\n")
                        if not mark:
                            break
                        match = re.search(rb"(?i)content-length: (\d+)", head)
                        left = int(match[1]) if match else 0
                        place = self._place(asked[0], left)
                        passed = len(head) + len(mark)
                    else:
                        passed = min(left, len(data))
                        if 0 <= place < passed:
                            data[place] ^= self._bit
                            self.flipped = True
                        place, left = place - passed, left - passed
                    client.sendall(data[:passed])
                    del data[:passed]

    def _place(self, path: bytes, length: int) -> int:
        """Return where to flip in a body, or -1; one body is enough."""
        with self._lock:
            if not length or not self._part or not path.endswith(b"/" + self._part.encode()):
                return -1
            self._part = ""
            return self._at % length
