"""From the commit logs of all replicas to one line per step of the history that lasted.

A replica may log a step that is rolled back later, so a step counts only once a later one stands on it.
"""

from __future__ import annotations

from collections.abc import Iterable

from ft_hsdp.launch.rundir import Row

_SHOWN = (
    "t",
    "step",
    "epoch",
    "loss",
    "lr",
    "lr_scale",
    "contributors",
    "step_s",
    "waits",
    "ftar_bytes",
    "ftar_s",
    "attempt",
    "lineage",
    "tokens",
    "holes",
)
PATIENCE = 3  # steps after which a row that nobody wrote is no longer waited for


def metrics_row(row: Row) -> Row:
    """The line of metrics.jsonl for a canonical commit row."""
    return {key: row.get(key) for key in _SHOWN}


class Merger:
    """Takes commit rows in any order, gives canonical ones in the order of their steps.

    Rows of contributors count, first seen first. One of a replica that was behind stands in only where no
    contributor's row was written (all their leaders died between applying a step and logging it).
    """

    def __init__(self) -> None:
        self.canonical: list[Row] = []
        self._rows: dict[str, Row] = {}  # lineage -> row
        self._at: dict[int, list[str]] = {}  # step -> lineages, as seen
        self._built_on: dict[str, Row] = {}  # lineage -> the row that follows it

    def add(self, rows: Iterable[Row]) -> None:
        """Take rows from any replica; all that the logs hold at one time, before `confirmed` is asked."""
        for row in rows:
            lineage = row["lineage"]
            known = self._rows.get(lineage)
            if known is None:
                self._rows[lineage] = row
                self._at.setdefault(row["step"], []).append(lineage)
            elif known["role"] != "contribute" and row["role"] == "contribute":
                self._rows[lineage] = row
            rival = self._built_on.get(row["prev"])
            if rival is None or _rank(rival) < _rank(row):
                self._built_on[row["prev"]] = row

    @property
    def newest(self) -> Row | None:
        """The newest row of all, confirmed or not."""
        last = max(self._at, default=None)
        return None if last is None else max(self._rows_at(last), key=_rank)

    def confirmed(self) -> list[Row]:
        """The rows that became canonical since the last call: each has a successor."""
        new = []
        while (row := self._next()) is not None:
            self.canonical.append(row)
            new.append(row)
        return new

    def finish(self, final_lineage: str | None = None) -> list[Row]:
        """The rows up to `final_lineage` that were still open; without one, up to the newest row."""
        new = self.confirmed()
        end = self._rows.get(final_lineage or "") or self.newest
        emitted = self.canonical[-1]["step"] if self.canonical else -1
        path: list[Row] = []
        while end is not None and end["step"] > emitted:
            path.append(end)
            end = self._rows.get(end["prev"]) or self._below(end["step"])
        path.reverse()
        self.canonical += path
        return new + path

    def _next(self) -> Row | None:
        """The row after the last canonical one, if a successor confirms it."""
        if not self._at:
            return None
        step = self.canonical[-1]["step"] + 1 if self.canonical else min(self._at)
        overdue = max(self._at) > step + PATIENCE
        if step not in self._at:
            if not overdue:
                return None
            step = min(s for s in self._at if s > step)
            rivals = self._rows_at(step)
        else:
            rivals = self._rows_at(step)
            if self.canonical:
                rivals = [row for row in rivals if row["prev"] == self.canonical[-1]["lineage"]]
        sure = [row for row in rivals if row["lineage"] in self._built_on]
        if not sure and overdue and step + 1 not in self._at:
            return max(rivals, key=_rank, default=None)  # its successor was logged by nobody
        return max(sure, key=lambda row: _rank(self._built_on[row["lineage"]]), default=None)

    def _below(self, step: int) -> Row | None:
        """Where a row is missing: the newest one below `step`."""
        lower = max((s for s in self._at if s < step), default=None)
        return None if lower is None else max(self._rows_at(lower), key=_rank)

    def _rows_at(self, step: int) -> list[Row]:
        return [self._rows[lineage] for lineage in self._at[step]]


def _rank(row: Row) -> tuple[int, int]:
    """Which of two rows for one step is later: by (epoch, attempt)."""
    return row["epoch"], row["attempt"]
