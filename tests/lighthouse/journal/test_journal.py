import asyncio
import json
import math
import threading
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_hsdp import protocol
from ft_hsdp.config import parse
from ft_hsdp.core.traces import GroupTrace, Mark, RankId, RankTrace
from ft_hsdp.errors import ProtocolViolation
from ft_hsdp.protocol import MAX_COUNT, RankBeat, Telemetry
from lighthouse.http.rate_limits import STREAMS, TooMany
from lighthouse.journal import journal as module
from lighthouse.journal import subscribers
from lighthouse.journal.database import DatabaseFailed, MemoryDatabase, SqliteDatabase
from lighthouse.journal.journal import LOOK_S, TRACED_S, JobJournal
from lighthouse.journal.row_checks import MAX_REASON, MAX_ROW, micro_batches_of
from lighthouse.overview.liveness import SILENT_S, STUCK_S
from lighthouse.overview.overview import JobInfo, JournalEntry
from lighthouse.runtime import about as about_job
from tests.support.lighthouse import day
from tests.support.lighthouse.lighthouse_helpers import NOW, commit_row, quiet

ABOUT = JobInfo("job", 3, 2, 100)


class Clock:
    def __init__(self):
        self.seconds = 0.0

    def wall(self):
        return NOW + self.seconds

    def monotonic(self):
        return self.seconds


class Broken(MemoryDatabase):
    """A disk that can be full."""

    full = False

    def append(self, entries, *, durable=False):
        if self.full:
            raise DatabaseFailed("no space left on device")
        super().append(entries, durable=durable)


class Taken:
    def __init__(self):
        self.rows, self.closed = [], 0

    def take(self, kind, seq, row):
        self.rows.append((seq, row[{"event": "event", "commit": "step", "logged": "values"}[kind]]))

    def close(self):
        self.closed += 1


class WrittenJournal(JobJournal):
    """A journal whose database the tests read."""

    def __init__(self, database, about, sinks, clock):
        super().__init__(database, about, sinks, clock.wall, clock.monotonic)
        self.database = database


def make(database=None, sinks=(), about=ABOUT, clock=None):
    return WrittenJournal(database or MemoryDatabase(), about, sinks, clock or Clock())


def event(name="RingBroken", **facts):
    return {"t": NOW, "event": name, "source": "replica", "reason": "why", **facts}


def logged(step, **values):
    return {"t": NOW, "step": step, "epoch": 1, "values": values, "incarnation": "0-a-0"}


def traced(*groups, still_s=0.0):
    return RankBeat(0, 1, "h", 1, "", still_s, RankTrace(groups))


def tell(journal, source="0-a-0", **what):
    """Take a message as it comes off the wire."""
    journal.take(protocol.decode(protocol.encode(Telemetry(source, **what)), Telemetry))


def kept(journal):
    return [entry.row for entry in journal.database.read(0, 1000)]


def one_is_slow(journal, first=1, waits_s=0.1, **facts):
    """Tell of steps in which replica 1 is busy for 2.5 s, and the others for 1 s."""
    for step, replica in product(range(first, first + 24), range(3)):
        waits = {"ftar": waits_s if replica == 1 else 1.6}
        row = commit_row(step, replica, step_s=2.6, waits=waits, **facts)
        tell(journal, f"{replica}-a-0", commits=(row,), ranks=(RankBeat(0, 42, "node7", step),))


@pytest.fixture
def journal():
    return make()


async def test_own_rows_are_kept_when_note_returns_and_in_order_with_the_others(journal):
    tell(journal, events=(event("CheckedIn"),))
    assert kept(journal) == []
    journal.note([event("EpochGranted", source="lighthouse"), event("Waiting", source="lighthouse")])
    assert [row["event"] for row in kept(journal)] == ["CheckedIn", "EpochGranted", "Waiting"]
    assert [entry.seq for entry in journal.database.read(0, 10)] == [1, 2, 3]


async def test_a_worker_is_told_only_when_its_rows_are_kept(journal):
    tell(journal, events=(event("CheckedIn"),))
    told = asyncio.create_task(journal.kept())
    await quiet()
    assert (kept(journal), told.done()) == ([], False)
    await told
    assert len(kept(journal)) == 1
    await journal.kept()  # nothing waits


