"""The store: what must outlive the lighthouse, written before any answer that depends on it leaves.

Durable are the term, the epochs and their members, the head, the current grant, the known exits, the numbers of
incarnations, where replicas are placed, what all replicas agreed on, which connections failed, what operators
ordered, and why the job was halted (`_DURABLE`). Each field is one row of JSON under the field's name,
and is validated on the way back. `SqliteStore` is for a lighthouse that is alone;
`lighthouse.ha.election.EtcdStore` for several.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from ft_hsdp.core import state_id
from ft_hsdp.errors import ConfigError, FtHsdpError, Retryable
from ft_hsdp.jsonl import DiskThread, clear_way, set_aside
from ft_hsdp.mounts import need_store
from lighthouse.quorum.state import LighthouseState, Policy, remembered

FORMAT = 9  # of the rows
LOCK_WAIT_S = 2.0  # longest wait of one transaction for a reader
RESERVED = 256 << 10  # bytes that a file of SQLite keeps free for writes on a full disk
LOG_PAGES = 48  # the write-ahead log begins anew after this many; `RESERVED` has room for more
WRITE_S = 3.0  # longest wait for a write: for slow disks, not for hanging ones
HEAD_LAG_S = 0.1  # the durable head may lag by this much; a grant always takes it along
# An answer to a member that goes on depends on neither: replicas know the head.
MAY_LAG = frozenset({"head", "edges"})
BESIDE = ("-wal", "-shm")  # ends of the names of SQLite's further files
# Errors that may be over later: the disk is full or fails, a reader holds a lock, no descriptors, no memory.
FULL = (
    *(sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_BUSY),
    *(sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_NOMEM),
)

_log = logging.getLogger(__name__)


_TYPES = get_type_hints(LighthouseState)
_DURABLE: dict[str, TypeAdapter[Any]] = {
    name: TypeAdapter(_TYPES[name])
    for name in (
        *("term", "fresh", "head", "epoch", "epochs", "exited", "grant", "finished", "halted", "diverged"),
        *("drained", "checkpoint", "target", "lives", "agreed", "rewound", "rewinding", "edges", "placement"),
    )
}

Rows = dict[str, str]
"""JSON of each durable field of `LighthouseState`, by the field's name."""


class StoreDamaged(ConfigError):
    """The store is not as a lighthouse wrote it."""


class StoreFailed(Retryable):
    """The store did not take a write: the lighthouse must not tell what it decided."""


class Store(ABC):
    """Where the durable part of a `LighthouseState` is kept, as rows of JSON.

    A subclass keeps the rows and the format that they have.
    """

    def __init__(self, name: str) -> None:
        self._name = name  # in an error
        self._saved: dict[str, Any] = {}

    @abstractmethod
    def close(self) -> None:
        """Let another lighthouse have the store."""

    @abstractmethod
    def _read(self) -> tuple[int, Rows]: ...

    @abstractmethod
    def _write(self, rows: Rows) -> None:
        """Replace these rows, all or none; the format is `FORMAT` from now on. Raises StoreFailed."""

    def load(self, policy: Policy) -> LighthouseState:
        """Return the state to go on from, in a term of its own that is durable already.

        An empty store takes a term that was never used before: the Unix time. A halt by policy is decided anew,
        from the head; one because states differ cannot be decided again, so it stays. Numbers of incarnations go
        on at the Unix time in milliseconds: above all that were given with a store that is lost now, or with
        this one after it was copied.

        Raises:
            ConfigError: the store cannot be read; one line, exit code 64.
        """
        found, rows = self._read()
        if rows:
            self._saved = self._decode(found, rows)
            kept = {**self._saved, "term": self._saved["term"] + 1}
            halted = not kept["diverged"] and bool(kept.pop("halted"))
        else:
            kept, halted = {"term": int(time.time())}, False
        state = replace(LighthouseState.empty(policy, 0), **kept)
        state = replace(state, term=max(state.term, self._least_term), target=min(state.target, policy.slots))
        state = remembered(replace(state, admissions=int(time.time() * 1000)), halted)
        self.save(state)
        return state

    def save(self, state: LighthouseState) -> None:
        """Make the durable part of ``state`` outlive this process; write only the fields that have changed.

        Blocks until it does.

        Raises:
            StoreFailed: the store holds what it held before, or will hold ``state`` until the next `save`: as if
                this process had ended before it could tell its decision.
        """
        changed = {name: getattr(state, name) for name in self.unsaved(state)}
        if changed:
            for name in changed:  # a write that fails may be done later, or in part
                self._saved.pop(name, None)
            self._write({name: _encode(name, value) for name, value in changed.items()})
            self._saved.update(changed)

    def unsaved(self, state: LighthouseState) -> frozenset[str]:
        """Return the durable fields in which ``state`` differs from what was saved last."""
        saved, never = self._saved, object()
        differ = [
            name
            for name in _DURABLE
            if (value := getattr(state, name)) is not (before := saved.get(name, never)) and value != before
        ]
        return frozenset(differ)

    def _decode(self, found: int, rows: Mapping[str, str]) -> dict[str, Any]:
        """Return the values in ``rows`` of format ``found``; ConfigError if any is missing or not valid."""
        if found != FORMAT:
            allowed = f"a store of this version (format {found}, this version reads {FORMAT})"
            raise ConfigError("lighthouse store", self._name, allowed)
        if rows.keys() != _DURABLE.keys():
            raise self._unusable(f"not as it was written: {', '.join(sorted(_DURABLE.keys() ^ rows.keys()))}")
        try:
            return {name: adapter.validate_json(rows[name], strict=True) for name, adapter in _DURABLE.items()}
        except ValidationError as error:
            raise self._unusable(str(error).splitlines()[0]) from None

    def _unusable(self, why: str) -> StoreDamaged:
        return StoreDamaged("lighthouse store", self._name, f"a store that is whole ({why})")

    @property
    def _least_term(self) -> int:
        return 0


