"""`bench tls`: a ring and a fetch between processes that encrypt, beside plain ones, and the cipher alone."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, TextIO

from ft_hsdp import record_layer
from ft_hsdp.bench import table
from ft_hsdp.bench.bandwidth import bandwidth
from ft_hsdp.bench.document import begin, finish
from ft_hsdp.bench.fetch.bench import LARGE_TENSORS, Way, measure
from ft_hsdp.bench.fetch.ours import FetchDonor, FetchReceiver
from ft_hsdp.bench.fetch.seat import Seat
from ft_hsdp.bench.goals import Verdict, least
from ft_hsdp.bench.options import GIB, MIB
from ft_hsdp.bench.plan import Log, Plan, Row
from ft_hsdp.bench.roster import Contender
from ft_hsdp.bench.rounds import interleave
from ft_hsdp.bench.spread import ratio, spread

MESSAGE, STATE = 64 * MIB, GIB
MEMBERS = 2
RING, FETCH = 0.35, 0.5  # goals: of the plain one's speed
CIPHER = 16 * MIB  # enciphered and deciphered in one sample
_FTAR = "ft_hsdp.bench.contenders.ftar:FTAR"
_OURS, _HERE = "ft_hsdp.bench.fetch.ours", "ft_hsdp.bench.encrypted"
RINGS = {
    name: Contender(_FTAR, text, {"transport": "tcp", "registered": False, "tls": mode}, copies=2)
    for name, text, mode in (("plain", "FTAR over TCP", "off"), ("encrypted", "the same, encrypted", "on"))
}
WAYS = {
    "plain": Way(
        "ft_hsdp's fetch", "ft_hsdp.bench.fetch.ours:FetchDonor", "ft_hsdp.bench.fetch.ours:FetchReceiver"
    ),
    "encrypted": Way("the same, encrypted", f"{_HERE}:SealedDonor", f"{_HERE}:SealedReceiver"),
}


class SealedDonor(FetchDonor):
    """The state server of a process that encrypts."""

    def __init__(self, seat: Seat) -> None:
        record_layer.use("on")
        super().__init__(seat)


class SealedReceiver(FetchReceiver):
    """A fetch by a process that encrypts."""

    def __init__(self, seat: Seat, where: str) -> None:
        record_layer.use("on")
        super().__init__(seat, where)


def run(rounds: int, state: int, stream: TextIO) -> dict[str, Any]:
    """The result, ready for JSON; ``state``: bytes of the fetched one. Raises Retryable where a process fails."""
    log = Log(stream)
    result, started = begin("tls", log)
    result["contenders"] = {name: ring.text for name, ring in RINGS.items()}
    result["cipher"] = _cipher(rounds, log)
    result["ring"] = bandwidth(RINGS, Plan((MEMBERS,), (MESSAGE,), rounds), log)
    seat = Seat(LARGE_TENSORS, state // LARGE_TENSORS)
    result["fetch"] = [measure(seat, WAYS, rounds, log)]
    return finish(result, verdicts(result), log, started)


def _cipher(rounds: int, log: Log) -> Row:
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


def verdicts(result: Mapping[str, Any]) -> list[Verdict]:
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
    console = table.begin(result, stream)
    speeds = result["cipher"]["gb_per_s"]
    console.print(f"  AES-128-GCM on one thread: {speeds['seal']:.2f} GB/s to seal, {speeds['open']:.2f} to open")
    for name, text in (("ring", "all-reduce of 64 MiB, 2 members"), ("fetch", "fetch of a state")):
        grid = table.columns(text, "contender", "p50, ms", "min", "max")
        for row in result[name]:
            for who, each in row["contenders"].items():
                grid.add_row(who, *(f"{each[key]:.4g}" for key in ("p50_ms", "min_ms", "max_ms")))
        console.print(grid)
    table.end(result, verdicts(result), console)
