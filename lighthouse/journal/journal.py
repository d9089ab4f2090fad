"""The chronicle: takes every row, numbers it, keeps it, folds it into the picture, and tells it to who follows.

Nothing is decided from it. A disk that is full or slow costs rows, never a decision.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from ft_hsdp.errors import ProtocolViolation
from ft_hsdp.protocol import RankBeat, Telemetry
from ft_hsdp.sentences import tell
from lighthouse.journal import row_checks
from lighthouse.journal.database import MAX_READ, Database, DatabaseFailed
from lighthouse.journal.subscribers import Subscribers
from lighthouse.overview.liveness import Stragglers, Vitals
from lighthouse.overview.overview import Json, Overview
from lighthouse.overview.replicas import RUN
from lighthouse.overview.rows import JobInfo, JournalEntry, Row

FLUSH_S = 0.25  # longest time until a worker's row is kept
MAX_PENDING = 4096  # rows that wait for that
SLICE = 200  # rows that are folded before the event loop has its turn
KNOWN = 4096  # commits that are recognized when another replica tells of them, too
PASTS = 4  # pictures of earlier times that are remembered
MAX_SAID = 300  # characters of the sentence on an event
COMPLAIN_S = 10.0  # between two lines about rows that were lost

_log = logging.getLogger(__name__)


class Sink(Protocol):
    """Where rows go, too. What it raises is logged, and costs it that row."""

    def event(self, seq: int, row: Mapping[str, Any]) -> None:
        """An event."""

    def commit(self, seq: int, row: Mapping[str, Any]) -> None:
        """A commit: once per step and lineage, as the first replica told it."""

    def close(self) -> None:
        """No more rows come."""


class JobJournal:
    """What a lighthouse remembers, to be used from one event loop; only `events` may be called from other threads.

    clock: Unix seconds; monotonic: seconds that never jump; gap: numbers that are left out, because another
    lighthouse may have given them to rows that are lost.
    """

    def __init__(
        self,
        archive: Database,
        about: JobInfo,
        sinks: Sequence[Sink] = (),
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        *,
        gap: int = 0,
    ) -> None:
        self.about = about
        self._archive = archive
        self._sinks = sinks
        self._clock = clock
        self._monotonic = monotonic
        self._pending: list[JournalEntry] = []
        self._followers = Subscribers(archive)
        self._last = archive.last + gap
        self._picture = Overview(about)
        self._caught_up = archive.last == 0
        self._known = OrderedDict((_name(e.row), None) for e in archive.commits(MAX_READ))
        self._stragglers = Stragglers(about.slots)
        self._vitals = Vitals()
        self._dropped: dict[str, int] = {}
        self._pasts: OrderedDict[float, Overview] = OrderedDict()
        self._past = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._kept: asyncio.Future[None] | None = None  # done once the rows that wait now are kept
        self._warming: asyncio.Task[None] | None = None
        self._lost = 0
        self._complained = -math.inf
        self._closed = False

    def begin(self) -> None:
        """Begin to fold what was there before, on the running event loop."""
        self._warming = asyncio.get_running_loop().create_task(self._warm())

    # Rows come in.

    def note(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take the lighthouse's own events; durable when this returns, if the disk takes them."""
        if not self._closed:
            self._number("event", [row_checks.plain(row) for row in rows])
            self._flush(durable=True)

    def take(self, telemetry: Telemetry) -> None:
        """Take what a worker tells, all of it or nothing; it is in the archive when `kept` returns.

        Raises ProtocolViolation.
        """
        now = self._clock()
        who = row_checks.sender(telemetry.source, self.about)
        events = [row_checks.event(raw, who, self.about, now) for raw in telemetry.events]
        commits = [row_checks.commit(raw, self.about, now) for raw in telemetry.commits]
        beats = row_checks.beats(telemetry.ranks, who, self.about)
        if commits and who.replica is None:
            raise ProtocolViolation("commits come from replicas")
        if self._closed:
            return
        for row in events:
            self._before(row)
        if who.replica is not None:
            self._vitals.hear(who.replica, beats, self._monotonic())
        self._number("event", events + self._missed(telemetry, now))
        self._number("commit", [row | {"incarnation": who.incarnation} for row in commits if self._first(row)])
        for row in commits:
            assert who.replica is not None
            verdicts = self._stragglers.add(who.replica, row)
            self._tell((v.event, {"replica": v.replica, "reason": v.reason}) for v in verdicts)
        self._watch()
        self._arm()

    async def kept(self) -> None:
        """Wait, at most about `FLUSH_S`, until what was taken is kept: a worker is told so only then."""
        if self._pending:
            if self._kept is None:
                self._kept = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._kept)

    # Rows come out.

    async def ready(self, at: float | None = None) -> None:
        """Fold what is still to be folded for `picture`, without keeping the event loop from its other work."""
        while not self._caught_up:
            self._catch_up(SLICE)
            await asyncio.sleep(0)
        if at is not None and at < self._picture.timeline.newest:
            async with self._past:
                for _ in self._folding(at):
                    await asyncio.sleep(0)

    def picture(
        self,
        *,
        at: float | None = None,
        start: float | None = None,
        end: float | None = None,
        points: int = 600,
    ) -> Json:
        """GET /v1/overview: now, or as it was at time ``at``; curves and lanes from ``start`` to ``end``.

        Times are Unix seconds. What `ready` has not folded is folded here. Raises DatabaseFailed.
        """
        while not self._caught_up:
            self._catch_up(MAX_READ)
        newest = self._picture.timeline.newest
        if at is not None and at < newest:
            for _ in self._folding(at):
                pass
            return self._with_ranks(self._pasts[at].show(at, start, end, points), live=False)
        self._watch()
        now = self._clock() if self.about.live else newest
        return self._with_ranks(self._picture.show(now, start, end, points), live=True)

    def events(
        self,
        *,
        after: int | None = None,
        before: int | None = None,
        limit: int = 200,
        replica: int | None = None,
        event: str | None = None,
        text: str | None = None,
    ) -> Json:
        """GET /v1/events: a page of the log, in order, and the numbers of its first and last row (0: it is empty).

        From any thread. Raises DatabaseFailed.
        """
        found = self._archive.events(
            after=after, before=before, limit=limit, replica=replica, event=event, text=text
        )
        rows = [_told(entry) for entry in found]
        return {"events": rows, "first": rows[0]["seq"] if rows else 0, "last": rows[-1]["seq"] if rows else 0}

    def follow(self, after: int | None = None) -> AsyncIterator[tuple[int, str, Row]]:
        """The rows above number ``after``, those in the archive first, then each as it comes; None: only those.

        Raises TooMany, DatabaseFailed.
        """
        return self._followers.follow(after)

    @property
    def crowded(self) -> bool:
        """Whether no more may follow."""
        return self._followers.full

    def beat(self, replica: int) -> tuple[float, tuple[RankBeat, ...]]:
        """The newest beat of each rank of a replica, and how old the oldest of them is, in seconds; inf: none."""
        found = self._vitals.newest(replica, self._monotonic())
        return max((age for _, age in found), default=math.inf), tuple(beat for beat, _ in found)

    def close(self) -> None:
        """Keep what waits, end the followers and the sinks; the archive stays open. More rows are not taken."""
        if self._closed:
            return
        self._flush()
        self._closed = True
        if self._warming is not None:
            self._warming.cancel()
        self._followers.close()
        for sink in self._sinks:
            try:
                sink.close()
            except Exception:
                _log.exception("a sink did not close")

    # In between.

    async def _warm(self) -> None:
        try:
            await self.ready()
        except DatabaseFailed as error:  # whoever asks for the picture hears of it, too
            _log.error("%s", error)

    def _number(self, kind: Any, rows: Iterable[Row]) -> None:
        """Give rows their numbers; they are kept with the next flush."""
        self._last = max(self._last, self._archive.last)
        for row in rows:
            self._last += 1
            self._pending.append(JournalEntry(self._last, kind, row))

    def _arm(self) -> None:
        """Have the rows that wait kept in time."""
        if len(self._pending) >= MAX_PENDING:
            self._flush()
        elif self._pending and self._timer is None:
            try:
                self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self._flush)
            except RuntimeError:  # no event loop: nobody to wait for
                self._flush()

    def _flush(self, durable: bool = False) -> None:
        """Keep the rows that wait, then let them be known."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        entries, self._pending = self._pending, []
        if not entries:
            return
        try:
            self._archive.append(entries, durable=durable)
        except DatabaseFailed as error:
            self._complain(len(entries), error)
        if self._kept is not None:
            self._kept.set_result(None)
            self._kept = None
        self._followers.publish(entries)
        for entry in entries:
            if self._caught_up:
                self._picture.add(entry)
            self._sink(entry)

    def _complain(self, rows: int, error: DatabaseFailed) -> None:
        self._lost += rows
        if self._monotonic() - self._complained > COMPLAIN_S:
            self._complained = self._monotonic()
            _log.error("%d rows are not kept: %s", self._lost, error)
            self._lost = 0

    def _sink(self, entry: JournalEntry) -> None:
        for sink in self._sinks:
            try:
                (sink.commit if entry.kind == "commit" else sink.event)(entry.seq, entry.row)
            except Exception:
                _log.exception("a sink did not take row %d", entry.seq)

    def _catch_up(self, rows: int) -> None:
        """Fold the next rows that were there before this lighthouse, and those that came since."""
        found = self._archive.read(self._picture.seq, rows)
        for entry in found:
            self._picture.add(entry)
        self._caught_up = len(found) < rows

    def _folding(self, at: float) -> Iterable[None]:
        """Make the picture of an earlier time, in slices; the nearest one before it that is known saves work."""
        if at in self._pasts:
            self._pasts.move_to_end(at)
            return
        begun = max((t for t in self._pasts if t <= at), default=None)
        picture = Overview(self.about) if begun is None else copy.deepcopy(self._pasts[begun])
        seq = 0
        while True:
            found = self._archive.read(seq, SLICE, since=begun, until=at)
            for entry in found:
                picture.add(entry)
            if len(found) < SLICE:
                break
            seq = found[-1].seq
            yield
        self._pasts[at] = picture
        while len(self._pasts) > PASTS:
            self._pasts.popitem(last=False)

    def _first(self, row: Row) -> bool:
        """Whether no other replica has told of this commit yet."""
        name = _name(row)
        if name in self._known:
            return False
        self._known[name] = None
        if len(self._known) > KNOWN:
            self._known.popitem(last=False)
        return True

    def _before(self, row: Row) -> None:
        """What an event means for those who watch replicas live."""
        if row["event"] in ("ReplicaStarted", "ReplicaExited") and row.get("replica") is not None:
            self._stragglers.forget(row["replica"])
            self._vitals.forget(row["replica"])

    def _missed(self, telemetry: Telemetry, now: float) -> list[Row]:
        """An event for rows that their sender had to drop; it counts them from its start."""
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

    def _watch(self) -> None:
        """Note which replicas have stalled, or go on."""
        if self._caught_up and self.about.live:
            active = [lane.replica for lane in self._picture.timeline.lanes.all if lane.state in RUN]
            found = self._vitals.judge(active, self._picture.goodput.steps.typical, self._monotonic())
            self._tell((c.event, {"replica": c.replica, "rank": c.rank, "reason": c.reason}) for c in found)

    def _tell(self, events: Iterable[tuple[str, Row]]) -> None:
        """Note what this chronicle itself has seen."""
        for event, facts in events:
            self._number("event", [{"t": self._clock(), "event": event, "source": "lighthouse", **facts}])
            self._arm()

    def _with_ranks(self, picture: Json, *, live: bool) -> Json:
        """Add what is known of single replicas and ranks now."""
        now = self._monotonic()
        for row in picture["replicas"]:
            replica = row["replica"]
            row["step_s"] = self._stragglers.step_s.get(replica) if live else None
            row["busy_s"] = self._stragglers.busy_s.get(replica) if live else None
            row["ranks"] = [
                {"rank": b.rank, "pid": b.pid, "host": b.host, "progress": b.progress, "age_s": age}
                for b, age in (self._vitals.newest(replica, now) if live else ())
            ]
        return picture


def _name(commit: Mapping[str, Any]) -> tuple[int, str]:
    return commit["step"], commit["lineage"]


_HEAD = ("t", "event", "source", "replica", "rank", "incarnation", "reason")


def _told(entry: JournalEntry) -> Json:
    """An event as GET /v1/events shows it."""
    row = entry.row
    facts = {key: value for key, value in row.items() if key not in _HEAD}
    return {"seq": entry.seq, **{key: row.get(key) for key in _HEAD}, "said": said(row), "facts": facts}


def said(row: Row) -> str:
    """An event as one plain sentence of bounded length, without its reason."""
    return tell(row, reason=False)[:MAX_SAID]