def test_a_wrong_clock_is_told_once():
    clock = Clock()
    journal = make(clock=clock)
    for second in range(40):
        clock.seconds = float(second)
        tell(journal, ranks=(RankBeat(0, 1, "h", 1, t=clock.wall() - 3.5),))
    assert journal.overview()["loads"] == {"h": {"host_clock_ahead_seconds": pytest.approx(-3.5)}}
    journal.close()
    (told,) = [row for row in kept(journal) if row["event"] == "ClockOff"]
    assert (told["host"], told["over"], told["source"]) == ("h", False, "lighthouse")


def test_a_commit_is_kept_once_whoever_tells_of_it():
    sink = Taken()
    journal = make(sinks=[sink])
    for replica in (1, 0, 2):
        tell(journal, f"{replica}-a-0", commits=(commit_row(1, replica), commit_row(2, replica)))
    tell(journal, commits=(commit_row(2, lineage="f" * 32, epoch=2),))
    rows = kept(journal)
    assert [(r["step"], r["epoch"], r["incarnation"]) for r in rows] == [
        (1, 1, "1-a-0"),
        (2, 1, "1-a-0"),
        (2, 2, "0-a-0"),
    ]
    assert sink.rows == [(1, 1), (2, 2), (3, 2)]
    assert {"contributions", "cursors", "ring"}.isdisjoint(rows[0]), "the bulk stays in the run's own files"


def test_a_restart_knows_the_commits_that_are_kept():
    first = make()
    tell(first, commits=tuple(commit_row(n) for n in range(1, 50)))
    again = make(first.database)
    tell(again, "1-a-0", commits=tuple(commit_row(n, 1) for n in range(40, 60)))
    assert [r["step"] for r in kept(again)] == list(range(1, 60))


def test_a_replica_speaks_for_itself_only(journal):
    tell(journal, "2-a-0", events=(event(replica=0, incarnation="0-a-0", source="supervisor"),))
    (row,) = kept(journal)
    assert (row["replica"], row["incarnation"], row["source"]) == (2, "2-a-0", "replica")
    tell(journal, "supervisor", events=(event("FailureInjected", source="chaos", replica=1),))
    assert (kept(journal)[1]["source"], kept(journal)[1]["replica"]) == ("chaos", 1)


