"""Which commits lasted: from the commit logs of all replicas to one row per step. Pure.

A replica may log a step that is rolled back later. So a step is canonical only once a later step builds on it.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from ft_hsdp.core.commit import CommitRecord, Contribution

VALUE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_./-]{0,63}")  # of a value that a training loop logs by `Job.log`
EVAL_LOSS = "eval_loss"  # that of an evaluation inside the job
MAX_TOLD = 4096  # newest states whose evaluations are known
MAX_VALUES = 64  # names of such values in a job

Row = dict[str, Any]
"""A commit as a replica logged it."""

_SHOWN = (
    "t",
    "step",
    "epoch",
    "loss",
    "lr",
    "lr_scale",
    "contributors",
    "total",
    "units",
    "units_wanted",
    "step_s",
    "waits",
    "ftar_bytes",
    "ftar_s",
    "attempt",
    "lineage",
    "tokens",
    "holes",
    "given_up",
)
_NEEDED = frozenset({"step", "epoch", "attempt", "lineage", "prev", "role"})  # to be merged
# And to be told and counted:
COUNTED = frozenset(_SHOWN) - {"given_up"} | {"prev", "role", "contributions", "cursors"}
_MAX_UNITS = 2**24  # that a replica trains in one step; a number above that is damage, and is not counted up to
Rewind = tuple[int, int]
"""An epoch and its first step: what earlier epochs committed from that step on did not last."""

PATIENCE = 3  # steps after which a missing row is no longer waited for


def counted(row: Row) -> bool:
    """Return whether a row has all that is told and counted of a commit, with numbers that a step can have."""
    if not row.keys() >= COUNTED:
        return False
    try:
        runs = [(c["shard"], c["index"], c["units"]) for c in row["contributions"]]
        runs += [(shard, first, count) for shard, first, count in row.get("given_up") or ()]
    except (KeyError, TypeError, ValueError):
        return False
    return all(isinstance(number, int) and number >= 0 and run[2] <= _MAX_UNITS for run in runs for number in run)


def record_of(row: Row) -> CommitRecord:
    return CommitRecord(
        epoch=row["epoch"],
        attempt=row["attempt"],
        step=row["step"],
        prev=row["prev"],
        ring=tuple(row["ring"] if "ring" in row else row["contributors"]),
        total=row["total"],
        wanted=row["units_wanted"],
        contributions=tuple(Contribution(**c) for c in row["contributions"]),
        digest=row.get("digest", ""),
        lr_scale=row["lr_scale"],
        poisoned=tuple(row.get("poisoned", ())),
        spoiled=tuple((shard, first, count) for shard, first, count in row.get("spoiled", ())),
        retries=row.get("poison_retries", 0),
        ring_widths=tuple(row.get("ring_widths", ())),
    )


def metrics_row(row: Row) -> Row:
    narrow = {str(c["replica"]): c["width"] for c in row.get("contributions") or () if c.get("width")}
    return {key: row.get(key) for key in _SHOWN} | ({"widths": narrow} if narrow else {})


class CommitMerger:
    """Takes commits of all replicas in any order, and returns the canonical ones by step; then it forgets them.

    Of several rows of one commit the first that a contributor logged counts. A row of a replica that was behind
    counts only if no contributor logged one (all their leaders died between applying a step and logging it).

    A job may go back by several steps, so that steps which were returned are undone. A row shows it: its step
    was returned already, and its epoch is later than that of the last returned row. Then `undone` is true, and
    another merger that is made with `rewinds` returns the history that lasted, from the first row on.
    """

    def __init__(self, rewinds: Iterable[Rewind] = ()) -> None:
        self.bad = 0  # rows that are not commits
        self.rewinds = tuple(rewinds)
        self.undone = False
        self._last: Row | None = None  # the newest canonical row
        self._rows: dict[str, Row] = {}  # lineage -> row, of steps above that
        self._at: dict[int, list[str]] = {}  # step -> lineages, in the order of their rows
        self._built_on: dict[str, Row] = {}  # lineage -> the row that builds on it
        self._top: int | None = None  # the highest step

    def add(self, rows: Iterable[Row]) -> None:
        """Take rows of any replicas. Add all that the logs hold now before you call `confirmed`."""
        for row in rows:
            if not (row.keys() >= _NEEDED and isinstance(row["step"], int) and isinstance(row["lineage"], str)):
                self.bad += 1
                continue
            if any(row["epoch"] < epoch and row["step"] >= step for epoch, step in self.rewinds):
                continue
            rival = self._built_on.get(row["prev"])
            if row["step"] <= self._step:
                self._told_before(row)
                continue
            if rival is None or _rank(rival) < _rank(row):
                self._built_on[row["prev"]] = row
            lineage = row["lineage"]
            known = self._rows.get(lineage)
            if known is None:
                self._rows[lineage] = row
                self._at.setdefault(row["step"], []).append(lineage)
                self._top = row["step"] if self._top is None else max(self._top, row["step"])
            elif known["role"] != "contribute" and row["role"] == "contribute":
                self._rows[lineage] = row

    def _told_before(self, row: Row) -> None:
        """Take a row of a step that was returned: of another replica, or of a history that replaced it."""
        assert self._last is not None
        if row["epoch"] <= self._last["epoch"]:
            return
        first = min([row["step"], *(step for epoch, step in self.rewinds if epoch == row["epoch"])])
        self.rewinds = (*(r for r in self.rewinds if r[0] != row["epoch"]), (row["epoch"], first))
        self.undone = True

    @property
    def newest(self) -> Row | None:
        if self._top is None or self._top not in self._at:
            return self._last
        return max(self._rows_at(self._top), key=_rank)

    @property
    def _step(self) -> int:
        return -1 if self._last is None else int(self._last["step"])

    def confirmed(self) -> list[Row]:
        """Return the rows that became canonical since the last call: another row builds on each."""
        new = []
        while (row := self._next()) is not None:
            new.append(row)
            self._forget(row)
        return new

    def finish(self, final_lineage: str | None = None) -> list[Row]:
        """Return the remaining rows up to ``final_lineage``, or up to the newest row if that is unknown."""
        new = self.confirmed()
        end = self._rows.get(final_lineage or "") or self.newest
        path: list[Row] = []
        while end is not None and end["step"] > self._step:
            path.append(end)
            end = self._rows.get(end["prev"]) or self._below(end["step"])
        path.reverse()
        if path:
            self._forget(path[-1])
        return new + path

    def _forget(self, row: Row) -> None:
        for step in [step for step in self._at if step <= row["step"]] if self._gapped(row) else [row["step"]]:
            for lineage in self._at.pop(step, ()):
                self._built_on.pop(self._rows.pop(lineage)["prev"], None)
        self._last = row

    def _gapped(self, row: Row) -> bool:
        """Return whether there may be rows of steps between the last canonical one and this one."""
        return self._last is None or row["step"] != self._last["step"] + 1

    def _next(self) -> Row | None:
        """Return the row after the last canonical one, if another row builds on it."""
        if self._top is None or not self._at:
            return None
        step = min(self._at) if self._last is None else self._step + 1
        overdue = self._top > step + PATIENCE
        if step not in self._at:
            if not overdue:
                return None
            step = min(self._at)
            rivals = self._rows_at(step)
        else:
            rivals = self._rows_at(step)
            if self._last is not None:
                mine = [row for row in rivals if row["prev"] == self._last["lineage"]]
                rivals = mine or (rivals if overdue else [])  # what was returned has been rolled back
        sure = [row for row in rivals if row["lineage"] in self._built_on]
        if not sure and overdue and step + 1 not in self._at:
            return max(rivals, key=_rank, default=None)  # no replica logged its successor
        return max(sure, key=lambda row: _rank(self._built_on[row["lineage"]]), default=None)

    def _below(self, step: int) -> Row | None:
        """Return the newest row below ``step``, where a row is missing."""
        lower = max((s for s in self._at if s < step), default=None)
        return None if lower is None else max(self._rows_at(lower), key=_rank)

    def _rows_at(self, step: int) -> list[Row]:
        return [self._rows[lineage] for lineage in self._at[step]]


def _rank(row: Row) -> tuple[int, int]:
    return row["epoch"], row["attempt"]


def canonical(logs: Iterable[Iterable[Row]], finals: Iterable[Row]) -> list[Row]:
    """Return the canonical commits of a run, by step.

    Args:
        logs: what each replica logged of its commits.
        finals: the final.json of each replica that has one; the newest decides between two last commits.
    """
    merger = CommitMerger()
    for log in logs:
        merger.add(log)
    final = newest_final(finals)
    return merger.finish(final["lineage"] if final else None)


def newest_final(finals: Iterable[Row]) -> Row | None:
    return max(finals, key=lambda final: (final["commit_epoch"], final["step"]), default=None)


def is_logged(row: Row) -> bool:
    return isinstance(row.get("values"), dict) and all(isinstance(row.get(key), int) for key in ("step", "epoch"))


class SharedValues:
    """The values that follow from a state alone: each replica tells them, and they count once."""

    def __init__(self) -> None:
        self._told: OrderedDict[str, Row] = OrderedDict()  # by the state's lineage

    def before(self, row: Row) -> Row | None:
        """Return what was told first of the state of ``row``; None: the row counts."""
        lineage = row.get("lineage")
        if lineage is None:  # one replica has logged it by `Job.log`
            return None
        first = self._told.setdefault(lineage, row)
        if len(self._told) > MAX_TOLD:
            self._told.popitem(last=False)
        return None if first is row else first


def logged_row(row: Row) -> Row:
    return {"t": row.get("t"), "step": row["step"], "logged": row["values"]}
