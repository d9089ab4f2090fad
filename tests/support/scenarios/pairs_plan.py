"""Pairs of faults: which two, on whom, for how long, and how far apart. Drawn from a seed; pure."""

import random
from dataclasses import dataclass
from typing import Any

from ft_hsdp.launch.chaos import Injection
from ft_hsdp.launch.injection import parse_options
from tests.support import os_faults

REPLICAS, RANKS = 3, 2
KINDS = (
    *("kill", "stop", "term", "host", "disk_full", "slow_disk", "descriptors", "memory", "fork_server"),
    *("agent", "supervisor", "lighthouse", "partition", "partition_lighthouse", "reset", "garbage"),
    *("flip", "clock"),
)
"""What is drawn from, each alike: the kinds of `chaos` and of `os_faults`, signals and helpers one by one."""
ENDING = ("kill", "term", "flip", "reset")  # they have no end
SHORT = ("supervisor",)  # they must have one
GOOD = 0.1  # how many of the others last for good


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault; ``name`` is its kind here, one of GOAL_KINDS."""

    name: str
    injection: Injection
    seconds: float = 0.0  # by how much a clock is wrong, or how long each write takes

    @property
    def lasting(self) -> bool:
        """Whether it stays for good."""
        killed = self.injection.kind == "helper" and self.injection.signal == "KILL"
        return self.injection.for_s == 0 and not killed and self.name not in ENDING


@dataclass(frozen=True, slots=True)
class Pair:
    """Two faults; the second comes ``delay_s`` after the first: while that is in force, or is recovered from."""

    number: int
    first: Fault
    second: Fault
    delay_s: float

    @property
    def lasting(self) -> bool:
        """Whether one of them stays for good."""
        return self.first.lasting or self.second.lasting


def pair(seed: int, number: int) -> Pair:
    rng = random.Random(f"{seed}/{number}")
    first, second = (_fault(rng, rng.choice(KINDS)) for _ in range(2))
    return Pair(number, first, second, round(rng.uniform(0.0, first.injection.for_s + 3.0), 2))


def _fault(rng: random.Random, name: str) -> Fault:
    replica, rank = rng.randrange(REPLICAS), rng.randrange(RANKS)
    for_s = round(rng.uniform(0.3, 4.0), 2)
    if name in ENDING or (name not in SHORT and rng.random() < GOOD):
        for_s = 0.0
    said: dict[str, Any] = {"kind": name, "for_s": for_s}
    if name in ("kill", "stop", "term"):
        said |= {"kind": "signal", "replica": replica, "rank": rank, "signal": name.upper()}
    elif name in ("fork_server", "agent", "supervisor", "lighthouse"):
        kill = name != "supervisor" and rng.random() < 0.5
        said |= {"kind": "helper", "target": name, "signal": "KILL" if kill else "STOP"}
        said |= {"for_s": 0.0} if kill else {}
        said |= {"replica": replica} if name == "agent" else {}
    elif name.startswith("partition"):
        other = "lighthouse" if name == "partition_lighthouse" else (replica + rng.choice((1, 2))) % REPLICAS
        said |= {"kind": "partition", "edge": [replica, other], "reject": rng.random() < 0.5}
    else:
        said |= {"replica": replica}
    if name not in os_faults.KINDS:
        return Fault(name, parse_options(**said))
    seconds = 0.0
    if name == "slow_disk":
        seconds = round(rng.uniform(0.05, 1.0), 2)
    if name == "clock":
        seconds = float(rng.choice((-86400, -3600, -5, 5, 3600, 86400)))
    one = None if name in os_faults.FAKED else rank
    return Fault(name, Injection(replica, one, for_s=for_s, kind=name), seconds)