@pytest.mark.parametrize(
    ("source", "what", "why"),
    [
        ("0-a-0", {"events": [event("EpochGranted")]}, "only the lighthouse"),
        ("0-a-0", {"events": [event(source="lighthouse")]}, "only the lighthouse"),
        ("supervisor", {"events": [event(source="admin")]}, "only the lighthouse"),
        ("supervisor", {"events": [event("OperatorOrdered")]}, "only the lighthouse"),
        ("0-a-0", {"events": [{"t": 1}]}, "is no name"),
        ("0-a-0", {"events": [event({"a": []})]}, "is no name"),
        ("0-a-0", {"events": [event("x" * 65)]}, "is no name"),
        ("0-a-0", {"events": [event(rank=2)]}, "rank '2' is not one of 0 to 1"),
        ("supervisor", {"events": [event(replica=3)]}, "replica '3' is not one of 0 to 2"),
        ("supervisor", {"events": [event(replica=[1])]}, "is not one of"),
        ("supervisor", {"events": [event(replica=True)]}, "is not one of"),
        ("supervisor", {"events": [event(incarnation=["x"])]}, "is no text"),
        ("0-a-0", {"events": [event(step=-1)]}, "step '-1' is not a number"),
        ("0-a-0", {"events": [event(epoch=2**60)]}, "epoch"),
        ("0-a-0", {"events": [event(junk="x" * MAX_ROW)]}, "allowed: 8192"),
        ("0-a-0", {"events": [event(deep=[[[[[[[[]]]]]]]])]}, "nested"),
        ("9-a-0", {}, "neither 'supervisor' nor"),
        ("lighthouse", {}, "neither 'supervisor' nor"),
        ("supervisor", {"commits": [commit_row(1)]}, "come from replicas"),
        ("supervisor", {"ranks": [RankBeat(0, 1, "h", 1)]}, "come from replicas"),
        ("0-a-0", {"ranks": [RankBeat(2, 1, "h", 1)]}, "rank '2'"),
        ("0-a-0", {"ranks": [RankBeat(0, 1, "h", 1)] * 3}, "a replica has 2"),
        ("0-a-0", {"ranks": [traced(GroupTrace("g", -1, 0))]}, "joined"),
        ("0-a-0", {"ranks": [traced(GroupTrace("g", 1, MAX_COUNT + 1))]}, "done"),
        ("0-a-0", {"ranks": [traced(GroupTrace("g", 1, 0, blocked_s=float("nan")))]}, "blocked_s"),
        ("0-a-0", {"ranks": [traced(GroupTrace("g", 1, 0, left=RankId(3, 0)))]}, "replica '3'"),
        ("0-a-0", {"ranks": [traced(GroupTrace("g", 1, 0, marks=(Mark(16, float("inf")),)))]}, "mark"),
        ("0-a-0", {"ranks": [traced(*[GroupTrace("g", 1, 0)] * 65)]}, "65 groups"),
        ("0-a-0", {"ranks": [traced(still_s=-1.0)]}, "still_s"),
        ("0-a-0", {"commits": [commit_row(101)]}, "step '101'"),
        ("0-a-0", {"commits": [commit_row(1, contributors=[3])]}, "contributor '3'"),
        ("0-a-0", {"commits": [commit_row(1, contributors="all")]}, "contributors"),
        ("0-a-0", {"commits": [commit_row(1, contributors=[None])]}, "contributors"),
        ("0-a-0", {"commits": [commit_row(1, lineage="no hex")]}, "lineage"),
        ("0-a-0", {"commits": [commit_row(1, role="king")]}, "role"),
        ("0-a-0", {"commits": [commit_row(1, step_s=float("nan"))]}, "step_s"),
        ("0-a-0", {"commits": [commit_row(1, waits={"ftar": -1})]}, "waits.ftar"),
        ("0-a-0", {"commits": [commit_row(1, waits={f"w{n}": 1 for n in range(17)})]}, "waits"),
        ("0-a-0", {"commits": [commit_row(1, waits={"<script>": 1})]}, "waits"),
        ("supervisor", {"logged": [logged(1, loss=1.0)]}, "come from replicas"),
        ("0-a-0", {"logged": [logged(1)]}, "values"),
        ("0-a-0", {"logged": [logged(1, loss=float("nan"))]}, "loss"),
        ("0-a-0", {"logged": [logged(1, loss="low")]}, "loss"),
        ("0-a-0", {"logged": [logged(1, **{"a b": 1.0})]}, "a b"),
        ("0-a-0", {"logged": [logged(1, **{f"n{i}": 1.0 for i in range(65)})]}, "values"),
        ("0-a-0", {"logged": [logged(-1, loss=1.0)]}, "step"),
        ("0-a-0", {"logged": [{**logged(1, loss=1.0), "epoch": "one"}]}, "epoch"),
    ],
)
def test_what_cannot_be_true_is_refused_whole(journal, source, what, why):
    good = event("CheckedIn")
    more = {kind: tuple(what.get(kind, ())) for kind in ("commits", "ranks", "logged")}
    with pytest.raises(ProtocolViolation, match=why) as caught:
        journal.take(Telemetry(source, (good, *what.get("events", ())), **more))
    assert len(str(caught.value)) < 200
    journal.note([event("After")])
    assert [row["event"] for row in kept(journal)] == ["After"], "nothing of it waits"


def test_what_ranks_tell_of_their_collectives_is_cut(journal):
    group = GroupTrace("n" * 65, 20, 19, "\ud800", RankId(2, 1), marks=tuple(Mark(n, 1.0) for n in range(9)))
    stuck = RankBeat(1, 1, "h", 1, trace=RankTrace((), "d" * 81, ("s" * 161,) * 13))
    journal.take(Telemetry("0-a-0", ranks=(traced(group), stuck)))
    _, (first, second) = journal.beat(0)
    assert first.trace is not None
    assert first.trace.groups == (replace(group, name="n" * 64, op="?", marks=group.marks[1:]),)
    assert second.trace == RankTrace((), "d" * 80, ("s" * 160,) * 12)


