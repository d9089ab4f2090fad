"""Where an element of a parameter was, step by step: on which rank of each replica, host and process. Pure.

A replica holds the whole model, so an element is on one rank of each, or on several that hold the same block. What
a run logs says where: `ReplicaWarmed` how the ranks share the parameters, `EpochGranted` the hosts of the ranks,
`ReplicaStarted` their pids, and the replica's own log of commits which of its incarnations applied a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ft_hsdp.core.grant import Hosts, ranks_of
from ft_hsdp.memory.hosts import Host
from ft_hsdp.memory.parameters import Block, CutParameter, unfolded

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ElementHolder:
    """A rank that held the element, or a part of the parameter, and updated it."""

    replica: int
    incarnation: str
    rank: int | None = None  # None: the incarnation has not logged how its ranks share the parameter
    block: Block = ()  # that it held
    host: str = ""  # "": not known
    local: int | None = None  # which rank of the replica on that host; None: not known
    pid: int | None = None  # None: not known

    def __str__(self) -> str:
        host = f" on {self.host} (local rank {self.local})" if self.host else ""
        pid = "" if self.pid is None else f", pid {self.pid}"
        return f"replica {self.replica} rank {'?' if self.rank is None else self.rank}{host}{pid}"


@dataclass(frozen=True, slots=True)
class LocatedSpan:
    """Steps that follow each other, with the same answer."""

    first: int
    last: int
    contributors: tuple[int, ...]  # replicas
    holders: tuple[ElementHolder, ...]

    def line(self, blocks: bool) -> str:
        """Return the span as text; with ``blocks`` of the whole parameter."""
        told = [f"{each} has {_range(each.block)}" if blocks else str(each) for each in self.holders]
        told.append(f"contributors {', '.join(map(str, self.contributors))}")
        steps = f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"
        return f"{steps}: {'; '.join(told)}"


class RunPlaces:
    """What events say about the places of parameters and ranks."""

    def __init__(self, events: Iterable[Row]) -> None:
        """Take a run's events, by time."""
        self._hosts: dict[int, Mapping[int, Hosts]] = {}  # by epoch, of each replica
        self._layouts: dict[str, Mapping[str, CutParameter]] = {}  # by incarnation
        self._pids: dict[str, list[int]] = {}  # by incarnation, in the order of its hosts
        now: Mapping[int, Hosts] = {}
        known: dict[str, Mapping[str, CutParameter]] = {}
        for row in events:
            match row["event"]:
                case "EpochGranted":
                    now = {**now, **{int(each): hosts for each, hosts in row.get("hosts", {}).items()}}
                    self._hosts[row["epoch"]] = now
                case "ReplicaStarted":
                    self._pids[row["incarnation"]] = row.get("pids", [])
                case "ReplicaWarmed" if row.get("layout"):
                    layout = known.setdefault(str(row["layout"]), {}) or unfolded(row["layout"])
                    self._layouts[row["incarnation"]] = known[str(row["layout"])] = layout

    @property
    def parameters(self) -> Mapping[str, CutParameter]:
        """The parameters by name, as the first incarnation shares them; {}: none has logged it."""
        return next(iter(self._layouts.values()), {})

    def spans(
        self,
        name: str,
        element: tuple[int, ...] | None,
        commits: Iterable[Row],
        lives: Mapping[int, Mapping[str, str]],
    ) -> list[LocatedSpan]:
        """Return who held a parameter, by steps.

        Args:
            element: The indices of an element of it; None: all of it.
            commits: Those that lasted, by step.
            lives: Of each replica, by the lineage of a commit, the incarnation that applied it.
        """
        found: list[LocatedSpan] = []
        for row in commits:
            step, held = row["step"], list[ElementHolder]()
            for replica, incarnations in sorted(lives.items()):
                if (incarnation := incarnations.get(row["lineage"])) is not None:
                    hosts = self._hosts.get(row["epoch"], {}).get(replica, ())
                    held += self._holders(replica, incarnation, hosts, name, element)
            span = LocatedSpan(step, step, tuple(row["contributors"]), tuple(held))
            if found and replace(span, first=found[-1].first) == replace(found[-1], last=step):
                found[-1] = replace(found[-1], last=step)
            else:
                found.append(span)
        return found

    def _holders(
        self, replica: int, incarnation: str, hosts: Hosts, name: str, element: tuple[int, ...] | None
    ) -> list[ElementHolder]:
        parameter = self._layouts.get(incarnation, {}).get(name)
        if parameter is None:
            return [ElementHolder(replica, incarnation)]
        stands = {rank: (path, at) for path, ranks in ranks_of(hosts) for at, rank in enumerate(ranks)}
        pids = self._pids.get(incarnation, [])
        by_rank = dict(zip(stands, pids, strict=True)) if len(pids) == len(stands) else {}
        found = []
        for rank in range(parameter.ranks):
            block = parameter.block(rank)
            if all(a < b for a, b in block) if element is None else _within(element, block):
                path, local = stands.get(rank, ("", None))
                host = Host.parse(path).name if path else ""
                found.append(ElementHolder(replica, incarnation, rank, block, host, local, by_rank.get(rank)))
        return found


def element_of(parameter: CutParameter, text: str) -> tuple[int, ...] | None:
    """Return the indices of an element: ``text`` is its place in the whole parameter, or its indices with commas.

    None: there is no such element.
    """
    words = text.strip().strip("[]()").split(",")
    if not all(word.strip().isdecimal() for word in words):
        return None
    numbers = tuple(map(int, words))
    if len(numbers) == 1 and len(parameter.shape) != 1:
        return parameter.element(numbers[0]) if numbers[0] < math.prod(parameter.shape) else None
    fits = len(numbers) == len(parameter.shape) and _within(numbers, tuple((0, end) for end in parameter.shape))
    return numbers if fits else None


def _within(element: tuple[int, ...], block: Block) -> bool:
    return all(begin <= at < end for at, (begin, end) in zip(element, block, strict=True))


def _range(block: Block) -> str:
    return f"[{', '.join(f'{begin}:{end}' for begin, end in block)}]"
