"""Real beats, for long: `python benchmarks/beats.py --beats 100000 | --seconds 1800 [--busy 8] [--record FILE]`.

Members of one ring, each in a process of its own, do nothing but beat, while ``--busy`` processes take the cores
from them. Prints one line of JSON: how many beats were heard, how many members were suspected (0 is right),
quantiles of the intervals, and at the end how long it took the others to find a member that is stopped.
``--record`` keeps the intervals that one member saw for the simulation in tests/core/test_failure_detector.py.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))  # this file is a command, too

from tests.support.forked import Forked

TOKEN = "ab" * 32
MEMBERS = 4
KEPT = 5000  # intervals that are recorded


def spin(_: Connection) -> None:
    while True:
        sum(range(10_000))


def member(pipe: Connection, number: int) -> None:
    """Beat in a ring until it breaks or the pipe asks; then say when it broke and why, and what was heard."""
    from ft_hsdp.core.failure_detector import PhiAccrual
    from ft_hsdp.errors import FTARError
    from ft_hsdp.ftar import Communicator, Settings

    intervals: list[float] = []
    heard = PhiAccrual.heard

    def counted(pulse: PhiAccrual, now: float) -> None:
        intervals.append(now - pulse.heard_at)
        heard(pulse, now)

    with mock.patch.object(PhiAccrual, "heard", counted):
        comm = Communicator(number, token=TOKEN, settings=Settings(transport="tcp"))
        pipe.send(comm.address)
        comm.reconfigure(1, pipe.recv())
        pipe.send(len(intervals))
        while not (pipe.poll(0.02) and pipe.recv() == "end"):
            error: FTARError | None = comm._group.error
            if error is not None:
                pipe.send((time.monotonic(), str(error), intervals))
                break
            if len(intervals) % 1000 < 10:
                pipe.send(len(intervals))
        else:
            pipe.send((0.0, "", intervals))
        comm.close()


class Ring:
    """The members, seen from outside."""

    def __init__(self) -> None:
        self.members = [Forked(member, number) for number in range(MEMBERS)]
        addresses = [(n, each.hear()) for n, each in enumerate(self.members)]
        for each in self.members:
            each.pipe.send(addresses)
        self.counts = [each.hear() for each in self.members]
        self.ended: dict[int, tuple[float, str, list[float]]] = {}

    def look(self) -> None:
        for number, each in enumerate(self.members):
            while number not in self.ended and each.pipe.poll():
                said = each.hear()
                if isinstance(said, tuple):
                    self.ended[number] = said
                else:
                    self.counts[number] = said


def soak(beats: int, seconds: float, busy: int) -> tuple[dict[str, Any], list[float]]:
    """Beat until all have heard ``beats`` together and ``seconds`` are over, then stop one.

    Returns what was seen, and one member's intervals. The busy processes run on: a stop is found beside them, too.
    """
    spinners = [Forked(spin) for _ in range(busy)]
    ring = Ring()
    try:
        began = time.monotonic()
        while (sum(ring.counts) < beats or time.monotonic() < began + seconds) and not ring.ended:
            time.sleep(0.1)
            ring.look()
        false = {n: text for n, (_, text, _) in ring.ended.items()}
        took = time.monotonic() - began
        found: list[float] = []
        if not false:
            ring.members[1].signal(signal.SIGSTOP)
            stopped = time.monotonic()
            while len(ring.ended) < MEMBERS - 1 and time.monotonic() < stopped + 30:
                time.sleep(0.01)
                ring.look()
            assert all("replica 1" in text for _, text, _ in ring.ended.values()), ring.ended
            found = [at - stopped for at, _, _ in ring.ended.values()]
    finally:
        for process in (*spinners, *ring.members):
            process.close()
    heard = [intervals for _, _, intervals in ring.ended.values()]
    every = sorted(i for each in heard for i in each)
    quantiles = (
        {f"p{q}": round(1000 * every[int(len(every) * q / 100)], 1) for q in (50, 99, 99.9)} if every else {}
    )
    result = {
        "beats": sum(ring.counts),
        "seconds": round(took, 1),
        "busy_processes": busy,
        "cores": len(os.sched_getaffinity(0)),
        "suspected": len(false),
        "why": sorted(set(false.values())),
        "interval_ms": {**quantiles, "max": round(1000 * every[-1], 1)} if every else {},
        "stop_found_after_ms": [round(1000 * s) for s in sorted(found)],
        "stop_found_median_ms": round(1000 * statistics.median(found)) if found else None,
    }
    return result, heard[0] if heard else []


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--beats", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--busy", type=int, default=2 * len(os.sched_getaffinity(0)))
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    result, intervals = soak(args.beats, args.seconds, args.busy)
    sys.stdout.write(json.dumps(result) + "\n")
    if args.record is not None:
        about = {"cores": result["cores"], "busy_processes": result["busy_processes"], "beat_ms": 50}
        about |= {"kernel": platform.release().split("-")[0], "members": MEMBERS}
        rows = [round(1000 * i, 1) for i in intervals[:KEPT]]
        args.record.write_text(json.dumps({**about, "intervals_ms": rows}, separators=(",", ":")) + "\n")
    return 0 if result["suspected"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
