"""The database of the journal: every row that the lighthouse received or wrote, numbered, in one SQLite table."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

from pydantic_core import from_json

from ft_hsdp.errors import ConfigError, FtHsdpError, Retryable
from lighthouse.overview.overview import JournalEntry
from lighthouse.store import full

FORMAT = 1
APPLICATION = 0x66746864  # "fthd": tells this file from any other SQLite database
LOCK_WAIT_S = 2.0  # longest wait of one transaction for a reader
MAX_READ = 1000  # rows that one call returns at most
EVENTS = 200  # events that a call returns at most, unless it says how many
PRUNED = 1000  # old rows that one append removes at most

_Way = tuple[sqlite3.Connection, threading.Lock]

_SCHEMA = (
    "CREATE TABLE rows (seq INTEGER PRIMARY KEY, t REAL, kind TEXT, event TEXT, replica INTEGER, step INTEGER,"
    " body TEXT)",
    "CREATE INDEX events ON rows (seq) WHERE kind = 'event'",
    "CREATE INDEX commits ON rows (seq) WHERE kind = 'commit'",
)


class DatabaseFailed(Retryable):
    """The database did not store rows, or could not read them."""


class EventQuery(TypedDict, total=False):
    """Which events are asked for; None or nothing: no condition."""

    after: int | None  # only events with a higher number
    before: int | None  # only events with a lower number
    limit: int  # how many, at most
    replica: int | None  # only events of this replica
    event: str | None  # only events of this name
    text: str | None  # only rows that contain it, in any case


class SqliteDatabase:
    """Rows under their numbers, in a file. Any thread may read; all calls block on the disk."""

    def __init__(self, path: Path | str, keep: int = 1_000_000) -> None:
        """Open the file, or create it.

        Args:
            path: of the file.
            keep: about so many of the newest rows are kept.

        Raises:
            ConfigError: the file is damaged, belongs to another program or cannot be written (exit code 64).
            DatabaseFailed: the disk is full.
        """
        self._path = path
        self._keep = keep
        self._full: bool | None = None  # what "synchronous" is set to
        self._first = self._last = 0
        self._writer = self._open()
        self._writing = threading.Lock()
        self._reader = self._searcher = (self._writer, self._writing)
        if path != ":memory:":  # a long search must not delay other readers and writers
            self._reader = (self._connect(), threading.Lock())
            self._searcher = (self._connect(), threading.Lock())

    @property
    def first(self) -> int:
        """Return the lowest number that is stored; 0 in an empty database."""
        return self._first

    @property
    def last(self) -> int:
        """Return the highest number that was ever stored; 0 in an empty database."""
        return self._last

    def append(self, entries: Sequence[JournalEntry], *, durable: bool = False) -> None:
        """Store these rows under their own numbers, all or none, and remove the oldest rows beyond the limit.

        A row whose number is stored already is ignored.

        Args:
            entries: the rows, in the order of their numbers.
            durable: on return the rows survive a loss of power; else only the death of this process.

        Raises:
            DatabaseFailed: no row was stored.
        """
        if not entries:
            return
        values = [_columns(entry) for entry in entries]
        with self._writing:
            try:
                if self._full is not durable:
                    self._writer.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
                    self._full = durable
                self._writer.execute("BEGIN IMMEDIATE")
                self._writer.executemany("INSERT OR IGNORE INTO rows VALUES (?, ?, ?, ?, ?, ?, ?)", values)
                first = self._prune(min(e.seq for e in entries), max(e.seq for e in entries))
                self._writer.execute("COMMIT")
            except sqlite3.Error as error:
                with contextlib.suppress(sqlite3.Error):
                    self._writer.execute("ROLLBACK")
                raise DatabaseFailed(f"lighthouse journal {self._path}: {error}") from error
            self._first, self._last = first, max(self._last, entries[-1].seq)

    def read(
        self, after: int, limit: int, *, since: float | None = None, until: float | None = None
    ) -> list[JournalEntry]:
        """Return up to ``limit`` rows above number ``after``, in order; ``since`` < t <= ``until`` (Unix seconds).

        Raises:
            DatabaseFailed: they cannot be read.
        """
        wanted = "seq > ?"
        values: list[float] = [after]
        if since is not None:
            wanted, values = f"{wanted} AND t > ?", [*values, since]
        if until is not None:
            wanted, values = f"{wanted} AND t <= ?", [*values, until]
        return self._select(f"{wanted} ORDER BY seq LIMIT ?", [*values, min(limit, MAX_READ)], self._reader)

    def commits(self, limit: int) -> list[JournalEntry]:
        """Return the newest ``limit`` commits, in order. Raises DatabaseFailed."""
        return self._select("kind = 'commit' ORDER BY seq DESC LIMIT ?", [min(limit, MAX_READ)], self._reader)[
            ::-1
        ]

    def events(self, **asked: Unpack[EventQuery]) -> list[JournalEntry]:
        """Return events in order: the first ones above ``after`` if it is given, else the newest.

        Raises:
            DatabaseFailed: they cannot be read.
        """
        after, text = asked.get("after"), asked.get("text")
        given = {
            "seq > ?": after,
            "seq < ?": asked.get("before"),
            "replica = ?": asked.get("replica"),
            "event = ?": asked.get("event"),
            r"body LIKE ? ESCAPE '\'": _pattern(text) if text else None,
        }
        conditions = {condition: value for condition, value in given.items() if value is not None}
        wanted = " AND ".join(["kind = 'event'", *conditions])
        way = "DESC" if after is None else "ASC"
        values = [*conditions.values(), min(asked.get("limit", EVENTS), MAX_READ)]
        found = self._select(f"{wanted} ORDER BY seq {way} LIMIT ?", values, self._searcher)
        return found[::-1] if after is None else found

    def close(self) -> None:
        """Close all connections to the file."""
        for db, lock in (self._reader, self._searcher, (self._writer, self._writing)):
            with lock:
                db.close()

    def _select(self, wanted: str, values: Sequence[object], way: _Way) -> list[JournalEntry]:
        """Return the rows that match the condition ``wanted``, read over one connection."""
        query = f"SELECT seq, kind, body FROM rows WHERE {wanted}"  # noqa: S608 - parts of this file alone
        db, lock = way
        with lock:
            try:
                found = db.execute(query, values).fetchall()
            except (sqlite3.Error, OverflowError) as error:
                raise DatabaseFailed(f"lighthouse journal {self._path}: {error}") from error
        try:  # one document is parsed faster than many
            rows = from_json(f"[{','.join([body for _, _, body in found])}]")
            return [JournalEntry(seq, kind, row) for (seq, kind, _), row in zip(found, rows, strict=True)]
        except (ValueError, TypeError) as error:
            raise DatabaseFailed(f"lighthouse journal {self._path}: a row is damaged ({error})") from error

    def _prune(self, lowest: int, highest: int) -> int:
        """Remove some of the rows beyond ``keep``, inside a transaction; return the lowest number that is left."""
        first = min(self._first or lowest, lowest)
        spare = max(self._last, highest) - self._keep
        if spare < first:
            return first
        end = min(spare, first + PRUNED - 1)
        self._writer.execute("DELETE FROM rows WHERE seq <= ?", (end,))
        return end + 1

    def _open(self) -> sqlite3.Connection:
        """Open the connection that writes, after checking that the file is a journal."""
        try:
            if isinstance(self._path, Path):
                self._path.parent.mkdir(parents=True, exist_ok=True)
            db = self._connect()
        except OSError as error:
            raise ConfigError(
                "lighthouse journal", str(self._path), f"a file to write ({error.strerror})"
            ) from None
        except sqlite3.Error as error:
            raise self._failed(error) from None
        try:
            self._prepare(db)
            self._first, self._last = db.execute(
                "SELECT ifnull(min(seq), 0), ifnull(max(seq), 0) FROM rows"
            ).fetchone()
            for (body,) in db.execute("SELECT body FROM rows WHERE seq IN (?, ?)", (self._first, self._last)):
                json.loads(body)
        except sqlite3.Error as error:
            db.close()
            raise self._failed(error) from None
        except (ValueError, TypeError) as error:
            db.close()
            raise self._unusable(str(error)) from None
        except ConfigError:
            db.close()
            raise
        return db

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, timeout=LOCK_WAIT_S, isolation_level=None, check_same_thread=False)

    def _prepare(self, db: sqlite3.Connection) -> None:
        """Check that the file is a journal, and create its table; a check of every row would take seconds."""
        kind, form = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if tables and kind != APPLICATION:
            raise self._unusable("another program made it")
        if tables and form != FORMAT:
            raise self._unusable(f"format {form}, this version reads {FORMAT}")
        db.execute("PRAGMA journal_mode = WAL")
        if not tables:
            db.execute("BEGIN IMMEDIATE")
            for statement in _SCHEMA:
                db.execute(statement)
            db.execute(f"PRAGMA application_id = {APPLICATION}")
            db.execute(f"PRAGMA user_version = {FORMAT}")
            db.execute("COMMIT")

    def _failed(self, error: sqlite3.Error) -> FtHsdpError:
        """Return the error that opening the file raises."""
        if full(error):
            return DatabaseFailed(f"lighthouse journal {self._path}: {error}")
        return self._unusable(str(error))

    def _unusable(self, why: str) -> ConfigError:
        return ConfigError("lighthouse journal", str(self._path), f"a journal that is whole ({why})")


class MemoryDatabase(SqliteDatabase):
    """A database in memory: for tests, and for the pages of finished runs."""

    def __init__(self, keep: int = 1_000_000_000) -> None:
        super().__init__(":memory:", keep)


def _columns(entry: JournalEntry) -> tuple[object, ...]:
    row: Mapping[str, Any] = entry.row
    body = json.dumps(row, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return entry.seq, row["t"], entry.kind, row.get("event"), row.get("replica"), row.get("step"), body


def _pattern(text: str) -> str:
    """Return the LIKE pattern that finds ``text`` as it is written in JSON."""
    quoted = json.dumps(text.encode("utf-8", "replace").decode(), ensure_ascii=False)[1:-1]
    for special in "\\%_":
        quoted = quoted.replace(special, "\\" + special)
    return f"%{quoted}%"
