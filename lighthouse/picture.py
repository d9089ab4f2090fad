"""The picture: all rows of a job folded into what its page shows. Pure; memory does not grow with the job."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from lighthouse.archive import Entry
from lighthouse.goodput import Goodput
from lighthouse.intake import About
from lighthouse.series import Series
from lighthouse.timeline import Timeline, states

SPEED = 20  # commits over which the speed is measured

Json = dict[str, Any]


class Picture:
    """Folds rows, one at a time, in amortized constant time."""

    def __init__(self, about: About) -> None:
        self.about = about
        self.seq = 0
        self.timeline = Timeline(about.slots, about.ranks, about.replicas)
        self.goodput = Goodput()
        self.series = Series()
        self._head: Mapping[str, Any] | None = None
        self._recent: deque[tuple[float, float]] = deque(maxlen=SPEED)  # t and tokens

    def add(self, entry: Entry) -> None:
        """Take a row that `intake` has let in, or one of the lighthouse's own."""
        self.seq, kind, row = entry
        if kind == "commit":
            self._commit(row)
        else:
            self.timeline.event(self.seq, row)
            self.goodput.event(row)

    def show(self, now: float, start: float | None, end: float | None, points: int) -> Json:
        """GET /v1/overview, but for what only the running lighthouse knows: beats, and times of single replicas.

        now, start, end: Unix seconds; points: of a curve, at most.
        """
        timeline = self.timeline
        first = timeline.started if timeline.started is not None else now
        start = first if start is None else start
        end = max(start, now if end is None else min(end, now))
        return {
            "now": now,
            "seq": self.seq,
            "job": self._job(),
            "lighthouse": {
                "term": timeline.term,
                "epoch": timeline.epoch,
                "since": timeline.since,
                "outages": [out for out in timeline.outages if out[1] >= start and out[0] <= end],
            },
            "head": self._newest(),
            "effective": self.goodput.effective(),
            "replicas": states(timeline.lanes.shown()),
            "lanes": timeline.segments(start, end, (end - start) / (2 * points)),
            "epochs": timeline.epochs(start, end),
            "failures": timeline.told(start, end, self.goodput.median),
            "series": self.series.between(start, end, points),
        }

    def _commit(self, row: Mapping[str, Any]) -> None:
        t, loss, ftar_s, scale = row["t"], row["loss"], row["ftar_s"], row["lr_scale"]
        self.timeline.commit(row)
        useful, gap = self.goodput.commit(row)
        self.series.add(
            (
                t,
                row["step"],
                math.nan if loss is None else loss,
                row["step_s"],
                (row["ftar_bytes"] or 0) / ftar_s / 1e9 if ftar_s else 0.0,
                len(row["contributors"]),
                1.0 if scale is None else scale,
                useful,
                gap,
            )
        )
        self._recent.append((t, row["tokens"] or 0))
        if self._head is None or (row["epoch"], row["step"]) >= (self._head["epoch"], self._head["step"]):
            self._head = row

    def _job(self) -> Json:
        timeline, about = self.timeline, self.about
        ended = timeline.ended if about.live or timeline.ended is not None else timeline.newest or None
        return {
            "name": about.name,
            "started": timeline.started,
            "ended": ended,
            "total": timeline.lanes.target,
            "slots": about.slots,
            "ranks": about.ranks,
            "steps": about.steps,
            "finished": timeline.finished,
            "halted": timeline.halted,
            "live": about.live,
        }

    def _newest(self) -> Json:
        row = self._head or {}
        times = [t for t, _ in self._recent]
        span = max(times) - min(times) if len(times) > 1 else 0.0
        tokens = sum(tokens for _, tokens in list(self._recent)[1:])
        return {
            "step": row.get("step", 0),
            "epoch": row.get("epoch", 0),
            **{key: row.get(key) for key in ("loss", "lr", "lr_scale", "step_s")},
            "steps_per_s": (len(times) - 1) / span if span > 0 else 0.0,
            "tokens_per_s": tokens / span if span > 0 else 0.0,
            "contributors": list(row.get("contributors", ())),
            "healthy": len(row.get("contributors", ())),
        }