class SqliteStore(Store):
    """A store in the file ``path``, for one lighthouse at a time; power loss does not undo a write.

    It reserves space, so that it still takes writes when the disk becomes full later: they go where the file and
    its log have been written before. A damaged file is set aside: the store is as one that was lost, or, if it
    was in use, has all that was saved.

    Args:
        note: Takes an event and its reason, when a damaged file was set aside.

    Raises:
        ConfigError: another lighthouse has it, or it cannot be opened; one line, exit code 64.
        StoreFailed: the disk is full or fails.
    """

    def __init__(self, path: Path, note: Callable[[str, str], None] | None = None) -> None:
        super().__init__(str(path))
        self.path = path
        self._note = note
        self._db: sqlite3.Connection | None = None
        self._lock: int | None = None
        self._disk = DiskThread(WRITE_S)
        self._format = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            need_store(path)
            self._lock = _lock(path)
            clear_way(path)
            try:
                self._open()
            except StoreDamaged as error:
                self._renew(error)
        except OSError as error:
            self.close()
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise StoreFailed(f"lighthouse store {path}: {error.strerror}") from None
            raise ConfigError("lighthouse store", str(path), f"a file to write ({error.strerror})") from None
        except FtHsdpError:
            self.close()
            raise

    def load(self, policy: Policy) -> LighthouseState:
        """Load the state as `Store.load` does; a store that is damaged counts as one that was lost."""
        try:
            return super().load(policy)
        except StoreDamaged as error:
            self._renew(error)
            return super().load(policy)

    def _open(self) -> None:
        """Open the file. Raises StoreDamaged, StoreFailed or ConfigError."""
        try:
            self._db = sqlite3.connect(
                self.path, timeout=LOCK_WAIT_S, isolation_level=None, check_same_thread=False
            )
            self._prepare(self._db)
        except sqlite3.Error as error:
            raise self._failed(error) from None

    def _failed(self, error: sqlite3.Error) -> FtHsdpError:
        if full(error) and not damaged(self.path, error):
            return StoreFailed(f"lighthouse store {self.path}: {error}")
        return self._unusable(str(error))

    def _renew(self, why: StoreDamaged) -> None:
        """Set the damaged file aside, and open an empty one. Raises as `_open` does, or `why`."""
        if self._db is not None:
            self._db.close()
        put_aside(self.path, why.allowed.removeprefix("a store that is whole "), self._note, why)
        self._saved = {}
        self._open()

    def close(self) -> None:
        if self._disk.close() and self._db is not None:
            self._db.close()
            self._db = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _prepare(self, db: sqlite3.Connection) -> None:
        """Check the file, make its table and reserve space."""
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        problem = db.execute("PRAGMA quick_check").fetchone()[0]
        if problem != "ok":
            raise self._unusable(problem)
        db.execute("CREATE TABLE IF NOT EXISTS durable (name TEXT PRIMARY KEY, value TEXT, digest TEXT)")
        self._format = db.execute("PRAGMA user_version").fetchone()[0]
        db.execute(f"PRAGMA wal_autocheckpoint = {LOG_PAGES}")
        db.execute("CREATE TABLE IF NOT EXISTS reserve (blank BLOB)")
        with contextlib.suppress(sqlite3.Error):  # without space to reserve it goes on with what it has
            db.execute("INSERT INTO reserve VALUES (zeroblob(?))", (RESERVED,))
            db.execute("DELETE FROM reserve")
            db.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def _read(self) -> tuple[int, Rows]:
        assert self._db is not None, "the store is closed"
        try:
            found = self._db.execute("SELECT name, value, digest FROM durable").fetchall()
        except sqlite3.Error as error:
            raise self._failed(error) from None
        for name, value, digest in found:
            if digest != state_id.digest(name, value):
                raise self._unusable(f"{name} is damaged")
        return self._format, {name: value for name, value, _ in found}

    def _write(self, rows: Rows) -> None:
        try:
            self._disk.run(partial(self._commit, rows))
        except TimeoutError as error:
            raise StoreFailed(f"lighthouse store {self.path}: {error}") from None

    def _commit(self, rows: Rows) -> None:
        assert self._db is not None, "the store is closed"
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany(
                "INSERT OR REPLACE INTO durable VALUES (?, ?, ?)",
                [(name, value, state_id.digest(name, value)) for name, value in rows.items()],
            )
            if self._format != FORMAT:
                self._db.execute(f"PRAGMA user_version = {FORMAT}")
            self._db.execute("COMMIT")
            self._format = FORMAT
        except sqlite3.Error as error:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            if self._saved and damaged(self.path, error):
                known = {name: _encode(name, value) for name, value in self._saved.items()}
                try:
                    self._renew(self._unusable(str(error)))
                except ConfigError as failed:
                    raise StoreFailed(str(failed)) from error
                self._commit({**known, **rows})
                return
            raise StoreFailed(f"lighthouse store {self.path}: {error}") from error