def test_times_texts_and_numbers_are_cut_to_what_a_page_can_show(journal):
    rows = (
        event(t=NOW + 2 * 86400),
        event(t=float("nan")),
        event(t="late", reason="r" * 5000, seen=float("inf"), more={"x": [float("-inf"), 10**30]}),
        event(t=NOW - 3600, reason=None, text="\ud800"),
    )
    journal.take(Telemetry("0-a-0", rows, (commit_row(1, loss=float("nan"), lr="high", norm=10.0**300),)))
    found = kept(journal)
    assert [row["t"] for row in found[:4]] == [NOW, NOW, NOW, NOW - 3600]
    assert len(found[2]["reason"]) == MAX_REASON
    assert (found[2]["seen"], found[2]["more"]) == (None, {"x": [None, "1" + "0" * 30]})
    assert (found[3]["reason"], found[3]["text"]) == ("", "?")
    assert (found[4]["loss"], found[4]["lr"], found[4]["norm"]) == (None, None, None)
    json.dumps(journal.overview(), allow_nan=False)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=12,
)
KEYS = ["t", "event", "source", "replica", "rank", "incarnation", "reason", "epoch", "step", "members", "roles"]
KEYS += ["suspect", "kind", "role", "at_rank", "term", "lineage", "contributors", "waits", "step_s", "loss"]
NAMES = ["RingBroken", "FailureInjected", "ReplicaExited", "ReplicaStarted", "GrantAdopted", "FetchCompleted"]
JUNK = st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=9), JSON, max_size=8)


@settings(max_examples=25)
@given(st.lists(st.tuples(JUNK, st.sampled_from(NAMES)), max_size=6), st.lists(JUNK, max_size=3))
def test_whatever_workers_send_is_refused_or_shown(events, commits):
    journal = make()
    grant = event("EpochGranted", epoch=1, members=[0, 1, 2], roles={"0": "contribute"}, source="lighthouse")
    journal.note([grant])
    said = []
    for source in ("supervisor", "1-a-0"):
        for junk, name in events:
            for row in (junk, {**junk, "event": name}, {**event(name, replica=1), **junk, "event": name}):
                try:
                    journal.take(Telemetry(source, (row,)))
                except ProtocolViolation as error:
                    said.append(str(error))
    for junk in commits:
        try:
            journal.take(Telemetry("1-a-0", (), (commit_row(1) | junk,)))
        except ProtocolViolation as error:
            said.append(str(error))
    assert not any("\n" in line for line in said)
    json.dumps(journal.overview(), allow_nan=False)
    json.dumps(journal.events(limit=1000), allow_nan=False)


def test_rows_that_a_sender_dropped_are_told_of_once(journal):
    for dropped in (0, 5, 5, 9):
        tell(journal, "1-a-0", dropped=dropped)
    assert [(r["event"], r["replica"], r["rows"]) for r in kept(journal)] == [
        ("RowsDropped", 1, 5),
        ("RowsDropped", 1, 4),
    ]
    for n in range(1000):
        tell(journal, f"1-b-{n}", dropped=1)
    newest = journal.database.last
    tell(journal, "1-b-999", dropped=1)
    assert journal.database.last == newest
    tell(journal, "1-b-0", dropped=1)
    assert journal.database.last == newest + 1, "it is forgotten"


def test_a_disk_that_is_full_costs_rows_and_nothing_else(caplog):
    database, sink = Broken(), Taken()
    journal = make(database, [sink])
    journal.note([event("CheckedIn")])
    database.full = True
    for n in range(50):
        journal.note([event("EpochGranted", epoch=n, members=[0], source="lighthouse")])
    database.full = False
    journal.note([event("JobFinished")])
    assert [(e.seq, e.row["event"]) for e in database.read(0, 100)] == [(1, "CheckedIn"), (52, "JobFinished")]
    assert journal.overview()["lighthouse"]["epoch"] == 49, "the overview has them, although the disk has not"
    assert len(sink.rows) == 52
    assert len([r for r in caplog.records if "not stored" in r.message]) == 1


def test_a_sink_that_fails_harms_nobody(caplog):
    class Bad(Taken):
        def take(self, *_):
            raise RuntimeError("no")

        close = take

    good = Taken()
    journal = make(sinks=[Bad(), good])
    journal.note([event("CheckedIn")])
    journal.close()
    journal.close()
    assert good.rows == [(1, "CheckedIn")]
    assert good.closed == 1
    journal.note([event("TooLate")])
    tell(journal, events=(event(),))
    assert len(kept(journal)) == 1


