"""The grants that the lighthouses of a run logged, for `verify`: their order and their members are checked."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ft_hsdp.core.grant import paths
from ft_hsdp.launch.run.directory import DAMAGED, Row, Tailer

KEPT = 4000  # epochs, and terms, that are kept in memory

Breach = Callable[[str, object, str], None]
"""Called with the place of a breach, what is there, and what is expected."""


@dataclass(slots=True)
class LoggedGrant:
    """The part of a grant that its commits must fit."""

    members: frozenset[int]
    contributors: frozenset[int]  # members whose role is to contribute; empty: the log does not say
    where: str  # file and line
    epoch: int
    base: tuple[str, int]  # lineage and step
    wanted: int | None = None  # units of a step to which all replicas contribute; None: the log does not say
    ranks: Mapping[int, int] = field(default_factory=dict)  # of the members of which the line names the hosts
    used: bool = False  # a step was committed in its epoch


class LoggedGrants:
    """The grants in the lighthouses' log. It is read as far as commits ask for it, and checked on the way."""

    def __init__(
        self,
        log: Tailer,
        name: str,
        slots: int,
        config: str,
        breach: Breach,
        on_grant: Callable[[LoggedGrant], None],
    ) -> None:
        """Start at the first line of a log.

        Args:
            log: The events of the lighthouses.
            name: Its path in messages.
            config: The hash of the configuration that the lighthouses should use.
        """
        self.number = 0  # of grants that were read
        self.forgotten = -1  # grants up to this epoch are not in memory any more
        self._log, self._name, self._breach, self._on_grant = log, name, breach, on_grant
        self._rows = log.all()
        self._slots = slots
        self._config = config
        self._epochs: OrderedDict[int, list[LoggedGrant]] = OrderedDict()
        self._started: Counter[int] = Counter()  # term -> number of lighthouses that started in it
        self._spans: OrderedDict[int, tuple[int, int]] = OrderedDict()  # term -> its first and its last epoch

    def find(self, epoch: int, fits: Callable[[LoggedGrant], bool]) -> LoggedGrant | None:
        """Return a grant of an epoch for which `fits` is true, or else any grant of it; None if there is none."""
        while True:
            known = self._epochs.get(epoch, [])
            found = next(filter(fits, known), None)
            if found is not None or self.next() is None:
                return found or next(iter(known), None)

    def next(self) -> LoggedGrant | None:
        """Read and return the next grant; None at the end of the log."""
        for row in self._rows:
            where = f"{self._name}:{self._log.line}"
            match row.get("event"):
                case "LighthouseStarted":
                    self._started[row.get("term", 0)] += 1
                    if (row.get("config_hash") or self._config) != self._config:
                        self._breach(where, f"config_hash {row['config_hash']}", f"{self._config}, of config.yaml")
                case "EpochGranted":
                    try:
                        return self._granted(where, row)
                    except DAMAGED as error:
                        self._breach(where, f"a grant with odd values ({error})", "a grant")
        return None

    def _granted(self, where: str, row: Row) -> LoggedGrant:
        members, epoch, base = row.get("members", []), row["epoch"], row.get("base") or (0, 0, "")
        self._numbered(where, row.get("term", 0), epoch, base[1])
        if len(set(members)) != len(members) or not set(members) <= set(range(self._slots)):
            self._breach(where, f"members {members}", "each replica of the job at most once")
        roles = {int(replica): role for replica, role in row.get("roles", {}).items()}
        if not roles.keys() <= set(members):
            self._breach(where, f"roles of {sorted(roles)}", f"of members {members} only")
        contributors = frozenset(replica for replica, role in roles.items() if role == "contribute")
        base_at, wanted = (base[2], base[1]), row.get("units_wanted")
        ranks = {int(replica): len(paths(hosts)) for replica, hosts in row.get("hosts", {}).items() if hosts}
        grant = LoggedGrant(frozenset(members), contributors, where, epoch, base_at, wanted, ranks)
        self._epochs.setdefault(epoch, []).append(grant)
        if len(self._epochs) > KEPT:
            self.forgotten = max(self.forgotten, self._epochs.popitem(last=False)[0])
        self.number += 1
        self._on_grant(grant)
        return grant

    def _numbered(self, where: str, term: int, epoch: int, base: int) -> None:
        """Check that epochs rise, in a term and from term to term; a line of an older term may come late."""
        if self._started[term] > 1:
            self._breach(where, f"a grant in term {term}, in which two lighthouses started", "a term of its own")
        first, last = self._spans.get(term, (epoch, -1))
        below = max([last, *(span[1] for older, span in self._spans.items() if older < term)])
        above = min((span[0] for newer, span in self._spans.items() if newer > term), default=math.inf)
        anew = base == 0 and last < 0 and above == math.inf  # no state and no store was left: the job began again
        if not below < epoch < above and not anew:
            self._breach(where, f"epoch {epoch} after {below}", "a higher epoch")
        self._spans[term] = first, max(last, epoch)
        if len(self._spans) > KEPT:
            self._spans.popitem(last=False)
