"""Loads from a block store after a lost host: bytes and messages beside ReStore's formulas, and real loads.

The survivors share the blocks that the lost host worked on (ReStore §IV-B, §VI-B). There are three ways:

- scattered: ranges of blocks are permuted, so that all hosts send;
- consecutive: they are not, so that only the r - 1 other holders of those blocks send;
- single: one of these sends all, as in a job that has one other copy of each part.

The plans are counted for clusters of the paper's sizes. The bytes stand beside the formula as it has to be and as
it is printed (`bottleneck_blocks` says why they differ). Then the loads are made in this process, from one state
server for each host, and what arrives is counted: it must be what was planned, bit for bit. They are made over
loopback, where the processor is the limit, and through a slow link for each server (`links`), where the busiest
sender is, as in the paper's figures.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from operator import sub

import numpy as np

from ft_hsdp.bench.results import KIB, MIB, ProgressLog, ResultRow, interleave, ratio, ratio_interval, spread
from ft_hsdp.bench.width.links import ThrottledLinks
from ft_hsdp.errors import DataCorruption
from ft_hsdp.memory.blocks import (
    BlockLayout,
    LoadPlan,
    bottleneck_blocks,
    bottleneck_senders,
    first_hosts,
    plan_load,
    share,
    shrink,
)
from ft_hsdp.state.agent.blocks import SliceStore
from ft_hsdp.state.agent.store import SnapshotStore
from ft_hsdp.state.shared_memory import InMemorySnapshots, attach
from ft_hsdp.state.transfer import blocks as slices_of
from ft_hsdp.state.transfer.blocks import SliceManifest, SliceName, SliceRead, read_slices
from ft_hsdp.state.transfer.http import StateServer

BLOCK, PIECE, RANGE, COPIES, LOST = 64, 16 * KIB, 256 * KIB, 4, 1  # bytes, bytes, bytes, hosts, host
PLANNED = (8, 16, 48)  # hosts
PER_HOST = 16 * MIB
LOADED, LOADED_PER_HOST = 8, 4 * MIB
LINK_BYTES_PER_S = 8e6  # slow enough for the processor not to count
WAYS = ("scattered", "consecutive", "single")
LOAD_S = 60.0
STORE = "0" * 32


def blocks(log: ProgressLog) -> list[ResultRow]:
    """Return a row of plans for each number of hosts."""
    rows = [planned(hosts, PER_HOST) for hosts in PLANNED]
    for row in rows:
        scattered, consecutive = row["scattered"]["times"], row["consecutive"]["times"]
        log.say(
            f"{row['hosts']} hosts: the busiest sends {scattered:.2f} times the formula if scattered, else "
            f"{consecutive:.2f} times, and {row['apart']:.1f} times as much"
        )
    return rows


def loads(rounds: int) -> list[ResultRow]:
    """Return rows of real loads: over loopback, and through a link for each server.

    Raises:
        DataCorruption: A load returned other bytes, or more or fewer than planned.
    """
    return [loaded(LOADED, LOADED_PER_HOST, rounds, link) for link in (None, LINK_BYTES_PER_S)]


def _plan(hosts: int, per_host: int, way: str) -> tuple[BlockLayout, LoadPlan]:
    permuted = way == "scattered"
    layout = BlockLayout(per_host // BLOCK * hosts, RANGE // BLOCK, hosts, 0 if permuted else None)
    align = PIECE // BLOCK
    wanted = shrink({r: [span] for r, span in enumerate(share(layout.blocks, hosts, align))}, [LOST], align)
    holders = {n: [h for h in first_hosts(n, hosts, hosts, COPIES) if h != LOST] for n in range(hosts)}
    if way == "single":
        holders = {number: each[:1] for number, each in holders.items()}
    return layout, plan_load(layout, wanted, holders)


def planned(hosts: int, per_host: int) -> ResultRow:
    """Return what the plans of one size say, beside the formulas."""
    row: ResultRow = {"hosts": hosts, "copies": COPIES, "bytes": per_host}
    for name, permuted in (("scattered", True), ("consecutive", False)):
        layout, plan = _plan(hosts, per_host, name)
        most = max(plan.sent().values())
        formula = bottleneck_blocks(layout.blocks, hosts, COPIES, permuted=permuted)
        row[name] = {
            "busiest_bytes": most * BLOCK,
            "times": ratio(most, formula),
            "times_printed": ratio(most, formula * (COPIES - 1) / COPIES),
            "senders": max(plan.senders().values()),
            **_senders(layout),
        }
    row["apart"] = ratio(row["consecutive"]["busiest_bytes"], row["scattered"]["busiest_bytes"])
    return row


def _senders(layout: BlockLayout) -> dict[str, int]:
    """Return ReStore's formula for the hosts that a rank reads from, and how many they may be at most.

    A part that begins inside a range touches one range more. No rank reads from more hosts than are left.
    """
    if layout.seed is None:
        return {"senders_formula": 1, "senders_most": 1}
    formula = bottleneck_senders(layout.blocks, layout.slices, layout.range_blocks)
    return {"senders_formula": formula, "senders_most": min(formula + 1, layout.slices - 1)}


def loaded(hosts: int, per_host: int, rounds: int, bytes_per_s: float | None = None) -> ResultRow:
    """Load what a lost host worked on, by all others at once, from a server for each host. The ways take turns.

    Args:
        hosts: The number of hosts, the lost one included.
        per_host: Bytes of the data on which each works.
        rounds: Loads of each way.
        bytes_per_s: Of the link of each server; None: over loopback.

    Returns:
        The row. "busiest_bytes" are blocks; "carried_bytes" are all that the busiest link carried in one load.
        "expected" is how many times as many bytes it carried from a single source as scattered; None: no links.

    Raises:
        DataCorruption: What came is not what was planned.
    """
    row: ResultRow = {"hosts": hosts, "copies": COPIES, "bytes": per_host, "bytes_per_s": bytes_per_s, "loads": {}}
    data = np.random.default_rng(1).integers(0, 256, (per_host // BLOCK * hosts, BLOCK), dtype=np.uint8)
    plans = {way: _plan(hosts, per_host, way) for way in WAYS}
    carried: dict[str, int] = {}
    with ExitStack() as stack:
        running = {
            way: stack.enter_context(_servers(plans[way][0], data, hosts, bytes_per_s))
            for way in ("scattered", "consecutive")
        }

        def one(way: str) -> float:
            servers = running.get(way, running["consecutive"])
            before = list(servers.links.carried) if servers.links else []
            took = _load(*plans[way], data, servers)
            if servers.links:
                carried[way] = max(map(sub, servers.links.carried, before))
            return took

        times = interleave({way: partial(one, way) for way in WAYS}, rounds)
    for way, (layout, plan) in plans.items():
        formula = bottleneck_blocks(layout.blocks, hosts, COPIES, permuted=way == "scattered")
        row["loads"][way] = spread(times[way]) | {
            "busiest_bytes": max(plan.sent().values()) * BLOCK,
            "formula_bytes": round(formula * BLOCK * (COPIES - 1 if way == "single" else 1)),
            "carried_bytes": carried.get(way),
            "senders": max(plan.senders().values()),
            **_senders(layout),
        }
    row["times"] = ratio_interval(times["single"], times["scattered"])
    row["expected"] = ratio(carried["single"], carried["scattered"]) if carried else None
    return row


def _about(layout: BlockLayout, number: int) -> SliceName:
    return SliceName(STORE, "bench", number, layout.slices, layout.slice_blocks(number) * BLOCK, PIECE)


@dataclass(frozen=True, slots=True)
class _Servers:
    addresses: Sequence[str]  # by host
    digests: Mapping[int, str]  # of manifests, by slice
    token: str
    links: ThrottledLinks | None


@contextmanager
def _servers(layout: BlockLayout, data: np.ndarray, hosts: int, bytes_per_s: float | None) -> Iterator[_Servers]:
    """Run a state server for each host, with its slices."""
    token, digests = secrets.token_hex(32), {}
    stores = [SliceStore(SnapshotStore()) for _ in range(hosts)]
    for number in range(layout.slices):
        about = _about(layout, number)
        content = np.zeros((layout.slice_blocks(number), BLOCK), dtype=np.uint8)
        for run in layout.contents(number):
            content[run.offset : run.offset + run.count] = data[run.block : run.block + run.count]
        flat = content.reshape(-1)
        encoded = slices_of.encode(SliceManifest(about, slices_of.sums_of(flat.data, PIECE)))
        digests[number] = slices_of.digest_of(encoded)
        for host in first_hosts(number, hosts, hosts, COPIES):
            made = stores[host].allocate(about, None)
            attach(made.fd, about.nbytes, writable=True)[:] = flat
            stores[host].complete(made, encoded)
    servers = [StateServer("127.0.0.1", 0, InMemorySnapshots(), token, slices=each) for each in stores]
    direct = [server.address for server in servers]
    try:
        if bytes_per_s is None:
            yield _Servers(direct, digests, token, None)
        else:
            with ThrottledLinks(direct, bytes_per_s) as links:
                yield _Servers(links.addresses, digests, token, links)
    finally:
        for server in servers:
            server.close()
        for each in stores:
            each.drop(STORE, range(layout.slices))


def _load(layout: BlockLayout, plan: LoadPlan, data: np.ndarray, servers: _Servers) -> float:
    """Carry out a plan, all readers at once, and return the seconds that it took.

    Raises:
        DataCorruption: What came is not what was planned.
    """
    readers = sorted({read.reader for read in plan.reads})

    def one(reader: int) -> int:
        mine = [read for read in plan.reads if read.reader == reader]
        out, orders, at = np.empty((sum(r.run.count for r in mine), BLOCK), dtype=np.uint8), [], 0
        for read in mine:
            span = (read.run.offset * BLOCK, read.run.count * BLOCK, at * BLOCK)
            about, address = _about(layout, read.run.slice), servers.addresses[read.holder]
            orders.append(SliceRead(about, servers.digests[read.run.slice], address, (span,)))
            at += read.run.count
        found = read_slices(orders, out.reshape(-1).data, servers.token, LOAD_S, {})
        wanted = np.concatenate([data[r.run.block : r.run.block + r.run.count] for r in mine])
        if found.failed or not np.array_equal(out, wanted):
            raise DataCorruption(f"reader {reader} got other blocks: {found.failed[:1]}")
        return found.nbytes

    with ThreadPoolExecutor(len(readers)) as pool:
        began = time.perf_counter()
        received = Counter(dict(zip(readers, pool.map(one, readers), strict=True)))
        took = time.perf_counter() - began
    came, due = sum(received.values()), sum(plan.sent().values()) * BLOCK
    if came != due:
        raise DataCorruption(f"{came} bytes came, planned were {due}")
    return took