def test_the_overview_has_what_only_the_living_know():
    clock = Clock()
    journal = make(clock=clock, about=replace(ABOUT, ranks=1))
    one_is_slow(journal)
    clock.seconds += 60
    for replica in range(3):
        load = {"rank_cpu_ratio": 0.5, "host_run_free_bytes": 7.0, "odd": 1.0}
        beats = RankBeat(0, 42, "node7", 24, load=load), RankBeat(0, 42, "node7", 24, t=clock.wall())
        for beat in beats:  # only a load that is new is told
            tell(journal, f"{replica}-a-0", ranks=(beat,))
    clock.seconds += 0.5
    overview = journal.overview()
    one = overview["replicas"][1]
    assert one["straggler"]
    assert not overview["replicas"][0]["straggler"]
    assert (one["step_s"], round(one["busy_s"], 3)) == (2.6, 2.5)
    about = {"rank": 0, "pid": 42, "host": "node7", "progress": 24, "age_s": 0.5}
    assert one["ranks"] == [{**about, "load": {"rank_cpu_ratio": 0.5}}]
    assert overview["loads"] == {"node7": {"host_run_free_bytes": 7.0}}
    assert overview["head"]["contributors"] == [0, 1, 2]
    assert overview["head"]["steps_per_s"] == pytest.approx(1.0)
    assert overview["head"]["tokens_per_s"] == pytest.approx(300)
    assert overview["series"]["gbps"] == [4.0] * 24
    seen = [r for r in kept(journal) if r.get("event") == "StragglerSeen"]
    assert [(r["replica"], r["rank"], r["source"]) for r in seen] == [(1, 0, "lighthouse")]


def test_a_straggler_is_told_of_when_a_trace_names_its_rank() -> None:
    clock = Clock()
    journal = make(clock=clock)

    def told() -> list[tuple[int, int | None]]:
        return [(r["replica"], r["rank"]) for r in kept(journal) if r.get("event") == "StragglerSeen"]

    def traces(late: float) -> None:
        for rank in (0, 1):
            marks = tuple(Mark(n, 100 + n * 0.1 + rank * late) for n in (16, 32, 48))
            trace = RankTrace((GroupTrace("1:0", 60, 60, marks=marks),))
            tell(journal, "1-a-0", ranks=(RankBeat(rank, 42 + rank, "node7", 24, trace=trace),))
            clock.seconds += LOOK_S

    traces(0.0)
    one_is_slow(journal)
    assert told() == [], "the rank is not known yet"
    clock.seconds += TRACED_S / 2
    traces(0.6)
    assert told() == [(1, 1)]


def test_a_straggler_whose_slow_rank_stays_unknown_is_told_of_without_it() -> None:
    clock = Clock()
    journal = make(clock=clock)
    one_is_slow(journal)
    for seconds, told in ((TRACED_S - 1, 0), (2, 1), (2, 1)):
        clock.seconds += seconds
        tell(journal, ranks=(RankBeat(0, 1, "h", 1),))
        seen = [r["rank"] for r in kept(journal) if r.get("event") == "StragglerSeen"]
        assert seen == [None] * told


@pytest.mark.parametrize(("units", "told"), [(4, []), (2, ["2.50 s where others need 1.00 s"])])
def test_a_replica_with_fewer_ranks_is_a_straggler_only_if_these_are_slow(units: int, told: list[str]) -> None:
    """The data ranks of two replicas train 2 micro-batches in 1 s, the only one of replica 1 some in 2.5 s."""
    clock = Clock()
    config = parse({"replicas": 3, "ranks_per_replica": 4, "ranks_per_unit": 2, "entry": "train.py:main"})
    journal = make(clock=clock, about=about_job(config))
    runs = [{"replica": r, "units": units if r == 1 else 4, "width": int(r == 1)} for r in range(3)]
    one_is_slow(journal, contributions=runs)
    clock.seconds += TRACED_S + 1
    tell(journal, ranks=(RankBeat(0, 1, "h", 1),))
    seen = [r["reason"] for r in kept(journal) if r.get("event") == "StragglerSeen"]
    assert [reason.partition(";")[0].removeprefix("busy ") for reason in seen] == told


