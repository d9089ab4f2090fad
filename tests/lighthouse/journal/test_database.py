import os
import sqlite3
import threading

import pytest

from lighthouse.journal.database import MAX_READ, DatabaseFailed, MemoryDatabase, SqliteDatabase
from lighthouse.overview.overview import JournalEntry


def event(seq, name="RingBroken", t=None, **facts):
    return JournalEntry(seq, "event", {"t": float(seq) if t is None else t, "event": name, **facts})


def commit(seq, step):
    return JournalEntry(seq, "commit", {"t": float(seq), "step": step, "lineage": f"{step:x}"})


@pytest.fixture(params=["sqlite", "memory"])
def make(request, tmp_path):
    made = []

    def database(**options):
        kind = SqliteDatabase(tmp_path / "journal.sqlite", **options) if request.param == "sqlite" else None
        made.append(kind or MemoryDatabase(**options))
        return made[-1]

    yield database
    for database in made:
        database.close()


@pytest.fixture
def database(make):
    return make()


def test_rows_come_back_as_they_were(database):
    assert (database.first, database.last) == (0, 0)
    rows = [event(1, reason='a "quoted" ümlaut\n', replica=2, facts={"a": [1, None, 2.5]}), commit(2, 7)]
    database.append(rows, durable=True)
    assert database.read(0, 10) == rows
    assert database.read(1, 10) == rows[1:]
    assert (database.first, database.last) == (1, 2)


def test_a_row_keeps_the_number_that_it_is_given(database):
    database.append([event(500), event(501)])
    database.append([event(501, "Other"), event(900)])
    assert [(e.seq, e.row["event"]) for e in database.read(0, 10)] == [
        (500, "RingBroken"),
        (501, "RingBroken"),
        (900, "RingBroken"),
    ]
    assert (database.first, database.last) == (500, 900)


def test_read_takes_a_span_of_time_and_a_bounded_piece(database):
    database.append([event(n, t=100.0 - n) for n in range(1, 1500)])
    assert len(database.read(0, 10**6)) == MAX_READ
    assert [e.seq for e in database.read(0, 10, since=95.0, until=98.0)] == [2, 3, 4]


def test_commits_gives_the_newest_ones_in_order(database):
    database.append([entry for n in range(1, 10) for entry in (event(2 * n), commit(2 * n + 1, n))])
    assert [e.row["step"] for e in database.commits(3)] == [7, 8, 9]


def test_events_pages_both_ways_and_leaves_commits_out(database):
    database.append([event(n) if n % 3 else commit(n, n) for n in range(1, 31)])
    assert [e.seq for e in database.events(limit=3)] == [26, 28, 29]
    assert [e.seq for e in database.events(limit=3, before=26)] == [22, 23, 25]
    assert [e.seq for e in database.events(limit=3, after=0)] == [1, 2, 4]
    assert [e.seq for e in database.events(limit=9, after=4, before=9)] == [5, 7, 8]


def test_events_filters_by_replica_name_and_text(database):
    database.append(
        [
            event(1, "RingBroken", replica=0, reason="100% sure"),
            event(2, "RingBroken", replica=1, reason="1000 reasons"),
            event(3, "Rejoined", replica=1, reason='said "again" in C:\\tmp_x'),
        ]
    )

    def found(**asked):
        return [e.seq for e in database.events(limit=10, **asked)]

    assert found(replica=1) == [2, 3]
    assert found(event="RingBroken", replica=1) == [2]
    assert found(text="100%") == [1]
    assert found(text="C:\\tmp_") == [3]
    assert found(text='"again"') == [3]
    assert found(text="SURE") == [1]
    assert found(text="_") == [3]
    assert found(text="\ud800") == []


def test_the_oldest_rows_go_in_bounded_pieces(make):
    database = make(keep=100)
    database.append([event(n) for n in range(1, 2501)])
    assert database.first == 1001, "no more than a piece at once"
    for seq in (2501, 2502):
        database.append([event(seq)])
    assert (database.first, database.last) == (2403, 2502)
    assert len(database.read(0, 1000)) == 100
    assert [e.seq for e in database.events(limit=2, after=0)] == [2403, 2404]


