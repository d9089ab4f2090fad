"""Hosts, and the failure domains that they share.

A host is the unit of correlated loss: its ranks, its state agent and its memory go together. It stands in a rack
and in a zone, as far as the job knows them. Copies of a shard are kept *apart*: on different hosts, in different
racks or in different zones (DeadPool §V-C).

A host is written as a *path*: "zone/rack/host", "rack/host", "zone//host" or "host". `locate` finds where a host
stands, from the configuration and from what schedulers tell their processes.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ft_hsdp.errors import ConfigError

Level = Literal["host", "rack", "zone"]
LEVELS: tuple[Level, ...] = get_args(Level)

DOMAIN = "[0-9A-Za-z._-]{1,63}"  # of a zone or a rack; a regular expression, as is LABEL
LABEL = f"{DOMAIN}(/({DOMAIN})?)?"  # "rack", "zone/rack" or, if the rack is not known, "zone/"
_PATH = re.compile(f"(({DOMAIN}/)?{DOMAIN}/|{DOMAIN}//)?[0-9A-Za-z._-]{{1,64}}")
_STRANGE = re.compile(r"[^0-9A-Za-z._-]")  # in a name: another character takes its place
PATHS = "zone/rack/host, rack/host, zone//host or host"

DOMAINS_VARIABLE = "FT_HSDP_DOMAINS"  # zone and rack of the host: "zone=a,rack=7"
SLURM_VARIABLE = "SLURM_TOPOLOGY_ADDR"  # switches above the node, and the node: "s0.s2.node7"
SLURM_KINDS_VARIABLE = "SLURM_TOPOLOGY_ADDR_PATTERN"  # what each part of that is: "switch.switch.node"


@dataclass(frozen=True, slots=True, order=True)
class Host:
    """A host and where it stands. Its name is unique in the job."""

    zone: str  # "": not known
    rack: str  # unique in its zone; "": not known
    name: str

    @classmethod
    def parse(cls, path: str) -> Host:
        """Return the host of a path.

        Raises:
            ValueError: `path` is none.
        """
        if not _PATH.fullmatch(path):
            raise ValueError(f"{path[:60]!r} is not {PATHS}")
        parts = path.split("/")
        return cls(*("",) * (len(LEVELS) - len(parts)), *parts)

    def __str__(self) -> str:
        return "/".join((self.zone, self.rack, self.name) if self.zone else filter(None, (self.rack, self.name)))

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


def known(hosts: Iterable[Host], level: Level) -> bool:
    """Return whether it is known of any of these hosts in which domain of a level it stands."""
    return any(host.domain(level)[0] == level for host in hosts)


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


def plain(text: str) -> str:
    """Return a text as the name of a host, of letters, digits, ".", "_" and "-"; at most 64 characters."""
    return _STRANGE.sub("-", text)[:64]


def locate(name: str, labels: Mapping[str, str], environment: Mapping[str, str]) -> tuple[Host, str]:
    """Return where a host stands, and which key or variable says so ("": none, only its name is known).

    Args:
        name: Of the host, as `plain` returns it.
        labels: `hosts.labels` of the configuration, which come first: the first pattern that fits counts.
        environment: Of a process on the host. FT_HSDP_DOMAINS comes before Slurm's topology.

    Raises:
        ConfigError: FT_HSDP_DOMAINS or Slurm's topology cannot be read.
    """
    label = next((label for pattern, label in labels.items() if fnmatch.fnmatchcase(name, pattern)), None)
    if label is not None:
        return Host.parse(f"{label}/{name}"), "hosts.labels"
    said = environment.get(DOMAINS_VARIABLE, "")
    if said:
        return Host(*_domains(said), name), DOMAINS_VARIABLE
    zone, rack = _switches(environment.get(SLURM_VARIABLE, ""), environment.get(SLURM_KINDS_VARIABLE, ""))
    return Host(zone, rack, name), SLURM_VARIABLE if zone or rack else ""


def _domains(said: str) -> tuple[str, str]:
    """Return zone and rack of "zone=a,rack=7", "zone=a" or "rack=7"; "": not known.

    An empty value stands for what is not known: templates write it where a label is missing. Raises ConfigError.
    """
    pairs = [pair.partition("=")[::2] for pair in said.split(",")]
    domains = dict(pairs)
    known = len(domains) == len(pairs) == said.count("=") and domains.keys() <= {"zone", "rack"}
    if not known or not all(re.fullmatch(f"({DOMAIN})?", value) for value in domains.values()):
        allowed = 'zone=ZONE,rack=RACK or one of them, each of up to 63 letters, digits, ".", "_" or "-"'
        raise ConfigError(DOMAINS_VARIABLE, said, allowed)
    return domains.get("zone", ""), domains.get("rack", "")


def _switches(address: str, kinds: str) -> tuple[str, str]:
    """Return zone and rack of a node of Slurm: the highest and the lowest switch above it; "": there is none.

    ``address`` has switches from the highest down, and the node, whose name may have dots itself; ``kinds`` says
    which is which, and if it is empty, all but the last part are switches. Raises ConfigError if they do not fit.
    """
    if kinds and not re.fullmatch(r"([a-z]+\.)*node", kinds):
        raise ConfigError(SLURM_KINDS_VARIABLE, kinds, f"such as switch.switch.node; else set {DOMAINS_VARIABLE}")
    above = kinds.count(".") if kinds else address.count(".")
    if address.count(".") < above:
        allowed = f"{above} switches and a node ({SLURM_KINDS_VARIABLE} is {kinds}); else set {DOMAINS_VARIABLE}"
        raise ConfigError(SLURM_VARIABLE, address, allowed)
    parts = address.split(".")[:above]
    switches = [_STRANGE.sub("-", part)[:63] for part in parts if part]
    zone = switches[0] if len(switches) > 1 else ""
    return zone, switches[-1] if switches else ""
