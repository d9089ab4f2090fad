"""The grants that the lighthouses of a run have noted: that they are numbered in order, and whom they name."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from ft_hsdp.launch.run.directory import Row, Tailer

KEPT = 4000  # epochs and terms that are remembered

Breach = Callable[[str, object, str], None]
"""Told where something is, what it is, and what is expected."""


@dataclass(slots=True)
class LoggedGrant:
    """What of a grant commits have to fit."""

    members: frozenset[int]
    able: frozenset[int]  # who was to contribute; empty: it does not say
    where: str
    epoch: int
    base: tuple[str, int]  # lineage and step
    used: bool = False  # a step was committed in it


class LoggedGrants:
    """What lighthouses have granted, read as far as commits ask for it, and checked on the way.

    ``config``: the hash that they should have; ``heard`` is told of each grant.
    """

    def __init__(
        self, log: Tailer, name: str, slots: int, config: str, breach: Breach, heard: Callable[[LoggedGrant], None]
    ) -> None:
        self.number = 0
        self.forgotten = -1  # up to which epoch
        self._log, self._name, self._breach, self._heard = log, name, breach, heard
        self._rows = log.all()
        self._slots = slots
        self._config = config
        self._epochs: OrderedDict[int, list[LoggedGrant]] = OrderedDict()
        self._started: Counter[int] = Counter()  # terms
        self._spans: OrderedDict[int, tuple[int, int]] = OrderedDict()  # term -> its first and its last epoch

    def find(self, epoch: int, fits: Callable[[LoggedGrant], bool]) -> LoggedGrant | None:
        """The grant of an epoch: one that ``fits``, or any where none does."""
        while True:
            known = self._epochs.get(epoch, [])
            found = next(filter(fits, known), None)
            if found is not None or self.next() is None:
                return found or next(iter(known), None)

    def next(self) -> LoggedGrant | None:
        """Read up to the next grant; None at the end."""
        for row in self._rows:
            where = f"{self._name}:{self._log.line}"
            match row.get("event"):
                case "LighthouseStarted":
                    self._started[row.get("term", 0)] += 1
                    if (row.get("config_hash") or self._config) != self._config:
                        self._breach(where, f"config_hash {row['config_hash']}", f"{self._config}, of config.yaml")
                case "EpochGranted":
                    return self._granted(where, row)
        return None

    def _granted(self, where: str, row: Row) -> LoggedGrant:
        members, epoch, base = row.get("members", []), row["epoch"], row.get("base") or (0, 0, "")
        self._numbered(where, row.get("term", 0), epoch, base[1])
        if len(set(members)) != len(members) or not set(members) <= set(range(self._slots)):
            self._breach(where, f"members {members}", "each replica of the job at most once")
        roles = {int(replica): role for replica, role in row.get("roles", {}).items()}
        if not roles.keys() <= set(members):
            self._breach(where, f"roles of {sorted(roles)}", f"of members {members} only")
        able = frozenset(replica for replica, role in roles.items() if role == "contribute")
        grant = LoggedGrant(frozenset(members), able, where, epoch, (base[2], base[1]))
        self._epochs.setdefault(epoch, []).append(grant)
        if len(self._epochs) > KEPT:
            self.forgotten = max(self.forgotten, self._epochs.popitem(last=False)[0])
        self.number += 1
        self._heard(grant)
        return grant

    def _numbered(self, where: str, term: int, epoch: int, base: int) -> None:
        """Epochs rise, in a term and from term to term; a line of an older term may have been written late."""
        if self._started[term] > 1:
            self._breach(where, f"a grant in term {term}, in which two lighthouses started", "a term of its own")
        first, last = self._spans.get(term, (epoch, -1))
        below = max([last, *(span[1] for older, span in self._spans.items() if older < term)])
        above = min((span[0] for newer, span in self._spans.items() if newer > term), default=math.inf)
        anew = base == 0 and last < 0 and above == math.inf  # no state and no store was left: from the beginning
        if not below < epoch < above and not anew:
            self._breach(where, f"epoch {epoch} after {below}", "a higher epoch")
        self._spans[term] = first, max(last, epoch)
        if len(self._spans) > KEPT:
            self._spans.popitem(last=False)
