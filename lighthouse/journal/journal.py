"""The journal of a job: takes every row, numbers it, stores it, folds it into the overview, and passes it on.

The lighthouse decides nothing from it, but for whom it finds to keep the job waiting. A disk that is full or slow
costs rows, never a decision.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Protocol, Unpack

from ft_hsdp.analysis.commits import SharedValues
from ft_hsdp.analysis.culprits import find_slow
from ft_hsdp.analysis.diagnosis import Dump, heard
from ft_hsdp.core.state_id import digest
from ft_hsdp.errors import ProtocolViolation
from ft_hsdp.event_table import grave, tell
from ft_hsdp.jsonl import DiskThread
from ft_hsdp.protocol import RankBeat, Telemetry
from lighthouse.journal import row_checks
from lighthouse.journal.database import MAX_READ, DatabaseFailed, EventQuery, SqliteDatabase
from lighthouse.journal.subscribers import Subscribers
from lighthouse.overview.liveness import Change, Stragglers, StragglerVerdict, Vitals
from lighthouse.overview.machines import CLOCK, Clocks, OddClock, split
from lighthouse.overview.overview import JobInfo, JournalEntry, Json, Overview, Row
from lighthouse.overview.replicas import RUN
from lighthouse.overview.suspects import QUIET_S, Suspects, SuspectVerdict, has_stopped

FLUSH_S = 0.25  # longest time until a worker's row is stored
WRITE_S = 0.5  # longest wait for a disk: no decision depends on a row
MAX_PENDING = 4096  # rows that wait to be stored; more are stored at once
SLICE = 200  # rows that are folded before other tasks of the event loop run
KNOWN = 4096  # newest commits and events that are recognized when they are reported again
PASTS = 4  # overviews of earlier times that are kept
MAX_SAID = 300  # characters of the sentence on an event
TRACED_S = 25.0  # until every rank has sent a trace that was made since; it sends one about every 10 s
FAILED_S = 60.0  # for which a diagnosis names a failure that is not over
COMPLAIN_S = 10.0  # between two log lines about lost rows
LOOK_S = 1.0  # between two looks of a watcher, or for a slow rank

_log = logging.getLogger(__name__)


class Sink(Protocol):
    """Another receiver of rows. If it raises, the error is logged and this sink misses the row."""

    def take(self, kind: str, seq: int, row: Mapping[str, Any]) -> None:
        """Take an "event", "logged" values, or a "commit": once per step, as the first replica reported it."""

    def close(self) -> None:
        """Release everything; no more rows come."""


class Watcher(Sink, Protocol):
    """A sink that also looks at the overview, about once a second."""

    def look(self, overview: Overview, paused: bool) -> None:
        """Look at the rows folded so far; ``paused``: a training loop says that it does not train now."""


class JobJournal:
    """All rows of a job, and the overview folded from them.

    It belongs to one event loop; other threads may call only `events`.
    """

    def __init__(
        self,
        database: SqliteDatabase,
        about: JobInfo,
        sinks: Sequence[Sink] = (),
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        *,
        gap: int = 0,
        watcher: Watcher | None = None,
    ) -> None:
        """Open the journal in ``database``.

        Args:
            sinks: more receivers of rows.
            gap: numbers to leave out, because another lighthouse may have given them to rows that are lost.
            watcher: one more sink, which looks from `begin` on; None: there is none.
        """
        self.about = about
        self._database = database
        self._sinks = (*sinks, *(() if watcher is None else (watcher,)))
        self._watcher = watcher
        self._clock = clock
        self._monotonic = monotonic
        self._pending: list[JournalEntry] = []
        self._disk = DiskThread(WRITE_S)
        self.subscribers = Subscribers(database)
        self._last = database.last + gap
        self._overview = Overview(about)
        self._caught_up = database.last == 0
        self._known = OrderedDict((_name(e.row), None) for e in database.commits(MAX_READ))
        self._shared = SharedValues()
        # Digests of events, and of logged values, with who told them.
        self._heard, self._logged = OrderedDict[str, None](), OrderedDict[str, None]()
        self._stragglers = Stragglers(about.slots)
        self._unnamed: dict[int, tuple[StragglerVerdict, float]] = {}  # by replica; and until when they wait
        self._named = -math.inf  # when they were looked at last
        self._vitals = Vitals()
        self._clocks = Clocks()
        self._suspects = Suspects()
        # On the monotonic clock: when the newest step was told, and until when none had come for long.
        self._committed: float | None = None
        self._uneven: float | None = None
        self._paused = -math.inf  # when a training loop did something else last
        self._dropped: dict[str, int] = {}
        self._past_overviews: OrderedDict[float, Overview] = OrderedDict()
        self._past = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._kept: asyncio.Future[None] | None = None  # done once the pending rows are stored
        self._tasks: list[asyncio.Task[None]] = []
        self._lost = 0
        self._complained = -math.inf
        self._closed = False

    def begin(self) -> None:
        """Start to fold the rows that are stored already, and to look, as tasks of the running event loop."""
        loop = asyncio.get_running_loop()
        self._tasks.append(loop.create_task(self._warm()))
        if self._watcher is not None:
            self._tasks.append(loop.create_task(self._look(self._watcher)))

    # Rows come in.

    def note(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Store the lighthouse's own events; blocks until they are on disk, unless the disk fails."""
        if not self._closed:
            plain = [row_checks.plain(row) for row in rows]
            for row in plain:
                self._before(row)
            self._number("event", plain)
            self._flush(durable=True)

    def take(self, telemetry: Telemetry) -> None:
        """Take a worker's telemetry, all of it or nothing; it is in the database when `kept` returns.

        Raises:
            ProtocolViolation: a row may not be stored (`row_checks`).
        """
        now = self._clock()
        who = row_checks.sender(telemetry.source, self.about)
        events = [row_checks.event(raw, who, self.about, now) for raw in telemetry.events]
        commits = [row_checks.commit(raw, self.about, now) for raw in telemetry.commits]
        logged = [row_checks.logged(raw, self.about, now) for raw in telemetry.logged]
        beats = row_checks.beats(telemetry.ranks, who, self.about)
        if (commits or logged) and who.replica is None:
            raise ProtocolViolation("commits and logged values come from replicas")
        if self._closed:
            return
        # A sender that got no answer in time sends its rows again.
        events = self._new(telemetry.source, telemetry.events, events, self._heard)
        logged = self._new(telemetry.source, telemetry.logged, logged, self._logged)
        for row in events:
            self._before(row)
        if who.replica is not None:
            self._vitals.hear(who.replica, beats, self._monotonic())
            self._tell("ClockOff", self._clocks.hear(beats, now, self._monotonic()))
        self._number("event", events + self._missed(telemetry, now))
        self._number(
            "commit",
            [row | {"incarnation": who.incarnation} for row in commits if self._first(_name(row), self._known)],
        )
        of_whom = {"incarnation": who.incarnation}
        self._number("logged", [row | of_whom for row in logged if self._counts(row, who.replica)])
        if commits:
            self._note_commit(self._monotonic())
        for row, raw in zip(commits, telemetry.commits, strict=True):
            assert who.replica is not None
            trained = row_checks.micro_batches_of(raw, who.replica, self.about.data_ranks)
            self._note_stragglers(self._stragglers.add(who.replica, row, trained))
        self._watch()
        self._arm()

    async def kept(self) -> None:
        """Wait, at most about `FLUSH_S`, until all taken rows are stored; a worker gets its answer only then."""
        if self._pending:
            if self._kept is None:
                self._kept = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._kept)

    # Rows come out.

    async def ready(self, at: float | None = None) -> None:
        """Fold the rows that `overview` needs, and let other tasks of the event loop run meanwhile."""
        while not self._caught_up:
            self._catch_up(SLICE)
            await asyncio.sleep(0)
        if at is not None and at < self._overview.newest:
            async with self._past:
                for _ in self._folding(at):
                    await asyncio.sleep(0)

    def overview(
        self,
        *,
        at: float | None = None,
        start: float | None = None,
        end: float | None = None,
        points: int = 600,
    ) -> Json:
        """Return the answer to GET /v1/overview. Blocks while it folds what `ready` has not folded.

        Args:
            at: a time of the past to show; None: now.
            start: from here on curves and lanes are shown; None: from the start of the job.
            end: up to here; None: up to now.
            points: of a curve, at most.

        Raises:
            DatabaseFailed: rows cannot be read.
        """
        while not self._caught_up:
            self._catch_up(MAX_READ)
        newest = self._overview.newest
        if at is not None and at < newest:
            for _ in self._folding(at):
                pass
            return self._with_ranks(self._past_overviews[at].show(at, start, end, points, live=False), live=False)
        self._watch()
        now = self._clock() if self.about.live else newest
        return self._with_ranks(self._overview.show(now, start, end, points), live=True)

    def events(self, **asked: Unpack[EventQuery]) -> Json:
        """Return the answer to GET /v1/events: a page of the log in order, its first and last number (0: none).

        Any thread may call it; it blocks on the disk.

        Raises:
            DatabaseFailed: rows cannot be read.
        """
        found = self._database.events(**asked)
        rows = [_told(entry) for entry in found]
        return {"events": rows, "first": rows[0]["seq"] if rows else 0, "last": rows[-1]["seq"] if rows else 0}

    def beat(self, replica: int) -> tuple[float, tuple[RankBeat, ...]]:
        """Return the age in seconds of a replica's oldest beat (inf: none), and the newest beat of each rank."""
        found = self._vitals.newest(replica, self._monotonic())
        return max((age for _, age in found), default=math.inf), tuple(beat for beat, _ in found)

    def pauses(self) -> dict[int, str]:
        """Return what the training loops of replicas do instead of training, by replica."""
        return self._vitals.pauses(self._monotonic())

    def diagnosis(self) -> Dump:
        """Return all from which one finds who keeps the job waiting."""
        self._watch()
        now, typical = self._monotonic(), self._overview.goodput.steps.typical
        quiet_s = None if self._committed is None else now - self._committed
        newest = self._overview.newest
        failures = self._overview.told(newest - FAILED_S, newest, self._overview.goodput.steps.median)
        ranks = tuple(self._vitals.known(now))
        still_s = 0.0 if quiet_s is None else min(quiet_s, now - self._paused)
        stopped = has_stopped(ranks, still_s, typical) and self._overview.ended is None
        pauses = {str(replica): what for replica, what in self._vitals.pauses(now).items()}
        told = tuple(failure for failure in failures if not failure["done"])
        even_s = None if self._uneven is None else now - self._uneven
        return Dump(self.about.name, self._clock(), stopped, quiet_s, typical, even_s, ranks, pauses, told)

    def protection(self) -> Json:
        """Return whether a lost host can take a shard of the newest state with it, by the rows folded so far."""
        return asdict(self._overview.protection.newest())

    def close(self) -> None:
        """Store pending rows, end subscribers and sinks; the database stays open. Later rows are dropped."""
        if self._closed:
            return
        self._closed = True
        self._flush()
        self._disk.close()
        for task in self._tasks:
            task.cancel()
        self.subscribers.close()
        for sink in self._sinks:
            try:
                sink.close()
            except Exception:
                _log.exception("a sink did not close")

    # In between.

    async def _warm(self) -> None:
        try:
            await self.ready()
        except DatabaseFailed as error:  # a request for the overview fails with the same error
            _log.error("%s", error)

    async def _look(self, watcher: Watcher) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if self._caught_up:
                try:
                    watcher.look(self._overview, bool(self.pauses()))
                except Exception:
                    _log.exception("a watcher did not look")

    def _number(self, kind: Any, rows: Iterable[Row]) -> None:
        self._last = max(self._last, self._database.last)
        for row in rows:
            self._last += 1
            self._pending.append(JournalEntry(self._last, kind, row))

    def _arm(self) -> None:
        full = len(self._pending) >= MAX_PENDING and not self._disk.busy
        if full or (self._pending and self._timer is None and not self._flush_later()):
            self._flush()

    def _flush_later(self) -> bool:
        """Schedule a flush; return whether that is possible: without an event loop it is not."""
        try:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self._flush)
        except RuntimeError:
            return False
        return True

    def _flush(self, durable: bool = False) -> None:
        """Store the pending rows, or later if the disk hangs; pass them to subscribers, overview and sinks."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waits = self._disk.busy and not self._closed and len(self._pending) < 2 * MAX_PENDING
        if waits and self._flush_later():
            return
        entries, self._pending = self._pending, []
        if not entries:
            return
        try:
            if self._disk.busy:
                raise DatabaseFailed("the disk does not answer")
            self._disk.run(partial(self._database.append, entries, durable=durable))
        except TimeoutError:
            pass  # they are stored when the disk answers
        except DatabaseFailed as error:
            self._complain(len(entries), error)
        if self._kept is not None:
            self._kept.set_result(None)
            self._kept = None
        self.subscribers.publish(entries)
        for entry in entries:
            if self._caught_up:
                self._overview.add(entry)
            self._sink(entry)

    def _complain(self, rows: int, error: DatabaseFailed) -> None:
        self._lost += rows
        if self._monotonic() - self._complained > COMPLAIN_S:
            self._complained = self._monotonic()
            _log.error("%d rows are not stored: %s", self._lost, error)
            self._lost = 0

    def _sink(self, entry: JournalEntry) -> None:
        for sink in self._sinks:
            try:
                sink.take(entry.kind, entry.seq, entry.row)
            except Exception:
                _log.exception("a sink did not take row %d", entry.seq)

    def _catch_up(self, rows: int) -> None:
        """Fold the next stored rows, at most ``rows``; the overview has caught up once fewer are left."""
        found = self._database.read(self._overview.seq, rows)
        for entry in found:
            self._overview.add(entry)
        self._caught_up = len(found) < rows

    def _folding(self, at: float) -> Iterable[None]:
        """Build the overview of an earlier time, in slices, from the nearest earlier one that is kept."""
        if at in self._past_overviews:
            self._past_overviews.move_to_end(at)
            return
        begun = max((t for t in self._past_overviews if t <= at), default=None)
        overview = Overview(self.about) if begun is None else copy.deepcopy(self._past_overviews[begun])
        seq = 0
        while True:
            found = self._database.read(seq, SLICE, since=begun, until=at)
            for entry in found:
                overview.add(entry)
            if len(found) < SLICE:
                break
            seq = found[-1].seq
            yield
        self._past_overviews[at] = overview
        while len(self._past_overviews) > PASTS:
            self._past_overviews.popitem(last=False)

    def _counts(self, row: Row, replica: int | None) -> bool:
        """Return whether logged values count: those that were told of their state before are only compared."""
        first = self._shared.before(row)
        if first is not None and first["values"] != row["values"]:
            reason = f"of one state replicas tell {first['values']} and {row['values']}"
            facts = {"replica": replica, "step": row["step"], "tensor": ", ".join(row["values"]), "reason": reason}
            self._number("event", [{"t": row["t"], "event": "JobDoubted", "source": "lighthouse", **facts}])
        return first is None

    def _new(
        self, source: str, raw: Sequence[object], rows: Sequence[Row], known: OrderedDict[str, None]
    ) -> list[Row]:
        names = (digest(source, repr(each)) for each in raw)
        return [row for row, name in zip(rows, names, strict=True) if self._first(name, known)]

    def _first(self, name: Hashable, known: OrderedDict[Any, None]) -> bool:
        if name in known:
            return False
        known[name] = None
        if len(known) > KNOWN:
            known.popitem(last=False)
        return True

    def _before(self, row: Row) -> None:
        if row["event"] in ("ReplicaStarted", "ReplicaBooted", "ReplicaExited") and row.get("replica") is not None:
            self._stragglers.forget(row["replica"])
            self._unnamed.pop(row["replica"], None)
            self._vitals.forget(row["replica"])

    def _missed(self, telemetry: Telemetry, now: float) -> list[Row]:
        """Return an event if the sender had to drop rows; ``telemetry.dropped`` counts them since its start."""
        source, dropped = telemetry.source, telemetry.dropped
        more = dropped - self._dropped.get(source, 0)
        if more > 0 or source in self._dropped:
            self._dropped.pop(source, None)
            self._dropped[source] = dropped
            if len(self._dropped) > 4 * self.about.slots + 4:
                del self._dropped[next(iter(self._dropped))]
        if more <= 0:
            return []
        who = row_checks.sender(source, self.about)
        reason = f"{more} rows of {source} found no place in its memory while the lighthouse was away"
        facts = {"replica": who.replica, "incarnation": who.incarnation, "rows": more}
        return [{"t": now, "event": "RowsDropped", "source": "lighthouse", "reason": reason, **facts}]

    def _note_commit(self, now: float) -> None:
        if self._committed is None or now - self._committed > QUIET_S:
            self._uneven = now
        self._committed = now

    def _slow_rank(self, replica: int) -> int | None:
        """Return the rank for which the other ones of its replica wait; None: no single one is known."""
        found = find_slow(heard(self._vitals.known(self._monotonic()))).findings
        ranks = {each.ranks[0].rank for each in found if each.kind == "slow" and each.ranks[0].replica == replica}
        return ranks.pop() if len(ranks) == 1 else None

    def _note_stragglers(self, verdicts: Iterable[StragglerVerdict]) -> None:
        """Tell that one is slow no more; who is slow waits for the trace that shows which rank it is."""
        for each in verdicts:
            if not each.over:
                self._unnamed[each.replica] = each, self._monotonic() + TRACED_S
                self._named = -math.inf
            elif self._unnamed.pop(each.replica, None) is None:
                self._tell("StragglerSeen", [each])

    def _name_stragglers(self, now: float) -> None:
        if not self._unnamed or now < self._named + LOOK_S:
            return
        self._named = now
        for replica, (verdict, until) in list(self._unnamed.items()):
            rank = self._slow_rank(replica) if self.about.ranks > 1 else 0
            if rank is not None or now > until:
                del self._unnamed[replica]
                self._tell("StragglerSeen", [verdict._replace(rank=rank, epoch=self._stragglers.epoch)])

    def _watch(self) -> None:
        self._name_stragglers(self._monotonic())
        if self._caught_up and self.about.live:
            active = [lane.replica for lane in self._overview.lanes.all if lane.state in RUN]
            now, typical = self._monotonic(), self._overview.goodput.steps.typical
            self._tell("ReplicaStalled", self._vitals.judge(active, typical, now))
            pauses = self._vitals.pauses(now)
            self._paused = now if pauses else self._paused
            if self._committed is not None and self._overview.ended is None and not pauses:
                known, quiet_s = partial(self._vitals.known, now), now - max(self._committed, self._paused)
                self._tell("CulpritFound", self._suspects.judge(known, quiet_s, typical, now))

    def _tell(self, event: str, found: Iterable[StragglerVerdict | Change | SuspectVerdict | OddClock]) -> None:
        for each in found:
            facts = each._asdict()
            self._number("event", [{"t": self._clock(), "event": event, "source": "lighthouse", **facts}])
            self._arm()

    def _with_ranks(self, overview: Json, *, live: bool) -> Json:
        now, ahead = self._monotonic(), self._clocks.ahead() if live else {}
        loads = overview["loads"] = {host: {CLOCK: seconds} for host, seconds in ahead.items()}
        for row in overview["replicas"]:
            replica = row["replica"]
            row["step_s"] = self._stragglers.step_s.get(replica) if live else None
            row["busy_s"] = self._stragglers.busy_s.get(replica) if live else None
            row["pause"] = self._vitals.pauses(now).get(replica, "") if live else ""
            row["ranks"] = ranks = []
            for b, age in self._vitals.newest(replica, now) if live else ():
                own, of_host = split(b.load)
                loads.setdefault(b.host, {}).update(of_host)
                about = {"rank": b.rank, "pid": b.pid, "host": b.host, "progress": b.progress, "age_s": age}
                ranks.append({**about, "load": own})
        return overview


def _name(commit: Mapping[str, Any]) -> tuple[int, str]:
    return commit["step"], commit["lineage"]


_HEAD = ("t", "event", "source", "replica", "rank", "incarnation", "reason")


def _told(entry: JournalEntry) -> Json:
    row = entry.row
    facts = {key: value for key, value in row.items() if key not in _HEAD}
    return {"seq": entry.seq, **{key: row.get(key) for key in _HEAD}, **worded(row), "facts": facts}


WORDED = ("said", "grave")


def worded(row: Row) -> Row:
    """Return what a reader gets beside an event: a sentence of bounded length, and whether it is a failure."""
    return {"said": tell(row, reason=False)[:MAX_SAID], "grave": grave(row)}
