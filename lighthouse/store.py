"""The store: what must outlive the lighthouse, written before any answer that depends on it leaves.

Durable are the term, the epochs and their members, the head, the current grant and the known exits. All of it is
JSON that is validated on the way back.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter, ValidationError

from ft_hsdp.core import lineage
from ft_hsdp.core.assignment import Grant
from ft_hsdp.core.lineage import StateId
from ft_hsdp.errors import ConfigError, Retryable
from lighthouse.quorum import Epoch, Incarnation
from lighthouse.state import Policy, State

FORMAT = 1
LOCK_WAIT_S = 2.0  # longest wait of one transaction for a reader

_DURABLE: dict[str, TypeAdapter[Any]] = {
    "term": TypeAdapter(int),
    "fresh": TypeAdapter(bool),
    "head": TypeAdapter(StateId | None),
    "epoch": TypeAdapter(int),
    "epochs": TypeAdapter(tuple[Epoch, ...]),
    "exited": TypeAdapter(frozenset[Incarnation]),
    "grant": TypeAdapter(Grant | None),
    "finished": TypeAdapter(bool),
}

Rows = dict[str, str]
"""JSON of each durable field of `State`, by the field's name."""


class StoreFailed(Retryable):
    """The store did not take a write: what was decided must not be told."""


class Store(Protocol):
    """Where the durable part of a `State` is kept."""

    def load(self, policy: Policy) -> State:
        """The state to go on from, in a term of its own that is durable already.

        Raises ConfigError, one line with exit code 64, for a store that cannot be read.
        """

    def save(self, state: State) -> None:
        """Make the durable part of `state` outlive this process; nothing is written where it is unchanged.

        Raises StoreFailed; then the store still holds what it held before.
        """

    def close(self) -> None:
        """Let another lighthouse have the store."""


class _JsonStore(ABC):
    """A `Store` on rows of JSON; a subclass keeps the rows."""

    def __init__(self) -> None:
        self._saved: dict[str, Any] = {}

    @abstractmethod
    def _read(self) -> Rows:
        """All rows."""

    @abstractmethod
    def _write(self, rows: Rows) -> None:
        """Replace these rows, all or none."""

    def load(self, policy: Policy) -> State:
        """See `Store`. An empty store takes a term that was never used before: the Unix time."""
        rows = self._read()
        if rows:
            self._saved = self._decode(rows)
            state = replace(State.empty(policy, 0), **{**self._saved, "term": self._saved["term"] + 1})
        else:
            state = State.empty(policy, int(time.time()))
        self.save(state)
        return state

    def save(self, state: State) -> None:
        """See `Store`."""
        changed: dict[str, Any] = {}
        for name in _DURABLE:
            value = getattr(state, name)
            if name not in self._saved or (value is not self._saved[name] and value != self._saved[name]):
                changed[name] = value
        if changed:
            self._write({name: _encode(name, value) for name, value in changed.items()})
            self._saved.update(changed)

    def _decode(self, rows: Mapping[str, str]) -> dict[str, Any]:
        """The values in `rows`; ConfigError if any is missing or not valid."""
        if rows.keys() != _DURABLE.keys():
            raise self._unusable(f"it lacks {', '.join(sorted(_DURABLE.keys() ^ rows.keys()))}")
        try:
            return {name: adapter.validate_json(rows[name], strict=True) for name, adapter in _DURABLE.items()}
        except ValidationError as error:
            raise self._unusable(str(error).splitlines()[0]) from None

    def _unusable(self, why: str) -> ConfigError:
        return ConfigError("lighthouse store", self._name, f"a store that is whole ({why})")

    @property
    @abstractmethod
    def _name(self) -> str:
        """What to call it in an error."""


class MemoryStore(_JsonStore):
    """A store that dies with its process; for tests. `rows` may be given to another one."""

    def __init__(self, rows: Rows | None = None) -> None:
        super().__init__()
        self.rows: Rows = {} if rows is None else rows
        self.writes = 0

    def close(self) -> None:
        """See `Store`."""

    def _read(self) -> Rows:
        return dict(self.rows)

    def _write(self, rows: Rows) -> None:
        self.rows.update(rows)
        self.writes += 1

    @property
    def _name(self) -> str:
        return "in memory"


class SqliteStore(_JsonStore):
    """A store in the file `path`, for one lighthouse at a time; power loss does not undo a write.

    Raises ConfigError, one line with exit code 64: another lighthouse has it, or it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._db: sqlite3.Connection | None = None
        self._lock: int | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(path)
            self._db = sqlite3.connect(path, timeout=LOCK_WAIT_S, isolation_level=None, check_same_thread=False)
            self._prepare(self._db)
        except OSError as error:
            self.close()
            raise ConfigError("lighthouse store", str(path), f"a file to write ({error.strerror})") from None
        except sqlite3.Error as error:
            self.close()
            raise self._unusable(str(error)) from None
        except ConfigError:
            self.close()
            raise

    def close(self) -> None:
        """See `Store`."""
        if self._db is not None:
            self._db.close()
            self._db = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _prepare(self, db: sqlite3.Connection) -> None:
        """Check the file and make its table."""
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        problem = db.execute("PRAGMA quick_check").fetchone()[0]
        if problem != "ok":
            raise self._unusable(problem)
        found = db.execute("PRAGMA user_version").fetchone()[0]
        if found not in (0, FORMAT):
            raise self._unusable(f"format {found}, this version reads {FORMAT}")
        db.execute("CREATE TABLE IF NOT EXISTS durable (name TEXT PRIMARY KEY, value TEXT, digest TEXT)")
        db.execute(f"PRAGMA user_version = {FORMAT}")

    def _read(self) -> Rows:
        assert self._db is not None, "the store is closed"
        try:
            found = self._db.execute("SELECT name, value, digest FROM durable").fetchall()
        except sqlite3.Error as error:
            raise self._unusable(str(error)) from None
        for name, value, digest in found:
            if digest != lineage.digest(name, value):
                raise self._unusable(f"{name} is damaged")
        return {name: value for name, value, _ in found}

    def _write(self, rows: Rows) -> None:
        assert self._db is not None, "the store is closed"
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany(
                "INSERT OR REPLACE INTO durable VALUES (?, ?, ?)",
                [(name, value, lineage.digest(name, value)) for name, value in rows.items()],
            )
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise StoreFailed(f"lighthouse store {self.path}: {error}") from error

    @property
    def _name(self) -> str:
        return str(self.path)


def _encode(name: str, value: Any) -> str:
    """One durable field as JSON; a set is sorted, so that equal values are equal text."""
    plain = _DURABLE[name].dump_python(value, mode="json")
    return json.dumps(sorted(plain) if isinstance(value, frozenset) else plain, separators=(",", ":"))


def _lock(path: Path) -> int:
    """Hold the sidecar file of the store at `path` until the returned descriptor is closed."""
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
