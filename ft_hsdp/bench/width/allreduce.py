"""Two replicas all-reduce a gradient: 4 ranks with 3, in lanes, beside 4 with 4, in one ring for each rank.

Each rank is a process, with the parts of the trainer that carry a gradient: `Group`, `GradientLanes` and memory as
the `Reducer` uses it. Both pairs of replicas live at the same time and take turns. At the end the ranks sum other
numbers once, and the digests of what all owners of a lane, or all ranks with one number, hold are compared.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import psutil

from ft_hsdp import protocol
from ft_hsdp.bench.results import GIB, ProgressLog, ResultRow, interleave, size_name, spread
from ft_hsdp.bench.scope import scratch
from ft_hsdp.bench.workers.link import Answer, Obey, WorkerLink, ask, greet, run_worker, spawn_worker
from ft_hsdp.core.commit import Contribution
from ft_hsdp.core.grant import Grant, Member
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import ConfigError, DataCorruption

PAIRS = ((4, 4), (4, 3))  # widths of two replicas: the first is the measure of the others
BUCKETS, PARAMS, COLUMNS = 8, 2, 1024
BASE = StateId(0, 0, "0" * 32)
TOKEN = "ab" * 32
HOST = "127.0.0.1"
TIMEOUT_S = 120.0
PROCESS = 300 << 20  # bytes of a rank beside its gradient
WORKER = "ft_hsdp.bench.width.allreduce"


def allreduce(nbytes: int, rounds: int, log: ProgressLog) -> ResultRow:
    """Return a row: how long an all-reduce of about ``nbytes`` a replica takes, by the widths of two replicas.

    Raises:
        ConfigError: The machine has no room for it.
        DataCorruption: The members of a lane have different sums.
        Retryable: A process fails.
    """
    needed = 4 * len(PAIRS) * 2 * nbytes + sum(map(sum, PAIRS)) * PROCESS
    if needed > (room := psutil.virtual_memory().available):
        raise ConfigError("--sizes", size_name(nbytes), f"what fits into {room / GIB:.1f} GiB with all its ranks")
    log.say(f"all-reduce of {size_name(nbytes)}: {', '.join(map(name_of, PAIRS))} ranks")
    turns = {}
    with scratch() as (stack, folder):
        of_pairs: dict[str, list[WorkerLink]] = {}
        for widths in PAIRS:
            pair = name_of(widths)
            made = [
                (
                    replica,
                    spawn_worker(
                        stack,
                        f"{pair}: {replica}.{rank}",
                        WORKER,
                        [str(nbytes), str(replica), str(width), str(rank)],
                        folder / f"{pair}-{replica}-{rank}.log",
                    ),
                )
                for replica, width in enumerate(widths)
                for rank in range(width)
            ]
            ranks = of_pairs[pair] = [each for _, each in made]
            greet(ranks)
            members = [[each.address for of, each in made if of == replica] for replica in range(len(widths))]
            ask(ranks, {"do": "join", "members": members})

            def once(ranks: list[WorkerLink] = ranks) -> float:
                began = time.perf_counter()
                ask(ranks, {"do": "run"})
                return time.perf_counter() - began

            turns[pair] = once
        seconds = interleave(turns, rounds)
        lanes = {pair: _agreed(ask(ranks, {"do": "check"}), pair) for pair, ranks in of_pairs.items()}
    found = {name: spread(values) for name, values in seconds.items()}
    usual, unequal = map(name_of, PAIRS)
    row: ResultRow = {
        "bytes": nbytes,
        "rounds": rounds,
        "contenders": found,
        "lanes": lanes[unequal],
        "times": round(found[unequal]["p50_ms"] / found[usual]["p50_ms"], 3),
    }
    log.say(f"  {unequal}: {row['times']:.2f} times as long as {usual}, in {row['lanes']} lanes")
    return row


def name_of(widths: Sequence[int]) -> str:
    """Return the name of a pair of replicas, such as "4+3"."""
    return "+".join(map(str, widths))


def _agreed(answers: Sequence[Answer], pair: str) -> int:
    """Return the number of lanes whose members hold the same sums.

    Raises:
        DataCorruption: They do not.
    """
    found: dict[int, set[str]] = {}
    for answer in answers:
        for lane, digest in answer["sums"].items():
            found.setdefault(int(lane), set()).add(digest)
    if wrong := sorted(lane for lane, digests in found.items() if len(digests) > 1):
        raise DataCorruption(f"{pair}: members of lanes {wrong} hold different sums")
    return len(found)


def shapes(nbytes: int) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Return the parameters of each bucket of a gradient of about ``nbytes``."""
    rows = max(4, nbytes // (4 * BUCKETS * PARAMS * COLUMNS))
    return [[(f"{param}", (rows, COLUMNS)) for param in range(PARAMS)] for _ in range(BUCKETS)]


# In the processes of the ranks.


class Rank:
    """A rank of a replica that all-reduces, without a model."""

    def __init__(self, nbytes: int, replica: int, width: int, rank: int) -> None:
        """Listen for neighbours; the control loop gets a thread of its own."""
        import torch

        from ft_hsdp.ftar.connections import LaneRing, MemberIdentity
        from ft_hsdp.ftar.group import Group, GroupEvents
        from ft_hsdp.ftar.settings import Settings
        from ft_hsdp.train.lanes import GradientLanes

        torch.set_num_threads(1)
        self._replica = replica
        usual = LaneRing(rank, f"{width} ranks")
        self._lanes = GradientLanes(shapes(nbytes), (), usual, width, rank)
        self._formed: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="control", daemon=True).start()
        events = GroupEvents(lambda _: self._formed.set_result(None), self._broke, lambda _: None, lambda _: None)
        identity = MemberIdentity(replica, usual.number, usual.layout, TOKEN)
        settings = Settings(timeout_s=TIMEOUT_S, connect_timeout_s=TIMEOUT_S)
        self._group = Group(identity, settings, events, lanes=self._lanes.of)
        self.address: str = self._on_loop(lambda: self._group.listen(HOST))
        numels = [sum(-(-shape[0] // width) * COLUMNS for _, shape in bucket) for bucket in shapes(nbytes)]
        made = torch.Generator().manual_seed(replica * 100 + rank)
        self._gradient = [torch.randn(n, generator=made) for n in numels]
        self._sums = [self._group.arena.empty(n).zero_() for n in numels]
        self._parts: dict[tuple[int, int, int], torch.Tensor] = {}
        self._step = 0
        self._grant: Grant

    def _broke(self, abort: protocol.RingAbort) -> None:
        if not self._formed.done():
            self._formed.set_exception(RuntimeError(abort.cause))

    def _on_loop(self, call: Any) -> Any:
        async def called() -> Any:
            return call()

        return asyncio.run_coroutine_threadsafe(called(), self._loop).result(TIMEOUT_S)

    def obey(self, command: Mapping[str, Any]) -> Answer:
        """Join a ring, all-reduce, or all-reduce and tell the digests of the sums."""
        if command["do"] == "join":
            members = tuple(
                Member(replica, "x", "contribute", tuple(ring), ("",) * len(ring))
                for replica, ring in enumerate(command["members"])
            )
            self._grant = protocol.sign(TOKEN, Grant(1, 1, BASE, members, len(members), "bench"))
            self._on_loop(lambda: self._group.configure(self._grant))
            self._formed.result(TIMEOUT_S)
            return {}
        sums = self._reduce()
        return {"sums": sums()} if command["do"] == "check" else {}

    def _memory(self, bucket: int, place: int, group: int, numel: int) -> Any:
        key = bucket, place, group
        if key not in self._parts:
            self._parts[key] = self._group.arena.empty(numel)
        return self._parts[key]

    def _reduce(self) -> Any:
        """All-reduce the gradient once; return a function that returns the digest of the sums by lane."""
        from ft_hsdp.ftar.frame import Entry, Key
        from ft_hsdp.ftar.pieces import pieced
        from ft_hsdp.train.gradients import checksum

        self._step += 1
        plan = self._lanes.plan(self._grant.widths)
        mine = Entry(self._replica, (Contribution(self._replica, 1, 0, self._replica),))
        works: list[tuple[int, int, Any]] = []
        for bucket, (flat, out) in enumerate(zip(self._gradient, self._sums, strict=True)):
            key = Key(1, self._step, 0, bucket, "00" * 16)
            if plan is None:
                works.append((bucket, 0, self._group.all_reduce(key, flat, out, mine)))
                continue
            for place, lane, part in plan.of(bucket):
                target = part.target(out, partial(self._memory, bucket, place))
                given = part.gather(flat, target)
                works.append(
                    (bucket, place, self._group.all_reduce(key, given, target, mine, lane=lane.ring.number))
                )
        results = [(bucket, place, work.result(TIMEOUT_S)) for bucket, place, work in works]
        if plan is not None:
            plan.scatter(results, self._sums)

        def sums() -> dict[str, str]:
            found: dict[str, list[str]] = {str(ring.number): [] for ring in self._lanes.of(self._grant)}
            for lane, digests in enumerate(found.values()):
                outs = [pieced(result.out) for _, place, result in results if place == lane]
                digests += [checksum(piece) for out in outs for piece in out.pieces]
            return {lane: json.dumps(digests) for lane, digests in found.items()}

        return sums


def set_up() -> tuple[Answer, Obey]:
    """Become the rank that the command line names."""
    nbytes, replica, width, number = map(int, sys.argv[2:])
    rank = Rank(nbytes, replica, width, number)
    return {"address": rank.address}, rank.obey


if __name__ == "__main__":
    run_worker(set_up)