@pytest.mark.parametrize("ends", [True, False])
def test_a_straggler_that_ends_or_is_slow_no_more_before_its_rank_is_known_is_not_told_of(ends: bool) -> None:
    clock = Clock()
    journal = make(clock=clock)
    one_is_slow(journal)
    if ends:
        journal.note([event("ReplicaExited", source="lighthouse", replica=1)])
    else:
        one_is_slow(journal, first=25, waits_s=1.6)
    clock.seconds += TRACED_S + 1
    tell(journal, ranks=(RankBeat(0, 1, "h", 1),))
    assert not [r for r in kept(journal) if r.get("event") == "StragglerSeen"]


def test_a_replica_that_is_silent_or_stuck_is_stalled_until_it_goes_on():
    clock = Clock()
    journal = make(clock=clock)
    tell(journal, commits=(commit_row(1),))

    def beat(progress):
        for replica in (0, 1):
            tell(
                journal,
                f"{replica}-a-0",
                ranks=(RankBeat(0, 7, "h", progress if replica else int(clock.seconds)),),
            )

    beat(1)
    clock.seconds += SILENT_S + 1
    assert [r["state"] for r in journal.overview()["replicas"]] == ["stalled", "stalled", "training"]
    found = [(r["event"], r["replica"], r["rank"], r["over"]) for r in kept(journal)[1:]]
    assert found == [("ReplicaStalled", 0, 0, False), ("ReplicaStalled", 1, 0, False)]
    beat(2)
    beat(2)
    assert [(r["event"], r["replica"], r["over"]) for r in kept(journal)[3:]] == [
        ("ReplicaStalled", 0, True),
        ("ReplicaStalled", 1, True),
    ]
    for _ in range(int(STUCK_S) + 2):
        clock.seconds += 1
        beat(2)
    assert [(r["replica"], r["over"]) for r in kept(journal)[5:]] == [(1, False)]
    assert "makes no progress" in kept(journal)[5]["reason"]
    assert journal.beat(1) == (0.0, (RankBeat(0, 7, "h", 2),))
    assert journal.beat(2) == (math.inf, ())


def test_an_earlier_overview_is_that_of_the_rows_up_to_then():
    database = MemoryDatabase()
    entries = list(day.day(replicas=3, hours=0.7, seed=4))
    database.append(entries)
    about = JobInfo("day", 3, 2, 10_000, live=False)
    journal = make(database, about=about)
    newest = journal.overview()
    assert newest["now"] == max(e.row["t"] for e in entries)
    for at in [day.START + t for t in (1200, 600, 1800, 600, 1201)]:
        fresh = MemoryDatabase()
        fresh.append([e for e in entries if e.row["t"] <= at])
        want = make(fresh, about=about).overview()
        found = journal.overview(at=at)
        for key in ("head", "effective", "epochs", "failures", "lanes"):
            assert found[key] == want[key], key
        assert found["now"] == at
    assert journal.overview(at=day.START + 1e6) == newest


def test_events_are_told_with_facts_apart(journal):
    journal.note([event("EpochGranted", epoch=3, members=[1], source="lighthouse")])
    tell(journal, commits=(commit_row(1),))
    tell(journal, "1-a-0", events=(event(rank=1, suspect=2),))
    page = journal.events(limit=10)
    assert (page["first"], page["last"]) == (1, 3)
    assert page["events"][0]["facts"] == {"epoch": 3, "members": [1]}
    told = page["events"][1]
    assert told.pop("said")
    head = {"seq": 3, "t": NOW, "event": "RingBroken", "source": "replica", "reason": "why"}
    who = {"replica": 1, "rank": 1, "incarnation": "1-a-0"}
    assert told == {**head, **who, "grave": True, "facts": {"suspect": 2}}
    assert journal.events(limit=10, replica=2) == {"events": [], "first": 0, "last": 0}


async def collect(rows, n):
    found = []
    async for seq, _, _ in rows:
        found.append(seq)
        if len(found) == n:
            break
    await rows.aclose()
    return found


async def test_a_follower_gets_every_row_once_from_the_database_and_then_live(journal):
    for n in range(10):
        journal.note([event(f"E{n}")])
    task = asyncio.create_task(collect(journal.subscribers.follow(4), 16))
    await quiet()
    for n in range(10):
        journal.note([event(f"F{n}")])
        await quiet()
    assert await task == list(range(5, 21))


