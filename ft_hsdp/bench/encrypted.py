"""`bench tls`: a ring and a fetch between processes that encrypt, beside plain ones, and the cipher alone."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, TextIO

from ft_hsdp import record_layer
from ft_hsdp.bench import tables
from ft_hsdp.bench.allreduce import bandwidth
from ft_hsdp.bench.contenders.fetch import FetchDonor, FetchReceiver, FetchSeat
from ft_hsdp.bench.contenders.roster import Contender
from ft_hsdp.bench.goals import GoalVerdict, begin_result, finish_result, least
from ft_hsdp.bench.options import GIB, MIB, BenchPlan, ProgressLog, ResultRow
from ft_hsdp.bench.results import interleave, ratio, spread
from ft_hsdp.bench.state_fetch import LARGE_TENSORS, Way, measure

MESSAGE, STATE = 64 * MIB, GIB
MEMBERS = 2
RING, FETCH = 0.35, 0.5  # goals: of the plain one's speed
CIPHER = 16 * MIB  # enciphered and deciphered in one sample
_FTAR = "ft_hsdp.bench.contenders.allreduce:FTAR"
_OURS, _HERE = "ft_hsdp.bench.contenders.fetch", "ft_hsdp.bench.encrypted"
RINGS = {
    name: Contender(_FTAR, text, {"transport": "tcp", "registered": False, "tls": mode}, copies=2)
    for name, text, mode in (("plain", "FTAR over TCP", "off"), ("encrypted", "the same, encrypted", "on"))
}
WAYS = {
    "plain": Way(
        "ft_hsdp's fetch",
        "ft_hsdp.bench.contenders.fetch:FetchDonor",
        "ft_hsdp.bench.contenders.fetch:FetchReceiver",
    ),
    "encrypted": Way("the same, encrypted", f"{_HERE}:SealedDonor", f"{_HERE}:SealedReceiver"),
}


class SealedDonor(FetchDonor):
    """The state server of a process that encrypts."""

    def __init__(self, seat: FetchSeat) -> None:
        record_layer.use("on")
        super().__init__(seat)


class SealedReceiver(FetchReceiver):
    """A fetch by a process that encrypts."""

    def __init__(self, seat: FetchSeat, where: str) -> None:
        record_layer.use("on")
        super().__init__(seat, where)


def run(rounds: int, state: int, stream: TextIO) -> dict[str, Any]:
    """The result, ready for JSON; ``state``: bytes of the fetched one. Raises Retryable where a process fails."""
    log = ProgressLog(stream)
    result, started = begin_result("tls", log)
    result["contenders"] = {name: ring.text for name, ring in RINGS.items()}
    result["cipher"] = _cipher(rounds, log)
    result["ring"] = bandwidth(RINGS, BenchPlan((MEMBERS,), (MESSAGE,), rounds), log)
    seat = FetchSeat(LARGE_TENSORS, state // LARGE_TENSORS)
    result["fetch"] = [measure(seat, WAYS, rounds, log)]
    return finish_result(result, verdicts(result), log, started)


def _cipher(rounds: int, log: ProgressLog) -> ResultRow:
    """Both directions of one connection's cipher, in records as they are sent, on one thread."""
    key = os.urandom(record_layer.KEY)
    out, into = record_layer.Direction(key), record_layer.Direction(key)
    data = memoryview(bytearray(os.urandom(record_layer.RECORD)))
    record = memoryview(bytearray(record_layer.HEAD + record_layer.RECORD + record_layer.TAG))
    back = memoryview(bytearray(record_layer.RECORD))

    def sample(both: bool) -> float:
        seconds = 0.0
        for _ in range(CIPHER // record_layer.RECORD):
            since = time.perf_counter()
            out.seal_into(data, record)
            middle = time.perf_counter()
            into.open_into(bytes(record[: record_layer.HEAD]), record[record_layer.HEAD :], back)
            seconds += (time.perf_counter() - middle) if both else (middle - since)
        return seconds

    found = interleave({"seal": partial(sample, False), "open": partial(sample, True)}, rounds)
    speeds = {name: round(CIPHER / sorted(values)[len(values) // 2] / 1e9, 3) for name, values in found.items()}
    log.say(f"AES-128-GCM, records of {record_layer.RECORD // 1024} KiB: {speeds} GB/s")
    return {"bytes": CIPHER, "gb_per_s": speeds, "samples": {n: spread(values) for n, values in found.items()}}


def verdicts(result: Mapping[str, Any]) -> list[GoalVerdict]:
    """The goals beside what was seen."""
    found = []
    for name, text, limit in (
        ("ring", "an encrypted ring over TCP", RING),
        ("fetch", "an encrypted fetch", FETCH),
    ):
        for row in result[name]:
            times = {who: each["p50_ms"] for who, each in row["contenders"].items()}
            seen = ratio(times["plain"], times["encrypted"])
            found.append(least(f"{text}, times the speed of plain", row, limit, seen))
    return found


def show(result: Mapping[str, Any], stream: TextIO) -> None:
    """Print a result of `run`."""
    console = tables.begin_tables(result, stream)
    speeds = result["cipher"]["gb_per_s"]
    console.print(f"  AES-128-GCM on one thread: {speeds['seal']:.2f} GB/s to seal, {speeds['open']:.2f} to open")
    for name, text in (("ring", "all-reduce of 64 MiB, 2 members"), ("fetch", "fetch of a state")):
        grid = tables.columns(text, "contender", "p50, ms", "min", "max")
        for row in result[name]:
            for who, each in row["contenders"].items():
                grid.add_row(who, *(f"{each[key]:.4g}" for key in ("p50_ms", "min_ms", "max_ms")))
        console.print(grid)
    tables.end_tables(result, verdicts(result), console)
