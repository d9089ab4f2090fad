"""The store: what must outlive the lighthouse, written before any answer that depends on it leaves.

Durable are the term, the epochs and their members, the head, the current grant, the known exits, the numbers of
incarnations, which supervisor may start a replica, what all replicas agreed on, which connections failed, what
operators ordered, and why the job was halted (`_DURABLE`). Each field is one row of JSON under the field's name,
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ft_hsdp.core import state_id
from ft_hsdp.core.grant import Grant
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import ConfigError, Retryable
from ft_hsdp.mounts import LOCKLESS, mount_of
from lighthouse.quorum.rules import AdmittedIncarnation, Edges, Epoch, Incarnation, Lease, remembered
from lighthouse.quorum.state import Agreement, LighthouseState, Policy

# Of the rows that are written; older ones are read. Since 6 a grant counts units, since 7 it names hosts.
FORMAT = 7
LOCK_WAIT_S = 2.0  # longest wait of one transaction for a reader
RESERVED = 256 << 10  # bytes that a file of SQLite keeps free for writes on a full disk
LOG_PAGES = 48  # the write-ahead log begins anew after this many; `RESERVED` has room for more
HEAD_LAG_S = 0.1  # the durable head may lag by this much; a grant always takes it along
# An answer to a member that goes on depends on neither: replicas know the head.
MAY_LAG = frozenset({"head", "edges"})
FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)  # errors that may be over later

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Durable:
    """How a field of `LighthouseState` is kept."""

    adapter: TypeAdapter[Any]
    since: int = 1  # the first format that has it; from an older store the field gets its default


_DURABLE = {
    "term": Durable(TypeAdapter(int)),
    "fresh": Durable(TypeAdapter(bool)),
    "head": Durable(TypeAdapter(StateId | None)),
    "epoch": Durable(TypeAdapter(int)),
    "epochs": Durable(TypeAdapter(tuple[Epoch, ...])),
    "exited": Durable(TypeAdapter(frozenset[Incarnation])),
    "grant": Durable(TypeAdapter(Grant | None)),
    "finished": Durable(TypeAdapter(bool)),
    "halted": Durable(TypeAdapter(str), since=2),
    "diverged": Durable(TypeAdapter(tuple[int, ...]), since=2),
    "drained": Durable(TypeAdapter(frozenset[int]), since=2),
    "checkpoint": Durable(TypeAdapter(int), since=2),
    "target": Durable(TypeAdapter(int), since=3),
    "lives": Durable(TypeAdapter(tuple[AdmittedIncarnation, ...]), since=4),
    "leases": Durable(TypeAdapter(tuple[Lease, ...]), since=4),
    "agreed": Durable(TypeAdapter(Agreement | None), since=4),
    "rewound": Durable(TypeAdapter(tuple[int, ...]), since=4),
    "rewinding": Durable(TypeAdapter(bool), since=4),
    "edges": Durable(TypeAdapter(Edges), since=5),
}

Rows = dict[str, str]
"""JSON of each durable field of `LighthouseState`, by the field's name."""


class StoreFailed(Retryable):
    """The store did not take a write: the lighthouse must not tell what it decided."""


class Store(ABC):
    """Where the durable part of a `LighthouseState` is kept, as rows of JSON.

    A subclass keeps the rows and the format that they have.
    """

    def __init__(self) -> None:
        self._saved: dict[str, Any] = {}

    @abstractmethod
    def close(self) -> None:
        """Let another lighthouse have the store."""

    @abstractmethod
    def _read(self) -> tuple[int, Rows]:
        """Return the format and all rows. Raises ConfigError."""

    @abstractmethod
    def _write(self, rows: Rows) -> None:
        """Replace these rows, all or none; the format is `FORMAT` from now on. Raises StoreFailed."""

    def load(self, policy: Policy) -> LighthouseState:
        """Return the state to go on from, in a term of its own that is durable already.

        An empty store takes a term that was never used before: the Unix time. A halt by policy is decided anew,
        from the head; one because states differ cannot be decided again, so it stays. Numbers of incarnations go
        on at the Unix time in milliseconds: above all that were given with a store that is lost now, or with this
        one after it was copied.

        Raises:
            ConfigError: the store cannot be read; one line, exit code 64.
        """
        found, rows = self._read()
        if rows:
            self._saved = self._decode(found, rows)
            kept = {**self._saved, "term": self._saved["term"] + 1}
            if not kept.get("diverged"):
                kept.pop("halted", None)
        else:
            kept = {"term": int(time.time())}
        state = replace(LighthouseState.empty(policy, 0), **kept)
        state = replace(state, term=max(state.term, self._least_term), target=min(state.target, policy.slots))
        state = replace(state, admissions=int(time.time() * 1000), edges=remembered(state.edges))
        self.save(state)
        return state

    def save(self, state: LighthouseState) -> None:
        """Make the durable part of ``state`` outlive this process; write only the fields that have changed.

        Blocks until it does.

        Raises:
            StoreFailed: the store holds what it held before.
        """
        changed = {name: getattr(state, name) for name in self.unsaved(state)}
        if changed:
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
        if not 1 <= found <= FORMAT:
            raise self._unusable(f"format {found}, this version reads 1 to {FORMAT}")
        wanted = {name: field.adapter for name, field in _DURABLE.items() if field.since <= found}
        if rows.keys() != wanted.keys():
            raise self._unusable(f"not as it was written: {', '.join(sorted(wanted.keys() ^ rows.keys()))}")
        try:
            return {name: adapter.validate_json(rows[name], strict=True) for name, adapter in wanted.items()}
        except ValidationError as error:
            raise self._unusable(str(error).splitlines()[0]) from None

    def _unusable(self, why: str) -> ConfigError:
        return ConfigError("lighthouse store", self._name, f"a store that is whole ({why})")

    @property
    def _least_term(self) -> int:
        """The next term is not below this."""
        return 0

    @property
    @abstractmethod
    def _name(self) -> str:
        """The name of the store in an error."""


class SqliteStore(Store):
    """A store in the file ``path``, for one lighthouse at a time; power loss does not undo a write.

    It reserves space, so that it still takes writes when the disk becomes full later: they go where the file and
    its log have been written before.

    Raises:
        ConfigError: another lighthouse has it, or it cannot be opened; one line, exit code 64.
        StoreFailed: the disk is full or fails.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._db: sqlite3.Connection | None = None
        self._lock: int | None = None
        self._format = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            mount = mount_of(path)
            if mount is not None and mount.kind in LOCKLESS:
                allowed = f"a local disk ({mount.place} is {mount.kind}, where locks may fail), or lighthouse.etcd"
                raise ConfigError("lighthouse store", str(path), allowed)
            self._lock = _lock(path)
            self._db = sqlite3.connect(path, timeout=LOCK_WAIT_S, isolation_level=None, check_same_thread=False)
            self._prepare(self._db)
        except OSError as error:
            self.close()
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise StoreFailed(f"lighthouse store {path}: {error.strerror}") from None
            raise ConfigError("lighthouse store", str(path), f"a file to write ({error.strerror})") from None
        except sqlite3.Error as error:
            self.close()
            if full(error):
                raise StoreFailed(f"lighthouse store {path}: {error}") from None
            raise self._unusable(str(error)) from None
        except ConfigError:
            self.close()
            raise

    def close(self) -> None:
        """Close the database and release the lock."""
        if self._db is not None:
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
            raise self._unusable(str(error)) from None
        for name, value, digest in found:
            if digest != state_id.digest(name, value):
                raise self._unusable(f"{name} is damaged")
        return self._format, {name: value for name, value, _ in found}

    def _write(self, rows: Rows) -> None:
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
            raise StoreFailed(f"lighthouse store {self.path}: {error}") from error

    @property
    def _name(self) -> str:
        return str(self.path)


class StateSaver:
    """Makes states durable: what an answer depends on at once, the rest a little later. Used from one event loop.

    Args:
        state: What `Store.load` returned.
        store: Where states are kept.
        note: Takes an event for the journal and its reason, when the store fails and when it works again.
    """

    def __init__(self, state: LighthouseState, store: Store, note: Callable[[str, str], None]) -> None:
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
                self._note("StoreFailed", f"{error}; no new epoch until it writes, members go on with their lease")
            raise
        if self._failing:
            self._failing = False
            self._note("StoreRecovered", "the store takes writes again")

    def _write_late(self) -> None:
        """Make the newest state durable; after a failure the next write takes it along."""
        self._later = None
        try:
            self._write(self._state)
        except StoreFailed as error:
            _log.error("%s", error)


def finished(path: Path) -> bool:
    """Return whether the store in the file ``path`` says that every replica had the final state.

    Raises:
        ConfigError: it cannot be read, or a lighthouse has it.
    """
    store = SqliteStore(path)
    try:
        _, rows = store._read()
    finally:
        store.close()
    return rows.get("finished") == _encode("finished", True)


def _encode(name: str, value: Any) -> str:
    """Return one durable field as JSON; a set is sorted, so that equal values are equal text."""
    value = tuple(sorted(value)) if isinstance(value, frozenset) else value
    return _DURABLE[name].adapter.dump_json(value, warnings=False).decode()


def full(error: sqlite3.Error) -> bool:
    """Return whether the disk did not do what SQLite asked of it; that may be over later."""
    return (getattr(error, "sqlite_errorcode", 0) & 0xFF) in FULL


def _lock(path: Path) -> int:
    """Hold the sidecar file of the store at ``path`` until the returned descriptor is closed."""
    sidecar = path.with_name(path.name + ".lock")
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
