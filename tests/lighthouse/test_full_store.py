"""The lighthouse's store on a disk without space, which a limit of SQLite itself stands for."""

from __future__ import annotations

import itertools
import sqlite3
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lighthouse import __main__ as program
from lighthouse.quorum.state import LighthouseState, Policy
from lighthouse.service import Service
from lighthouse.store import MemoryStore, SqliteStore, StoreFailed

POLICY = Policy(slots=3, steps=10)


class Failing(MemoryStore):
    """Takes writes only while `well`."""

    well = True

    def _write(self, rows: dict[str, str]) -> None:
        if not self.well:
            raise StoreFailed("database or disk is full")
        super()._write(rows)


def test_writes_go_where_space_was_set_aside(tmp_path: Path) -> None:
    """Many more writes than the log holds grow neither the store nor its log."""
    path = tmp_path / "store.sqlite"
    store = SqliteStore(path)
    state = store.load(POLICY)
    sizes = set()
    for target in itertools.islice(itertools.cycle((1, 2, 3)), 400):
        store.save(replace(state, target=target, drained=frozenset({target})))
        sizes.add((path.stat().st_size, path.with_name("store.sqlite-wal").stat().st_size))
    store.close()
    assert len(sizes) == 1
    assert sizes.pop()[0] > 256 << 10


def test_a_disk_that_is_full_at_the_start_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, tries, slept = sqlite3.connect, [], []

    def full(*arguments: object, **more: object) -> sqlite3.Connection:
        tries.append(arguments)
        if len(tries) < 3:
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return real(*arguments, **more)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(sqlite3, "connect", full)
    monkeypatch.setattr(time, "sleep", slept.append)
    store = program._patiently(lambda: SqliteStore(tmp_path / "store.sqlite"))
    store.close()
    assert (len(tries), len(slept)) == (3, 2)


def test_a_service_says_when_its_store_fails_and_when_that_is_over() -> None:
    rows: list[str] = []
    store = Failing()
    service = Service(store.load(POLICY), store, "token", lambda row: rows.append(str(row["event"])))
    store.well = False
    for target in (2, 1):
        with pytest.raises(StoreFailed):
            service._saver.save(replace(LighthouseState.empty(POLICY, 1), target=target))
    store.well = True
    service._saver.save(replace(LighthouseState.empty(POLICY, 1), target=2))
    assert rows == ["StoreFailed", "StoreRecovered"]
