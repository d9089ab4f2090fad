"""The database of the journal: every row that the lighthouse received or wrote, numbered, in one SQLite table."""

from __future__ import annotations

import contextlib
import json
import logging
import sqlite3
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from pydantic_core import from_json

from ft_hsdp.errors import ConfigError, FtHsdpError, Retryable
from ft_hsdp.jsonl import clear_way
from lighthouse.overview.overview import JournalEntry
from lighthouse.store import damaged, full, put_aside

FORMAT = 1
APPLICATION = 0x66746864  # "fthd": tells this file from any other SQLite database
LOCK_WAIT_S = 2.0  # longest wait of one transaction for a reader
MAX_READ = 1000  # rows that one call returns at most
EVENTS = 200  # events that a call returns at most, unless it says how many
PRUNED = 1000  # old rows that one append removes at most

_Way = tuple[sqlite3.Connection, contextlib.AbstractContextManager[Any]]

_KINDS: dict[bytes, Literal["event", "commit", "logged"]] = {
    b"event": "event",
    b"commit": "commit",
    b"logged": "logged",
}
_SCHEMA = (
    "CREATE TABLE rows (seq INTEGER PRIMARY KEY, t REAL, kind TEXT, event TEXT, replica INTEGER, step INTEGER,"
    " body TEXT)",
    "CREATE INDEX events ON rows (seq) WHERE kind = 'event'",
    "CREATE INDEX commits ON rows (seq) WHERE kind = 'commit'",
)


_log = logging.getLogger(__name__)


class DatabaseFailed(Retryable):
    """The database did not store rows, or could not read them."""


class EventQuery(TypedDict, total=False):
    after: int | None  # only events with a higher number
    before: int | None  # only events with a lower number
    limit: int  # how many, at most
    replica: int | None  # only events of this replica
    event: str | None  # only events of this name
    text: str | None  # only rows that contain it, in any case