def test_reading_from_other_threads_is_allowed(database):
    database.append([event(n) for n in range(1, 101)])
    found = []
    threads = [threading.Thread(target=lambda: found.append(len(database.read(0, 1000)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for n in range(101, 201):
        database.append([event(n)])
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(100 <= n <= 200 for n in found)


def test_numbers_that_no_database_holds_are_refused(make):
    with pytest.raises(DatabaseFailed):
        make().events(limit=1, after=2**80)


def test_rows_outlive_the_database(tmp_path):
    file = tmp_path / "new" / "journal.sqlite"
    database = SqliteDatabase(file)
    database.append([event(1), event(2)])
    database.close()
    again = SqliteDatabase(file)
    assert (again.first, again.last) == (1, 2)
    assert again.read(0, 10) == [event(1), event(2)]
    again.close()


def test_durable_rows_are_synced_and_the_others_are_not(tmp_path):
    database = SqliteDatabase(tmp_path / "journal.sqlite")
    modes = []
    for durable in (True, False, True):
        database.append([event(len(modes) + 1)], durable=durable)
        modes.append(database._writer.execute("PRAGMA synchronous").fetchone()[0])
    database.close()
    assert modes == [2, 1, 2], "2 is FULL, 1 is NORMAL"


def foreign(path):
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE photos (id)")
    db.close()


def future(path):
    SqliteDatabase(path).close()
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.close()


def damaged(path):
    database = SqliteDatabase(path)
    database.append([event(n, reason="x" * 500) for n in range(1, 200)])
    database.close()
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xee" * (len(data) - 4096)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("make_file", "why"),
    [
        (lambda p: p.write_bytes(b"no database at all" * 100), "not a database"),
        (foreign, "another program made it"),
        (future, "format 99"),
        (damaged, "malformed"),
        (lambda p: os.symlink(p.parent / "none" / "journal", p), "unable to open"),
        (lambda p: future(p) or p.with_name("journal.sqlite-wal").mkdir(), "unable to open"),
    ],
)
def test_a_file_that_is_none_of_ours_is_set_aside(tmp_path, make_file, why):
    file, told = tmp_path / "journal.sqlite", []
    make_file(file)
    database = SqliteDatabase(file, note=lambda *event: told.append(event))
    database.append([event(1)])
    assert database.read(0, 10) == [event(1)]
    database.close()
    ((name, reason),) = told
    assert name == "DamagedFileSetAside"
    assert why in reason
    assert next(tmp_path.glob("journal.sqlite.damaged-*Z")).name in reason


@pytest.mark.parametrize("make_file", [os.mkdir, os.mkfifo])
def test_what_is_no_file_is_set_aside(tmp_path, make_file):
    file = tmp_path / "journal.sqlite"
    make_file(file)
    SqliteDatabase(file).close()
    assert len(list(tmp_path.glob("journal.sqlite.damaged-*"))) == 1


@pytest.mark.parametrize("first", ["read", "events"])
def test_damage_that_is_met_later_costs_the_rows_and_no_lighthouse(tmp_path, first):
    file, told = tmp_path / "journal.sqlite", []
    database = SqliteDatabase(file)
    for start in range(1, 4000, 1000):
        database.append([event(n, reason="x" * 300) for n in range(start, start + 1000)])
    database.close()
    with file.open("r+b") as raw:
        raw.seek(file.stat().st_size // 2)
        raw.write(b"\xa5\x00\xff7" * 16384)
    database = SqliteDatabase(file, note=lambda *event: told.append(event))
    if first == "read":
        seq = 0
        while page := database.read(seq, MAX_READ):
            seq = page[-1].seq
    else:
        database.events(text="nowhere", limit=10)
    last = database.last
    database.append([event(last + 1)])
    assert database.read(last, 10) == [event(last + 1)]
    assert [name for name, _ in told] == ["DamagedFileSetAside"]
    assert last >= 4000, "a number is never given twice"
    database.close()


def test_a_row_that_is_damaged_does_not_hide_the_others(tmp_path):
    file = tmp_path / "journal.sqlite"
    database = SqliteDatabase(file)
    rows = [event(n, reason=f"row {n} {'y' * 40}") if n % 2 else commit(n, n) for n in range(1, 21)]
    database.append(rows)
    database.close()
    data = file.read_bytes()
    for found in (b'{"t":6.0,', b'"reason":"row 9 '):
        assert data.count(found) == 1
        data = data.replace(found, b"\xff" * len(found))
    file.write_bytes(data)
    database = SqliteDatabase(file)
    assert [e.seq for e in database.read(0, 100)] == [n for n in range(1, 21) if n not in (6, 9)]
    assert [e.seq for e in database.commits(3)] == [16, 18, 20]
    assert not list(tmp_path.glob("*.damaged-*"))
    database.close()


def test_a_disk_that_is_full_keeps_what_was_there(tmp_path):
    database = SqliteDatabase(tmp_path / "journal.sqlite")
    database.append([event(1)])
    writer = database._writer
    pages = writer.execute("PRAGMA page_count").fetchone()[0]
    writer.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(DatabaseFailed, match="full"):
        database.append([event(n, reason="y" * 4000) for n in range(2, 50)])
    assert database.read(0, 10) == [event(1)]
    assert database.last == 1
    writer.execute("PRAGMA max_page_count = 100000")
    database.append([event(2)])
    assert database.last == 2
    database.close()