class StateSaver:
    """Makes states durable: what an answer depends on at once, the rest a little later. Used from one event loop.

    Args:
        state: What `Store.load` returned.
        note: Takes an event for the journal, its reason and facts, when the store fails and when it works again.
    """

    def __init__(
        self, state: LighthouseState, store: Store, note: Callable[[str, str, Mapping[str, object]], None]
    ) -> None:
        self._state = state
        self._store = store
        self._note = note
        self._later: asyncio.TimerHandle | None = None
        self._failing = False  # the store takes no writes

    def save(self, state: LighthouseState) -> None:
        """Return when all is durable that an answer from ``state`` depends on. Raises StoreFailed."""
        if self._store.unsaved(state) - MAY_LAG:
            self._write(state)
        elif state.head is not self._state.head and self._later is None:
            self._later = asyncio.get_running_loop().call_later(HEAD_LAG_S, self._write_late)
        self._state = state

    def close(self) -> None:
        """Write what lags behind."""
        if self._later is not None:
            self._later.cancel()
            self._write_late()

    def _write(self, state: LighthouseState) -> None:
        try:
            self._store.save(state)
        except StoreFailed as error:
            if not self._failing:
                self._failing = True
                why = f"{error}; no new epoch until it writes, members go on with their lease"
                self._note("StoreFailed", why, {})
            raise
        if self._failing:
            self._failing = False
            self._note("StoreFailed", "the store takes writes again", {"over": True})

    def _write_late(self) -> None:
        self._later = None
        try:
            self._write(self._state)
        except StoreFailed as error:
            _log.error("%s", error)


def finished(path: Path) -> bool | None:
    """Return whether the store at ``path`` says that every replica had the final state; None: it says nothing.

    A store that is empty or damaged says nothing; a damaged one is set aside.

    Raises:
        ConfigError: it cannot be read, or a lighthouse has it.
    """
    store = SqliteStore(path)
    try:
        _, rows = store._read()
    except StoreDamaged:
        return None
    finally:
        store.close()
    return rows["finished"] == _encode("finished", True) if "finished" in rows else None


def _encode(name: str, value: Any) -> str:
    """Return one durable field as JSON; a set is sorted, so that equal values are equal text."""
    value = tuple(sorted(value)) if isinstance(value, frozenset) else value
    return _DURABLE[name].dump_json(value, warnings=False).decode()


def put_aside(path: Path, why: str, note: Callable[[str, str], None] | None, error: FtHsdpError) -> None:
    """Set a damaged database aside, and say so. Raises ``error`` if it stays where it is."""
    try:
        aside = set_aside(path, *BESIDE)
    except OSError:
        raise error from None
    reason = f"{why}; it is in {aside.name}"
    _log.error("%s is damaged and set aside: %s", path, reason)
    if note is not None:
        note("DamagedFileSetAside", f"{path.name}: {reason}, and a new one is begun")


def full(error: sqlite3.Error) -> bool:
    """Return whether the disk, or this machine, did not do what SQLite asked of it; that may be over later."""
    return (getattr(error, "sqlite_errorcode", 0) & 0xFF) in FULL


def damaged(path: Path, error: sqlite3.Error) -> bool:
    """Return whether a database cannot be used because of what stands at ``path`` or beside it."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
    for file in (path, *(path.with_name(path.name + end) for end in BESIDE)):
        try:
            os.close(os.open(file, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
        except (PermissionError, IsADirectoryError):
            return True
        except OSError:  # it is not there, or this process lacks something: that is no damage
            if file.is_symlink() and not file.exists():
                return True
    return False


def _lock(path: Path) -> int:
    """Hold the sidecar file of the store at ``path`` until the returned descriptor is closed."""
    sidecar = path.with_name(path.name + ".lock")
    clear_way(sidecar)
    descriptor = os.open(sidecar, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise ConfigError(
            "lighthouse store", str(path), f"a store that no other lighthouse holds (pid {holder} does)"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor
