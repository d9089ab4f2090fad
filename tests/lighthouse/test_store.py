"""Both stores keep what must outlive the lighthouse; SQLite also survives damage, rivals and the process."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from lighthouse_helpers import START, Script, at, record

from ft_hsdp.core import lineage
from ft_hsdp.errors import ConfigError
from lighthouse.state import Policy
from lighthouse.store import MemoryStore, SqliteStore, StoreFailed

POLICY = Policy(total=3, steps=10)
DURABLE = ("fresh", "head", "epoch", "epochs", "exited", "grant", "finished")


class Memory:
    """Opens stores on the same rows."""

    def __init__(self, _):
        self.rows = {}

    def open(self):
        return MemoryStore(self.rows)


class Sqlite:
    """Opens stores on the same file."""

    def __init__(self, folder):
        self.path = folder / "lighthouse" / "store.sqlite"

    def open(self):
        return SqliteStore(self.path)


@pytest.fixture(params=[Memory, Sqlite])
def kind(request, tmp_path):
    return request.param(tmp_path)


def busy():
    """A state in which every durable field holds something."""
    job = Script()
    job.first(0, 1, 2)
    job.ask(0, at(1, 1), epoch=1)
    job.ask(1, at(1, 1), epoch=1)
    job.runs({2: None}, exited=[(2, 0)])
    job.ask(0, at(1, 1), epoch=1, after=1, prepared=record(at(1, 1), 1))
    job.ask(1, at(1, 1), epoch=1, after=1)
    assert job.s.grant
    return replace(job.s, finished=True)


# The suite that every store passes.


def test_an_empty_store_takes_a_term_never_used_before(kind):
    before = int(time.time())
    store = kind.open()
    state = store.load(POLICY)
    assert before <= state.term <= time.time()
    assert (state.fresh, state.epoch, state.head, state.grant) == (True, 0, None, None)
    assert len(state.views) == POLICY.total
    store.close()


def test_what_was_saved_comes_back(kind):
    store = kind.open()
    state = replace(busy(), term=store.load(POLICY).term)
    store.save(state)
    store.close()
    store = kind.open()
    again = store.load(POLICY)
    store.close()
    assert {n: getattr(again, n) for n in DURABLE} == {n: getattr(state, n) for n in DURABLE}
    assert again.grant.reason == state.grant.reason
    assert again.term == state.term + 1


def test_what_dies_with_the_process_does_not_come_back(kind):
    store = kind.open()
    store.load(POLICY)
    store.save(replace(busy(), broken=True, since=12.0, final_since=9.0, settled=4))
    store.close()
    store = kind.open()
    again = store.load(POLICY)
    store.close()
    assert (again.broken, again.since, again.final_since, again.settled) == (False, None, None, 0)
    assert all(v.incarnation is None and v.ask is None for v in again.views)


def test_every_load_is_a_new_term_even_if_nothing_was_granted(kind):
    terms = []
    for _ in range(3):
        store = kind.open()
        terms.append(store.load(POLICY).term)
        store.close()
    assert terms == [terms[0], terms[0] + 1, terms[0] + 2]


def test_fresh_stays_until_the_first_grant(kind):
    for _ in range(2):
        store = kind.open()
        assert store.load(POLICY).fresh
        store.close()


def test_the_policy_is_never_stored(kind):
    store = kind.open()
    store.load(POLICY)
    store.close()
    store = kind.open()
    assert store.load(replace(POLICY, total=5, steps=7)).policy == replace(POLICY, total=5, steps=7)
    store.close()


# What each does in its own way.


def test_an_unchanged_state_costs_no_write_and_a_changed_one_only_its_fields(monkeypatch):
    store = MemoryStore()
    state = store.load(POLICY)
    assert store.writes == 1
    store.save(state)
    store.save(replace(state, settled=3, since=1.0, broken=True))
    assert store.writes == 1
    written: list[dict[str, str]] = []
    monkeypatch.setattr(store, "_write", written.append)
    store.save(replace(state, head=at(1, 1)))
    assert [sorted(rows) for rows in written] == [["head"]]


def test_a_failed_write_changes_nothing_and_is_tried_again(tmp_path):
    store = SqliteStore(tmp_path / "s.sqlite")
    state = store.load(POLICY)
    rival = sqlite3.connect(tmp_path / "s.sqlite", isolation_level=None)
    rival.execute("BEGIN IMMEDIATE")
    assert store._db is not None
    store._db.execute("PRAGMA busy_timeout = 10")
    moved = replace(state, head=START, epoch=4)
    with pytest.raises(StoreFailed, match="locked"):
        store.save(moved)
    rival.execute("ROLLBACK")
    assert rival.execute("SELECT value FROM durable WHERE name = 'epoch'").fetchone() == ("0",)
    store.save(moved)
    assert rival.execute("SELECT value FROM durable WHERE name = 'epoch'").fetchone() == ("4",)
    rival.close()
    store.close()


def test_the_file_is_written_through(tmp_path):
    store = SqliteStore(tmp_path / "s.sqlite")
    assert store._db is not None
    assert store._db.execute("PRAGMA synchronous").fetchone() == (2,), "FULL"
    assert store._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    store.close()


def test_one_lighthouse_at_a_time(tmp_path):
    first = SqliteStore(tmp_path / "s.sqlite")
    with pytest.raises(ConfigError, match=r"no other lighthouse holds \(pid [0-9]+ does\)") as caught:
        SqliteStore(tmp_path / "s.sqlite")
    assert caught.value.exit_code == 64
    assert len(str(caught.value).splitlines()) == 1
    first.close()
    SqliteStore(tmp_path / "s.sqlite").close()


def test_the_death_of_its_holder_frees_the_store(tmp_path):
    code = (
        "import sys, pathlib, time; from lighthouse.store import SqliteStore;"
        "store = SqliteStore(pathlib.Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "s.sqlite")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=str(holder.pid)):
            SqliteStore(tmp_path / "s.sqlite")
        holder.kill()
        holder.wait(10)
    SqliteStore(tmp_path / "s.sqlite").close()


def damage_bytes(path):
    path.write_bytes(b"this is no database, and never was" * 100)


def damage_value(path):
    with sqlite3.connect(path) as db:
        db.execute("UPDATE durable SET value = '41' WHERE name = 'epoch'")
    db.close()


def damage_row(path):
    with sqlite3.connect(path) as db:
        db.execute("DELETE FROM durable WHERE name = 'grant'")
    db.close()


def damage_json(path):
    with sqlite3.connect(path) as db:
        db.execute(
            "UPDATE durable SET value = '[[', digest = ? WHERE name = 'epochs'",
            (lineage.digest("epochs", "[["),),
        )
    db.close()


def damage_format(path):
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()


@pytest.mark.parametrize(
    "damage", [damage_bytes, damage_value, damage_row, damage_json, damage_format], ids=lambda f: f.__name__
)
def test_a_corrupt_store_is_one_clear_line(tmp_path, damage):
    path = tmp_path / "s.sqlite"
    store = SqliteStore(path)
    store.load(POLICY)
    store.close()
    for extra in tmp_path.glob("s.sqlite-*"):
        extra.unlink()
    damage(path)
    with pytest.raises(ConfigError, match="lighthouse store") as caught:
        SqliteStore(path).load(POLICY)
    assert caught.value.exit_code == 64
    assert len(str(caught.value).splitlines()) == 1
    assert str(path) in str(caught.value)


def test_a_place_that_cannot_be_written_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="lighthouse store"):
        SqliteStore(tmp_path / "file" / "s.sqlite")