async def test_a_follower_without_a_number_gets_what_is_to_come(journal):
    journal.note([event("Old")])
    task = asyncio.create_task(collect(journal.subscribers.follow(), 1))
    beyond = asyncio.create_task(collect(journal.subscribers.follow(10**9), 1))
    await quiet()
    journal.note([event("New")])
    assert await task == [2]
    assert await beyond == [2], "numbers that a lost lighthouse gave"


async def test_a_follower_that_falls_behind_reads_from_the_database_and_loses_nothing(journal):
    slow = journal.subscribers.follow(0)
    journal.note([event("First")])
    assert (await anext(slow))[0] == 1
    rows = 3 * subscribers.KEPT
    journal.note([event(f"E{n}") for n in range(rows)])
    journal.note([event("Last")])
    assert await collect(slow, rows + 1) == list(range(2, rows + 3))


async def test_rows_that_the_disk_lost_are_skipped_by_who_reads_from_it():
    database = Broken()
    journal = make(database)
    journal.note([event("A")])
    database.full = True
    journal.note([event(f"E{n}") for n in range(3 * subscribers.KEPT)])
    database.full = False
    journal.note([event("B")])
    rows = journal.subscribers.follow(0)
    found = await collect(rows, 1 + subscribers.KEPT + 1)
    assert found[0] == 1
    assert found == sorted(set(found))
    assert found[-1] == database.last


async def test_followers_are_limited_and_end_with_the_journal(journal):
    tasks = [asyncio.create_task(collect(journal.subscribers.follow(), 1)) for _ in range(STREAMS)]
    await quiet()
    assert journal.subscribers.full
    with pytest.raises(TooMany):
        await anext(journal.subscribers.follow())
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    assert not journal.subscribers.full
    journal.close()
    assert await asyncio.gather(*tasks[1:]) == [[]] * (STREAMS - 1)


EVENING = Clock()
EVENING.seconds = 90_000.0


@pytest.mark.timeout(60)
async def test_a_day_of_20_replicas_is_back_and_shown(tmp_path):
    path = tmp_path / "journal.sqlite"
    rows = day.write_day(path)
    about = JobInfo("day", 20, 2, 100_000)
    database = SqliteDatabase(path)
    journal = make(database, about=about, clock=EVENING)
    journal.note([event("LighthouseStarted", source="lighthouse", term=day.TERM + 1, t=day.START + 86_401)])
    ready = asyncio.create_task(journal.ready())
    turns = 0
    while not ready.done():
        await asyncio.sleep(0)
        turns += 1
    overview = journal.overview()
    page = journal.events(limit=200, text="SIGKILL", replica=3)
    journal.close()
    database.close()
    assert turns > 100, "the event loop had its turn"
    assert overview["seq"] == rows + 1
    assert len(overview["replicas"]) == len(overview["lanes"]) == 20
    assert len(overview["series"]["t"]) <= 600
    assert len(overview["failures"]) == 39
    assert all(f["done"] for f in overview["failures"])
    assert {r["state"] for r in overview["replicas"]} == {"training"}
    assert overview["lighthouse"]["term"] == day.TERM + 1
    assert len(json.dumps(overview)) < 400_000
    assert page["events"]


@pytest.mark.timeout(60)
async def test_rows_that_come_while_the_past_is_folded_are_in_the_overview(tmp_path):
    path = tmp_path / "journal.sqlite"
    day.write_day(path, replicas=4, hours=1.5)
    database = SqliteDatabase(path)
    journal = make(database, about=JobInfo("day", 4, 2, 100_000), clock=EVENING)
    journal.begin()
    for n in range(20):
        await asyncio.sleep(0)
        journal.note([event("EpochGranted", source="lighthouse", epoch=900 + n, members=[n % 4], t=NOW + 86_500)])
    tell(journal, "3-a-0", events=(event("CheckedIn", t=NOW + 86_500),))
    await journal.kept()
    await journal.ready()
    overview = journal.overview()
    assert overview["seq"] == database.last
    assert [e["epoch"] for e in overview["epochs"]][-20:] == list(range(900, 920))
    journal.close()
    database.close()


def test_without_an_event_loop_a_disk_that_hangs_loses_rows_and_raises_nothing(caplog):
    answers = threading.Event()

    class Hangs(MemoryDatabase):
        def append(self, entries, *, durable=False):
            answers.wait(10)
            super().append(entries, durable=durable)

    journal = make(Hangs())
    for name in ("CheckedIn", "RingBroken"):
        tell(journal, events=(event(name),))
    answers.set()
    journal.close()
    assert [row["event"] for row in kept(journal)] == ["CheckedIn"]
    assert [record.args[0] for record in caplog.records] == [1], "rows that are not stored"


