"""`bench tls`: a ring and a fetch between processes that encrypt, beside plain ones, and the cipher alone."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any, TextIO

from ft_hsdp import record_layer
from ft_hsdp.bench.allreduce import BenchPlan, bandwidth
from ft_hsdp.bench.command import TlsOptions
from ft_hsdp.bench.contenders.base import Contender
from ft_hsdp.bench.contenders.fetch import FetchSpec
from ft_hsdp.bench.goals import begin_result, finish_result
from ft_hsdp.bench.results import MIB, ProgressLog, ResultRow, interleave, spread
from ft_hsdp.bench.state_fetch import LARGE_TENSORS, contender, measure

MESSAGE = 64 * MIB
MEMBERS = 2
CIPHER = 16 * MIB  # enciphered and deciphered in one sample
_FTAR = "ft_hsdp.bench.contenders.allreduce:FTAR"
RINGS = {
    name: Contender(_FTAR, text, {"transport": "tcp", "registered": False, "tls": mode}, copies=2)
    for name, text, mode in (("plain", "FTAR over TCP", "off"), ("encrypted", "the same, encrypted", "on"))
}
FETCHES = {
    "plain": contender("ft_hsdp's fetch", "fetch", "Fetch"),
    "encrypted": contender("the same, encrypted", "fetch", "Fetch", tls="on"),
}


def run(options: TlsOptions, stream: TextIO) -> dict[str, Any]:
    """Return the result, ready for JSON. Raises Retryable, DataCorruption."""
    log, rounds = ProgressLog(stream), options.rounds
    result, started = begin_result("tls", log)
    result["contenders"] = {name: ring.text for name, ring in RINGS.items()}
    result["cipher"] = _cipher(rounds, log)
    result["ring"] = bandwidth(RINGS, BenchPlan((MEMBERS,), (MESSAGE,), rounds), log)
    result["fetch"] = [measure(FetchSpec(LARGE_TENSORS, options.size // LARGE_TENSORS), FETCHES, rounds, log)]
    return finish_result(result, log, started)


def _cipher(rounds: int, log: ProgressLog) -> ResultRow:
    """Measure both directions of one connection's cipher, in records as they are sent, on one thread."""
    key = os.urandom(record_layer.KEY)
    out, into = record_layer.Direction(key), record_layer.Direction(key)
    data = memoryview(bytearray(os.urandom(record_layer.RECORD)))
    record = memoryview(bytearray(record_layer.HEAD + record_layer.RECORD + record_layer.TAG))
    back = memoryview(bytearray(record_layer.RECORD))

    def sample(opens: bool) -> float:
        seconds = 0.0
        for _ in range(CIPHER // record_layer.RECORD):
            since = time.perf_counter()
            out.seal_into(data, record)
            middle = time.perf_counter()
            into.open_into(bytes(record[: record_layer.HEAD]), record[record_layer.HEAD :], back)
            seconds += (time.perf_counter() - middle) if opens else (middle - since)
        return seconds

    found = interleave({"seal": partial(sample, False), "open": partial(sample, True)}, rounds)
    speeds = {name: round(CIPHER / sorted(values)[len(values) // 2] / 1e9, 3) for name, values in found.items()}
    log.say(f"AES-128-GCM, records of {record_layer.RECORD // 1024} KiB: {speeds} GB/s")
    return {"bytes": CIPHER, "gb_per_s": speeds, "samples": {n: spread(values) for n, values in found.items()}}