class SqliteDatabase:
    """Rows under their numbers, in a file. Any thread may read; all calls block on the disk.

    No decision needs a row: a file that cannot be used, at the start or later, is set aside, and a new one
    begun.
    """

    def __init__(
        self, path: Path | str, keep: int = 1_000_000, note: Callable[[str, str], None] | None = None
    ) -> None:
        """Open the file, or create it.

        Args:
            keep: about so many of the newest rows are kept.
            note: takes an event and its reason, when a file was set aside; on any thread.

        Raises:
            ConfigError: the file cannot be written (exit code 64).
            DatabaseFailed: the disk is full.
        """
        self._path = path
        self._keep = keep
        self._note = note
        self._full: bool | None = None  # what "synchronous" is set to
        self.first = 0  # the lowest number that is stored; 0 in an empty database
        self.last = 0  # the highest number that was ever stored; 0 in an empty database
        self._writing = threading.RLock()
        try:
            self._begin()
        except ConfigError as error:
            self._set_aside(error.allowed.removeprefix("a journal that is whole "), error)
            self._begin()

    def append(self, entries: Sequence[JournalEntry], *, durable: bool = False) -> None:
        """Store these rows under their own numbers, all or none, and remove the oldest rows beyond the limit.

        A row whose number is stored already is ignored.

        Args:
            durable: on return the rows survive a loss of power; else only the death of this process.

        Raises:
            DatabaseFailed: no row was stored.
        """
        if not entries:
            return
        with self._writing:
            try:
                self._append(entries, durable)
            except sqlite3.Error as error:
                with contextlib.suppress(sqlite3.Error):
                    self._writer.execute("ROLLBACK")
                if not self._renewed(error, self._writer):
                    raise DatabaseFailed(f"lighthouse journal {self._path}: {error}") from error
                self.append(entries, durable=durable)

    def _append(self, entries: Sequence[JournalEntry], durable: bool) -> None:
        values = [_columns(entry) for entry in entries]
        if self._full is not durable:
            self._writer.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._full = durable
        self._writer.execute("BEGIN IMMEDIATE")
        self._writer.executemany("INSERT OR IGNORE INTO rows VALUES (?, ?, ?, ?, ?, ?, ?)", values)
        first = self._prune(min(e.seq for e in entries), max(e.seq for e in entries))
        self._writer.execute("COMMIT")
        self.first, self.last = first, max(self.last, entries[-1].seq)

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
        for db, lock in (self._reader, self._searcher, (self._writer, self._writing)):
            with lock:
                db.close()

    def _select(self, wanted: str, values: Sequence[object], way: _Way) -> list[JournalEntry]:
        # As bytes: a row that is no text must not hide the others.
        query = f"SELECT seq, CAST(kind AS BLOB), CAST(body AS BLOB) FROM rows WHERE {wanted}"  # noqa: S608 - parts of this file alone
        db, lock = way
        with lock:
            try:
                found = db.execute(query, values).fetchall()
                failed = None
            except (sqlite3.Error, OverflowError) as error:
                failed = error
        if failed is not None:
            if isinstance(failed, sqlite3.Error) and self._renewed(failed, db):
                return []
            raise DatabaseFailed(f"lighthouse journal {self._path}: {failed}") from failed
        try:  # one document is parsed faster than many
            rows = from_json(b"[" + b",".join([body for _, _, body in found]) + b"]")
            return [JournalEntry(seq, _KINDS[kind], row) for (seq, kind, _), row in zip(found, rows, strict=True)]
        except (ValueError, TypeError, KeyError) as error:
            self._drop([seq for seq, kind, body in found if not _readable(kind, body)], error)
            return self._select(wanted, values, way)

    def _drop(self, damaged_rows: Sequence[int], why: Exception) -> None:
        """Remove rows that cannot be read, so that the others can. Raises DatabaseFailed."""
        if not damaged_rows:
            raise DatabaseFailed(f"lighthouse journal {self._path}: {why}") from why
        _log.error("%s: %d damaged rows are removed (%s)", self._path, len(damaged_rows), why)
        with self._writing:
            try:
                self._writer.executemany("DELETE FROM rows WHERE seq = ?", [(seq,) for seq in damaged_rows])
            except sqlite3.Error as error:
                raise DatabaseFailed(f"lighthouse journal {self._path}: {error}") from error

    def _renewed(self, error: sqlite3.Error, met: sqlite3.Connection) -> bool:
        """Return whether a new file was begun because an error that a connection met says that it is damaged."""
        with self._writing:
            if met not in (self._writer, self._reader[0], self._searcher[0]):
                return True  # another thread has done it
            if not isinstance(self._path, Path) or not damaged(self._path, error):
                return False
            self.close()
            last = self.last
            self._set_aside(f"({error})", DatabaseFailed(f"lighthouse journal {self._path}: {error}"))
            self._begin()
            self.last = last  # numbers are never given twice
            return True

    def _set_aside(self, why: str, error: FtHsdpError) -> None:
        """Set the file aside, and say so. Raises ``error`` if it stays where it is."""
        if not isinstance(self._path, Path):
            raise error
        put_aside(self._path, why, self._note, error)
        self._full = None
        self.first = self.last = 0

    def _begin(self) -> None:
        self._writer = self._open()
        self._reader: _Way = (self._writer, self._writing)
        self._searcher: _Way = self._reader
        if self._path != ":memory:":  # a long search must not delay other readers and writers
            self._reader = (self._connect(), threading.Lock())
            self._searcher = (self._connect(), threading.Lock())

    def _prune(self, lowest: int, highest: int) -> int:
        """Remove some of the rows beyond ``keep``, inside a transaction; return the lowest number that is left."""
        first = min(self.first or lowest, lowest)
        spare = max(self.last, highest) - self._keep
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
                clear_way(self._path)
            db = self._connect()
        except OSError as error:
            raise ConfigError(
                "lighthouse journal", str(self._path), f"a file to write ({error.strerror})"
            ) from None
        except sqlite3.Error as error:
            raise self._failed(error) from None
        try:
            self._prepare(db)
            self.first, self.last = db.execute(
                "SELECT ifnull((SELECT min(seq) FROM rows), 0), ifnull((SELECT max(seq) FROM rows), 0)"
            ).fetchone()
        except sqlite3.Error as error:
            db.close()
            raise self._failed(error) from None
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
        if full(error) and not (isinstance(self._path, Path) and damaged(self._path, error)):
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


def _readable(kind: bytes, body: bytes) -> bool:
    """Return whether a stored row is as `append` stored it, as far as its readers depend on it."""
    try:
        row = json.loads(body)
    except ValueError:
        return False
    needed = {"t", "step", "lineage"} if kind == b"commit" else {"t"}
    return kind in _KINDS and isinstance(row, dict) and needed <= row.keys()


def _pattern(text: str) -> str:
    """Return the LIKE pattern that finds ``text`` as it is written in JSON."""
    quoted = json.dumps(text.encode("utf-8", "replace").decode(), ensure_ascii=False)[1:-1]
    for special in "\\%_":
        quoted = quoted.replace(special, "\\" + special)
    return f"%{quoted}%"
