"""The overview: all rows of a job, folded one at a time into what its page shows. Pure.

Memory does not grow with the length of the job.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from ft_hsdp.analysis.failures import MAX_FAILURES, Failure, Failures
from ft_hsdp.analysis.goodput import Goodput
from ft_hsdp.analysis.job_model import Outcome
from ft_hsdp.analysis.prediction import of_run, settings
from ft_hsdp.event_table import fault, is_over
from lighthouse.overview.replicas import Lane, Lanes
from lighthouse.overview.series import LoggedCurves, Series

_GONE = frozenset({"ReplicaExited", "ExitReported"})


MAX_OUTAGES = 256
SHOWN_EPOCHS = 1000  # newest epochs in one answer
SHOWN_FAILURES = 200  # newest failures in one answer
SPEED = 20  # commits over which the speed is measured
PREDICT = 100  # commits after which a prediction is made again

Kind = Literal["event", "commit", "logged"]
Row = dict[str, Any]
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Protected:
    word: Literal["", "protected", "unprotected"]  # "": no replica that is left has said it
    why: str
    copies: int | None  # hosts that each shard is on, at least; None: not known
    apart: str  # host, rack or zone: what those copies do not share


class Protection:
    """What replicas have said of the copies of the state. One that says it is not protected is believed.

    That the state is protected holds while a replica that contributes is left: those that are left say so if
    they lack copies. Without one nobody knows what the hosts still hold.
    """

    def __init__(self) -> None:
        self._good: Protected | None = None  # the newest that was said
        self._bad: dict[int, Protected] = {}  # by replica, until it says otherwise or is gone
        self._contributors: Collection[int] = ()  # of the newest commit
        self._left: set[int] = set()  # of these and of those that have said something, who is not gone
        self._gone: dict[int, float] = {}  # when each replica was gone last, in Unix seconds

    def event(self, name: str, row: Mapping[str, Any]) -> None:
        """Take an event of a replica; it may come late."""
        replica, why, apart = int(row["replica"]), str(row.get("reason", "")), str(row.get("apart", "host"))
        if name in _GONE:
            self._gone[replica] = max(row["t"], self._gone.get(replica, row["t"]))
            self._bad.pop(replica, None)
            self._left.discard(replica)
            self._contributors = ()
            if not self._left:
                self._good = None
        elif name in ("Protected", "Unprotected") and not self._before_gone(replica, row["t"]):
            self._left.add(replica)
            if name == "Unprotected":
                self._bad[replica] = Protected("unprotected", why, None, apart)
                return
            copies = row.get("copies")
            self._bad.pop(replica, None)
            self._good = Protected("protected", why, copies if isinstance(copies, int) else None, apart)

    def commit(self, t: float, contributors: Collection[int]) -> None:
        if contributors != self._contributors:
            self._contributors = contributors
            self._left = {replica for replica in contributors if not self._before_gone(replica, t)}

    def newest(self) -> Protected:
        if self._bad:
            return self._bad[min(self._bad)]
        return self._good or Protected("", "", None, "host")

    def _before_gone(self, replica: int, t: float) -> bool:
        return t <= self._gone.get(replica, 0.0)


class JournalEntry(NamedTuple):
    """A row and its number.

    An event has "t" (Unix seconds) and "event", a commit has "t" and "step", logged values have "t", "step",
    "epoch" and "values".
    """

    seq: int
    kind: Kind
    row: Row


@dataclass(frozen=True, slots=True)
class JobInfo:
    name: str
    slots: int  # ids of replicas are below it
    ranks: int  # of each replica
    steps: int  # to train
    live: bool = True  # False: a finished run is shown
    replicas: int | None = None  # with which the job begins; None: all slots
    ranks_per_unit: int = 1  # ranks that train one unit together
    config: Mapping[str, object] = field(default_factory=dict, hash=False)  # what the page shows, by dotted key

    @property
    def data_ranks(self) -> int:
        return self.ranks // self.ranks_per_unit


class Overview:
    """All that the page shows of a job, folded in amortized constant time for each row."""

    def __init__(self, about: JobInfo) -> None:
        self.about = about
        self.seq = 0
        self.goodput = Goodput()
        self.series = Series()
        self.logged = LoggedCurves()
        self._predicted: tuple[object, float | None] = None, None
        self._head: Mapping[str, Any] | None = None
        self._recent: deque[tuple[float, float]] = deque(maxlen=SPEED)  # t and tokens of the newest commits
        self.lanes = Lanes(about.slots, about.ranks, about.slots if about.replicas is None else about.replicas)
        self.failures = Failures(about.slots, MAX_FAILURES if about.live else None)
        self.protection = Protection()
        self.started: float | None = None
        self.newest = 0.0  # t of the newest row
        self.ended: float | None = None
        self.finished = False
        self.halted = ""
        self.model: str | None = None  # class of the model, as the newest replica that is warm says
        self.parameters: int | None = None  # of the model
        self.term = self.epoch = 0
        self.since: float | None = None
        self.outages: list[list[float]] = []  # of the lighthouse: from, to
        self._out: float | None = None  # since when it is down
        self._ups: list[float] = []  # when it started, newest last

    def add(self, entry: JournalEntry) -> None:
        """Take a row that `lighthouse.journal.row_checks` has accepted, or one of the lighthouse's own."""
        self.seq, kind, row = entry
        if kind == "commit":
            self._commit(row)
        elif kind == "logged":
            self.logged.add(row)
        else:
            self._event(row)

    def show(self, now: float, start: float | None, end: float | None, points: int, live: bool = True) -> Json:
        """Return the answer to GET /v1/overview; the journal adds beats and times of single replicas.

        Args:
            start: from here on lanes and curves are shown; None: from the first row.
            end: up to here; None: up to now.
            points: of a curve, at most.
            live: rows go on to come; an overview of the past depends on its rows alone.
        """
        first = self.started if self.started is not None else now
        start = first if start is None else start
        end = max(start, now if end is None else min(end, now))
        return {
            "now": now,
            "seq": self.seq,
            "job": self._job(),
            "run": {
                "model": self.model,
                "parameters": self.parameters,
                "config": dict(self.about.config),
            },
            "lighthouse": {
                "term": self.term,
                "epoch": self.epoch,
                "since": self.since,
                "outages": [out for out in self.outages if out[1] >= start and out[0] <= end],
            },
            "head": self.head(),
            "effective": self.effective(live),
            "replicas": states(self.lanes.shown()),
            "lanes": self.segments(start, end, (end - start) / (2 * points)),
            "epochs": self.epochs(start, end),
            "failures": self.told(start, end, self.goodput.steps.median),
            "series": self.series.between(start, end, points),
            "logged": self.logged.between(start, end, points),
        }

    def effective(self, live: bool = True) -> Json:
        """Return "effective" of the answer: measured, and what a model of the job makes of the same failures.

        While it lives that is None once it has had more than `MAX_FAILURES`.

        Args:
            live: a prediction may be up to ``PREDICT`` commits old.
        """
        found = self.goodput.effective(bool(self.failures.losses()))
        key = (len(self.failures.all), self.goodput.commits // PREDICT) if live else self.seq
        if self.failures.cut:
            return found | {"predicted": None}
        if self.goodput.commits and self._predicted[0] != key:
            outcome = self.predict(settings(self.goodput, self.failures))
            self._predicted = key, min(1.0, outcome.useful_s / max(found["wall_s"], 1e-9))
        return found | {"predicted": self._predicted[1]}

    def predict(self, row: Json) -> Outcome:
        """Return what the model makes of the run, with the phases in a row of settings."""
        return of_run(self.goodput, self.failures, self.settings, row)

    @property
    def settings(self) -> Json:
        """Return the settings of a model that the configuration gives."""
        about = self.about
        spares = int(about.config.get("spares") or 0) // about.ranks  # type: ignore[call-overload]
        every = about.config.get("checkpoint.every") or about.steps + 1
        return {"replicas": about.replicas or about.slots, "spares": spares, "disk": {"every": every}}

    def _event(self, row: Mapping[str, Any]) -> None:
        name, t = row["event"], row["t"]
        self.goodput.event(row)
        if self.started is None or t < self.started:
            self.started = t
        if name in _LIGHTHOUSE and not is_over(row):
            self._lighthouse(name, t, row)
        elif name == "EpochGranted":
            self.epoch = max(self.epoch, int(row.get("epoch") or 0))
            self.term = max(self.term, int(row.get("term") or 0))
            if self.halted and self.since is not None and self.since > (self.ended or t):
                self.halted, self.ended = "", None  # a lighthouse that started since has decided otherwise
        elif name == "JobFinished":
            self.finished, self.ended = True, t
        elif name == "JobHalted":
            self.halted, self.ended = str(row.get("reason", "")), t
        elif name == "ReplicaWarmed":
            model, parameters = row.get("model"), row.get("parameters")
            if isinstance(model, str) and isinstance(parameters, int):
                self.model, self.parameters = model, parameters
        elif name == "OperatorOrdered" and row.get("order") == "scale":
            self.lanes.scale(int(row.get("replicas") or 0), t, str(row.get("reason", "")))
        if name == "EpochGranted" or row.get("replica") in range(self.about.slots):
            self.lanes.event(name, row)
            if name != "EpochGranted":
                self.protection.event(name, row)
            self.failures.event(self.seq, name, row)
        self.newest = max(self.newest, t)

    def _commit(self, row: Mapping[str, Any]) -> None:
        t, loss, ftar_s, scale, units = row["t"], row["loss"], row["ftar_s"], row["lr_scale"], row.get("units")
        contributors = row["contributors"]
        self.newest = max(self.newest, t)
        self.lanes.commit(t, row["step"], contributors)
        self.protection.commit(t, contributors)
        self.failures.commit(t, row["epoch"], contributors)
        useful, gap = self.goodput.commit(row)
        self.series.add(
            (
                t,
                row["step"],
                math.nan if loss is None else loss,
                row["step_s"],
                (row["ftar_bytes"] or 0) / ftar_s / 1e9 if ftar_s else 0.0,
                len(contributors),
                1.0 if scale is None else scale,
                math.nan if units is None else units,
                useful,
                gap,
            )
        )
        self._recent.append((t, row["tokens"] or 0))
        if self._head is None or (row["epoch"], row["step"]) >= (self._head["epoch"], self._head["step"]):
            self._head = row

    def segments(self, start: float, end: float, width: float) -> list[Json]:
        """Return the lanes between two times; states of less than ``width`` seconds are joined (`Lane.cut`)."""
        return [
            {"replica": lane.replica, "segments": lane.cut(start, end, width), "widths": lane.widths}
            for lane in self.lanes.shown()
        ]

    def epochs(self, start: float, end: float) -> list[Json]:
        found = [e for e in self.failures.epochs.values() if start <= e.t <= end]
        return [{key: getattr(e, key) for key in _OF_EPOCH} for e in found[-SHOWN_EPOCHS:]]

    def told(self, start: float, end: float, typical: float) -> list[Json]:
        """Return the failures between two times; ``typical``: a fault-free step, in seconds."""
        found = [f for f in self.failures.all if f.evidence is not None and start <= f.t <= end]
        return [self._failure(f, typical) for f in sorted(found, key=lambda f: f.t)[-SHOWN_FAILURES:]]

    def _failure(self, failure: Failure, typical: float) -> Json:
        told = self.failures.account(failure, typical)
        shown = ("replica", "rank", "kind", "t", "detect_s", "stall_s", "rejoin_s")
        return {
            "seq": failure.seq,
            **{key: told[key] for key in shown},
            "said": fault(told["kind"]),
            "cause": failure.cause,
            "phases": [{"name": name, "t0": t0, "t1": t1} for name, t0, t1 in self.failures.phases(failure)],
            "done": told["rejoin_s"] is not None or failure.hopeless or self.ended is not None,
        }

    def _lighthouse(self, name: str, t: float, row: Mapping[str, Any]) -> None:
        """Record when the lighthouse was down: from its exit, else from the last row before its next start."""
        if name == "LighthouseExited":
            up = next((u for u in self._ups if u >= t), None)
            if up is None:
                self._out = t
            elif not any(t0 <= t <= t1 for t0, t1 in self.outages):
                self.outages.append([t, up])
            else:
                gap = next(o for o in self.outages if o[0] <= t <= o[1])
                gap[0] = t
        elif name == "LighthouseStarted":
            if self._ups:
                self.outages.append([min(t, self.newest if self._out is None else self._out), t])
            self._out = None
            self._ups = [*self._ups[-7:], t]
            self.since = t
            self.term = max(self.term, int(row.get("term") or 0))
            self.epoch = max(self.epoch, int(row.get("epoch") or 0))
            if "target" in row:  # the rows of orders may be gone, and an earlier version does not tell
                self.lanes.scale(row["target"], t, "the lighthouse's store says so", row["drained"])
        self.outages = self.outages[-MAX_OUTAGES:]

    def _job(self) -> Json:
        about = self.about
        ended = self.ended if about.live or self.ended is not None else self.newest or None
        return {
            "name": about.name,
            "started": self.started,
            "ended": ended,
            "total": self.lanes.target,
            "slots": about.slots,
            "ranks": about.ranks,
            "steps": about.steps,
            "finished": self.finished,
            "halted": self.halted,
            "protection": asdict(self.protection.newest()),
            "live": about.live,
        }

    def head(self) -> Json:
        """Return the newest commit, and how fast the last ones came."""
        row = self._head or {}
        times = [t for t, _ in self._recent]
        span = max(times) - min(times) if len(times) > 1 else 0.0
        tokens = sum(tokens for _, tokens in list(self._recent)[1:])
        return {
            "step": row.get("step", 0),
            "epoch": row.get("epoch", 0),
            **{key: row.get(key) for key in ("loss", "lr", "lr_scale", "step_s", "units", "units_wanted")},
            "steps_per_s": (len(times) - 1) / span if span > 0 else 0.0,
            "tokens_per_s": tokens / span if span > 0 else 0.0,
            "contributors": list(row.get("contributors", ())),
            "healthy": len(row.get("contributors", ())),
        }


_LIGHTHOUSE = frozenset({"LighthouseStarted", "LighthouseExited"})


_OF_EPOCH = ("t", "epoch", "members", "reason", "seq")
_OF_LANE = (
    "replica",
    "state",
    "since",
    "step",
    "incarnation",
    "incarnations",
    "reason",
    "straggler",
    "drained",
    "hosts",
    "width",
    "restored",
    "copies",
    "copy_hosts",
)


def states(lanes: Collection[Lane]) -> list[Json]:
    """Return "replicas" of the overview, as far as rows tell."""
    return [{key: getattr(lane, key) for key in _OF_LANE} for lane in lanes]
