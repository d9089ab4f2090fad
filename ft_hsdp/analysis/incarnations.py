"""Incarnations: when each stage of a replica's start was over. Pure.

An incarnation is one life of a replica's processes, named REPLICA-RUN-RESTARTS. Failures, `explain`, `trace` and
`bench return` read its start off the same record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ft_hsdp.core.restart import IncarnationId

Row = Mapping[str, Any]

_STAMPS = {
    "ReplicaStarted": "started",
    "ReplicaBooted": "booted",
    "ReplicaWarmed": "warmed",
    "CheckedIn": "checked_in",
    "GrantAdopted": "granted",
    "FetchStarted": "fetching",
    "FetchCompleted": "fetched",
    "FirstStepCommitted": "committed",
    "Rejoined": "rejoined",
    "ReplicaExited": "exited",
    "ExitReported": "exited",
}
"""The events of an incarnation, and the field of `IncarnationRecord` with the time of each."""


@dataclass(slots=True)
class IncarnationRecord:
    """What is known of one incarnation. Times are Unix seconds, of the rank that came first; None: not known."""

    incarnation: str
    started: float | None = None
    booted: float | None = None  # its processes run, and know which replica they are
    warmed: float | None = None  # its model is built
    checked_in: float | None = None
    granted: float | None = None
    fetching: float | None = None
    fetched: float | None = None  # by its last rank
    committed: float | None = None  # it applied a step
    rejoined: float | None = None  # it contributed to a step
    exited: float | None = None
    donor: str = ""  # the replica whose state it fetched
    how: str = ""  # how it was started: cold, from a spare
    rung: str = ""  # where its state came from, if other than from the replicas that trained
    kind: str = ""  # how it ended

    def take(self, name: str, row: Row) -> None:
        """Take the event ``name`` of this incarnation; events without a stage change nothing."""
        if name == "StateRestored":
            self.rung = str(row.get("rung", ""))
        stage = _STAMPS.get(name)
        if stage is None:
            return
        known, t = getattr(self, stage), row["t"]
        setattr(self, stage, t if known is None else max(known, t) if name == "FetchCompleted" else min(known, t))
        if name == "FetchCompleted":
            self.donor = str(row.get("donor", ""))[:64]
        elif name == "ReplicaStarted":
            self.how = self.how or str(row.get("how", ""))
        elif name == "ReplicaExited":
            self.kind = str(row.get("kind"))

    @property
    def began(self) -> float | None:
        return self.booted if self.started is None else self.started  # under torchrun nobody tells of the start

    @property
    def first(self) -> float:
        known = (self.started, self.booted, self.warmed, self.checked_in, self.fetching, self.fetched)
        return min((t for t in known if t is not None), default=0.0)


def incarnations(events: Iterable[Row]) -> dict[tuple[int, str], IncarnationRecord]:
    found: dict[tuple[int, str], IncarnationRecord] = {}
    for row in events:
        replica, name = row.get("replica"), row.get("incarnation")
        if isinstance(replica, int) and isinstance(name, str):
            found.setdefault((replica, name), IncarnationRecord(name)).take(row["event"], row)
    return found


PARTS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "boot": (("started",), "booted"),
    "warm": (("booted",), "warmed"),
    "check-in": (("warmed", "booted"), "checked_in"),
    "grant": (("checked_in",), "granted"),
    "fetch": (("fetching",), "fetched"),
    "first step": (("granted",), "committed"),
    "contributes": (("committed",), "rejoined"),
}
"""Each part of a start: the stage with which it begins (the first that is known), and the one that ends it.

The fetch lies inside the first step, to which a replica that is behind does not contribute; all others follow one
another.
"""


@dataclass(frozen=True, slots=True)
class IncarnationStart:
    """How long the start of one incarnation took. All times are in seconds; None: not known."""

    replica: int
    incarnation: str
    how: str  # cold, from a spare; "": not known
    down: float | None  # from the failure of the incarnation before it to its start
    parts: Mapping[str, float]  # those of `PARTS` that are known
    back: float | None  # from that failure, else from its start, to its first commit


def starts(events: Iterable[Row], failures: Sequence[Row] = ()) -> list[IncarnationStart]:
    """Return all starts of a run, by time.

    Args:
        failures: its failures, as in summary.json.
    """
    failed = {f["incarnation"]: f["t"] for f in failures if "incarnation" in f}
    found = []
    for (replica, name), record in incarnations(events).items():
        if record.began is not None:
            found.append((record.began, _start(replica, record, record.began, failed.get(_before(name)))))
    return [start for _, start in sorted(found, key=lambda each: each[0])]


def parts_of(record: IncarnationRecord) -> dict[str, float]:
    """Return how long those `PARTS` of a start took that are known."""
    parts = {}
    for name, (begins, end) in PARTS.items():
        begin = next((t for t in (getattr(record, stage) for stage in begins) if t is not None), None)
        over = getattr(record, end)
        if begin is not None and over is not None:
            parts[name] = max(0.0, over - begin)
    return parts


def _start(replica: int, record: IncarnationRecord, began: float, failed: float | None) -> IncarnationStart:
    parts = parts_of(record)
    down = None if failed is None else max(0.0, began - failed)
    since = began if failed is None else failed
    back = None if record.committed is None else max(0.0, record.committed - since)
    return IncarnationStart(replica, record.incarnation, record.how, down, parts, back)


def _before(incarnation: str) -> str:
    name = IncarnationId.parse(incarnation)
    return "" if name is None or name.previous is None else str(name.previous)