def test_memory_stays_bounded_over_many_rows(journal):
    for n in range(module.KNOWN + 500):
        step = 1 + n % 100
        tell(journal, commits=(commit_row(step, lineage=f"{n:x}", epoch=n // 100),))
    assert len(journal._known) == module.KNOWN
    remembered = journal.subscribers
    assert len(remembered._kept) <= 2 * subscribers.KEPT


async def test_a_flood_of_one_message_does_not_wait_in_memory(journal):
    for n in range(30):
        again = tuple(event(f"E{i}", n=n) for i in range(200))
        tell(journal, events=again, logged=(logged(n, loss=1.0),))
        tell(
            journal, events=again, logged=(logged(n, loss=1.0),)
        )  # its sender got no answer in time: it counts once
        assert 201 * (n + 1) - journal.database.last < module.MAX_PENDING + 200
    await journal.kept()
    assert journal.database.last == 30 * 201


@pytest.mark.parametrize(
    ("runs", "micro_batches"),
    [
        ([{"replica": 1, "units": 8}, {"replica": 0, "units": 99}, {"replica": 1, "units": 16, "width": 0}], 6),
        ([{"replica": 1, "units": 7, "width": 3}, {"replica": 1, "units": 5, "width": 3}], 4),
        *(([{"replica": 1, "units": 8, "width": width}], 2) for width in (-1, 5, 10**400, 1.0, True, "1", None)),
        ([{"replica": 1, "units": 10**400, "width": 3}], MAX_COUNT),
        ([{"replica": 1, "units": -3}], 1),
        ([{"replica": 1, "units": "3"}, {"replica": 1}, 7, None], 1),
        (None, 1),
        ({"replica": 1}, 1),
    ],
)
def test_the_micro_batches_of_a_rank_are_a_number_whatever_its_replica_says(runs, micro_batches):
    assert micro_batches_of({"contributions": runs}, 1, 4) == micro_batches


def test_numbers_that_another_lighthouse_may_have_given_are_left_out():
    database = MemoryDatabase()
    database.append([JournalEntry(7, "event", event())])
    journal = JobJournal(database, ABOUT, gap=1000)
    journal.note([event("LighthouseStarted")])
    assert database.last == 1008


def test_logged_values_reach_sinks_and_the_overview_and_no_log_of_events():
    sink = Taken()
    journal = make(sinks=[sink])
    tell(journal, commits=(commit_row(1),), logged=(logged(1, loss=0.5), logged(1, **{"eval/acc": 1})))
    assert sink.rows == [(1, 1), (2, {"loss": 0.5}), (3, {"eval/acc": 1.0})]
    shown = journal.overview()["logged"]
    assert {name: curve["value"] for name, curve in shown.items()} == {"eval/acc": [1.0], "loss": [0.5]}
    assert journal.events(after=0)["events"] == []


def test_of_a_state_that_replicas_evaluate_one_loss_counts_and_another_one_is_doubted(journal):
    for replica, loss in enumerate((0.5, 0.5, 0.25)):
        tell(journal, f"{replica}-a-0", logged=(logged(1, eval_loss=loss) | {"lineage": "ab"},))
    tell(journal, "2-a-0", logged=(logged(2, eval_loss=0.25) | {"lineage": "cd"},))
    assert journal.overview()["logged"]["eval_loss"]["value"] == [0.5, 0.25]
    (doubt,) = journal.events(after=0)["events"]
    assert (doubt["event"], doubt["replica"], doubt["facts"]["step"]) == ("JobDoubted", 2, 1)


def test_a_job_has_not_stopped_because_it_was_evaluated_for_long():
    journal = make(clock=(clock := Clock()))
    trace = RankTrace((GroupTrace("0:0", 2, 1),))
    tell(journal, commits=(commit_row(1),))
    for pause in [*["evaluation"] * 20, ""]:
        clock.seconds += 1
        tell(journal, ranks=(RankBeat(0, 1, "h", 1, pause, 9.0, trace),))
    assert not journal.diagnosis().stopped
    clock.seconds += 3
    assert journal.diagnosis().stopped
