"""Hosts, and the failure domains that they share.

A host is the unit of correlated loss: its ranks, its state agent and its memory go together. It stands in a rack
and in a zone, as far as the job knows them. Copies of a shard are kept *apart*: on different hosts, in different
racks or in different zones (DeadPool §V-C).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Level = Literal["host", "rack", "zone"]
LEVELS: tuple[Level, ...] = get_args(Level)
MAX_PATH = 256  # characters


@dataclass(frozen=True, slots=True, order=True)
class Host:
    """A host and where it stands. Its name is unique in the job."""

    zone: str  # "": not known
    rack: str  # unique in its zone; "": not known
    name: str

    @classmethod
    def parse(cls, path: str) -> Host:
        """Return the host of "zone/rack/host", "rack/host" or "host".

        Raises:
            ValueError: `path` is none of these.
        """
        parts = path.split("/")
        if len(path) > MAX_PATH or not path.isprintable() or len(parts) > len(LEVELS) or not all(parts):
            raise ValueError(f"{path[:MAX_PATH]!r} is not zone/rack/host, rack/host or host")
        return cls(*("",) * (len(LEVELS) - len(parts)), *parts)

    def __str__(self) -> str:
        return "/".join(part for part in (self.zone, self.rack, self.name) if part)

    def domain(self, level: Level) -> tuple[str, ...]:
        """Return the failure domain of the host at a level.

        A level that is not known is the next lower one that is: a host without a known rack is a rack of its own.
        """
        if level == "zone" and self.zone:
            return ("zone", self.zone)
        if level != "host" and self.rack:
            return ("rack", self.zone, self.rack)
        return ("host", self.name)

    def distance(self, other: Host) -> int:
        """Return how far another host is: 0 the same one, 1 same rack, 2 same zone, 3 farther or unknown."""
        if self.name == other.name:
            return 0
        if self.rack and (self.zone, self.rack) == (other.zone, other.rack):
            return 1
        return 2 if self.zone and self.zone == other.zone else 3


def interleave(hosts: Sequence[Host], level: Level) -> list[Host]:
    """Return the hosts in an order in which neighbours stand in different domains, as far as that is possible.

    The first host of each domain comes first, then the second of each. Domains, and hosts in a domain, keep their
    order. GEMINI's Algorithm 1 groups neighbours: over hosts in the order of their racks, one lost rack would take
    all copies of its shards.
    """
    domains: dict[tuple[str, ...], list[Host]] = {}
    for host in hosts:
        domains.setdefault(host.domain(level), []).append(host)
    longest = max(map(len, domains.values()), default=0)
    return [members[i] for i in range(longest) for members in domains.values() if i < len(members)]
