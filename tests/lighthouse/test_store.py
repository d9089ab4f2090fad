"""Every store keeps what must outlive the lighthouse; one suite shows it of all of them, etcd a real one.

What only SQLite can suffer from (rivals, damaged files) follows."""

import asyncio
import base64
import itertools
import os
import sqlite3
import threading
import time
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from unittest import mock

import httpx
import pytest

from ft_hsdp import mounts
from ft_hsdp.core import state_id
from ft_hsdp.core.host_report import EndedRank
from ft_hsdp.core.restart import FatalUnits, RestartState
from ft_hsdp.errors import ConfigError
from ft_hsdp.mounts import Mount
from lighthouse import __main__ as program
from lighthouse import store as stores
from lighthouse.ha.election import Election, EtcdStore
from lighthouse.ha.etcd import Etcd
from lighthouse.placement.state import PlacedReplica, Placement, ReplicaPhase
from lighthouse.quorum.events import Commanded
from lighthouse.quorum.rules import Barred, Edges
from lighthouse.quorum.state import Agreement, LighthouseState, Policy
from lighthouse.store import FORMAT, SqliteStore, StoreFailed
from tests.support.etcd_server import LossyEtcd
from tests.support.lighthouse.lighthouse_helpers import START, MemoryStore, Script, at, make_service, record

POLICY = Policy(slots=3, steps=10)
DURABLE = stores._DURABLE
NAMES = itertools.count()


class Memory:
    """Opens stores on the same rows."""

    def __init__(self, _):
        self.rows = {}

    def open(self):
        return MemoryStore(self.rows)

    def put(self, name, text):
        self.rows[name] = text

    def drop(self, name):
        del self.rows[name]


class Sqlite:
    """Opens stores on the same file."""

    def __init__(self, request):
        self.path = request.getfixturevalue("tmp_path") / "lighthouse" / "store.sqlite"

    def open(self):
        return SqliteStore(self.path)

    def sql(self, text, *values):
        with sqlite3.connect(self.path) as db:
            db.execute(text, values)
        db.close()

    def put(self, name, text):
        self.sql(
            "UPDATE durable SET value = ?, digest = ? WHERE name = ?", text, state_id.digest(name, text), name
        )

    def spoil(self, name):
        self.sql("UPDATE durable SET value = '41' WHERE name = ?", name)

    def drop(self, name):
        self.sql("DELETE FROM durable WHERE name = ?", name)

    def format(self, number):
        self.sql(f"PRAGMA user_version = {number}")

    @contextmanager
    def broken(self, store):
        rival = sqlite3.connect(self.path, isolation_level=None)
        rival.execute("BEGIN IMMEDIATE")
        store._db.execute("PRAGMA busy_timeout = 10")
        yield
        rival.execute("ROLLBACK")
        rival.close()


class InEtcd:
    """Opens stores on the same keys of a real etcd, each as the leader that it was elected for."""

    def __init__(self, request):
        self.server = request.getfixturevalue("etcd")
        self.prefix = f"/store/{next(NAMES)}"

    def open(self):
        return self.elected()[0]

    def elected(self):
        client = LossyEtcd((self.server.url,), 5.0)
        election = Election(client, f"{self.prefix}/leader", "http://here", 60)
        asyncio.run(election.win())
        store = EtcdStore(client, self.prefix, election)
        store.close = lambda: (election.resign(), client.close())
        return store, client, election

    def key(self, name):
        return f"{self.prefix}/durable/{name}"

    def raw(self, name, text):
        client = Etcd((self.server.url,), 5.0)
        assert client.put_if(f"{self.prefix}/none", 0, {self.key(name): text}, {}) is None
        client.close()

    def put(self, name, text):
        self.raw(name, f"{state_id.digest(name, text)} {text}")

    def spoil(self, name):
        self.raw(name, f"{state_id.digest(name, '40')} 41")

    def drop(self, name):
        key = base64.b64encode(self.key(name).encode()).decode()
        httpx.post(f"{self.server.url}/v3/kv/deleterange", json={"key": key}, trust_env=False).raise_for_status()

    def format(self, number):
        self.put("format", str(number))

    @contextmanager
    def broken(self, store):
        self.server.kill()
        yield
        self.server.start()


@pytest.fixture(params=[Memory, Sqlite, InEtcd])
def kind(request):
    return request.param(request)


@pytest.fixture(params=[Sqlite, InEtcd])
def lasting(request):
    """The kinds that outlive their process."""
    return request.param(request)


@pytest.fixture
def in_etcd(request):
    return InEtcd(request)


@pytest.fixture
def file(request):
    return Sqlite(request)


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
    more = {"finished": True, "halted": "nobody can tell", "diverged": (0, 1)}
    agreed = Agreement("hash", "layout", "numerics", (("train.steps", "10"),), "frozen", (("length", "160"),))
    more |= {"rewound": (1, 2, 3), "rewinding": True}
    more |= {"edges": Edges((((0, 1), 4),), (Barred(1, 0.0, 60.0),), 1)}
    ended = (("a", EndedRank(0, -9)),)
    fatal = FatalUnits((((0, 5, 2), 1),), ((1, 5, 2),), frozenset({0, 1}))
    me = PlacedReplica(("z/r/a",), ReplicaPhase.RUNS, "0-f-1", ("a",), (("ab", "here"),), ended=ended)
    more |= {
        "placement": Placement((me,), 3, ((0, me),), (("b", "it is broken"),), (("a", ("ab",)),), fatal=fatal)
    }
    return replace(job.s, **more, drained=frozenset({2}), checkpoint=7, target=2, agreed=agreed)


def reopened(kind, policy=POLICY):
    """What a store gives the next lighthouse."""
    store = kind.open()
    try:
        return store.load(policy)
    finally:
        store.close()


def saved(kind, state=None, **changes):
    """What a store has after it was opened, given this state in its own term, and closed."""
    store = kind.open()
    loaded = store.load(POLICY)
    state = replace(state or loaded, **{"term": loaded.term, **changes})
    store.save(state)
    store.close()
    return state


def test_an_empty_store_takes_a_term_never_used_before(kind):
    before = int(time.time())
    store = kind.open()
    state = store.load(POLICY)
    assert before <= state.term <= time.time()
    assert (state.fresh, state.epoch, state.head, state.grant) == (True, 0, None, None)
    assert len(state.views) == POLICY.slots
    store.close()


def test_what_was_saved_comes_back(kind):
    state = saved(kind, busy())
    again = reopened(kind)
    names = DURABLE.keys() - {"term"}
    assert {n: getattr(again, n) for n in names} == {n: getattr(state, n) for n in names}
    assert again.grant.reason == state.grant.reason
    assert again.term == state.term + 1
    unlike = LighthouseState.empty(POLICY, 0)
    assert all(getattr(state, n) != getattr(unlike, n) for n in names), "a field that this test cannot see"


def test_what_dies_with_the_process_does_not_come_back(kind):
    saved(kind, busy(), broken=True, since=12.0, final_since=9.0, settled=4)
    again = reopened(kind)
    assert (again.broken, again.since, again.final_since, again.settled) == (False, None, None, 0)
    assert all(v.incarnation is None and v.ask is None for v in again.views)


def test_every_load_is_a_new_term_even_if_nothing_was_granted(kind):
    states = [reopened(kind) for _ in range(3)]
    assert [state.term - states[0].term for state in states] == [0, 1, 2]
    assert all(state.fresh for state in states)


def test_the_policy_is_never_stored(kind):
    reopened(kind)
    other = replace(POLICY, slots=5, steps=7)
    assert reopened(kind, other).policy == other


def test_an_unchanged_state_costs_no_write_and_a_changed_one_only_its_fields(kind):
    store = kind.open()
    state = store.load(POLICY)
    assert not store.unsaved(replace(state, settled=3, since=1.0, broken=True))
    moved = replace(state, head=at(1, 1))
    assert store.unsaved(moved) == {"head"}
    store.save(moved)
    assert not store.unsaved(moved)
    store.close()


def test_a_halt_by_policy_is_decided_anew(kind):
    """The operator may have chosen another policy, or brought back who held the head."""
    placement = Placement((PlacedReplica(given_up="its budget is used up"),), wrong=True)
    saved(kind, halted="no copy of the head is left", placement=placement)
    assert [reopened(kind).halted for _ in range(2)] == [""] * 2
    assert reopened(kind).placement == Placement((PlacedReplica(restart=RestartState(1)),))


def test_a_failed_write_changes_nothing_and_is_told(lasting):
    store = lasting.open()
    state = store.load(POLICY)
    with lasting.broken(store):
        with pytest.raises(StoreFailed) as caught:
            store.save(replace(state, head=START, epoch=4))
        assert len(str(caught.value).splitlines()) == 1
    store.close()
    again = reopened(lasting)
    assert (again.epoch, again.head, again.term) == (0, None, state.term + 1)


def test_what_is_written_outlives_a_sudden_end(lasting):
    """Of the process that wrote, or of the etcd that was written to."""
    store = lasting.open()
    store.save(replace(store.load(POLICY), epoch=4))
    if isinstance(lasting, InEtcd):
        with lasting.broken(store):
            pass
    store.close()
    assert reopened(lasting).epoch == 4


@pytest.mark.parametrize(
    "damage",
    [
        lambda kind: kind.put("epochs", "[["),
        lambda kind: kind.put("epoch", '"many"'),
        lambda kind: kind.put("head", '{"step": 3}'),
        lambda kind: kind.drop("grant"),
    ],
    ids=["json", "type", "shape", "row"],
)
def test_damaged_content_counts_as_a_lost_store_or_is_one_clear_line(kind, damage):
    reopened(kind)
    damage(kind)
    (lost if isinstance(kind, Sqlite) else refused)(kind)


def test_a_damaged_value_counts_as_a_lost_store_or_is_one_clear_line(lasting):
    saved(lasting, epoch=4)
    lasting.spoil("epoch")
    (lost if isinstance(lasting, Sqlite) else refused)(lasting)


@pytest.mark.parametrize("number", [FORMAT - 1, 99])
def test_a_store_of_another_version_is_one_clear_line_and_stays(lasting, number):
    reopened(lasting)
    lasting.format(number)
    refused(lasting)
    lasting.format(FORMAT)
    assert not reopened(lasting).fresh or reopened(lasting).term


def lost(kind):
    """The file is set aside, and the next lighthouse begins as without a store, in a term never used before."""
    before, told = int(time.time()), []
    store = SqliteStore(kind.path, lambda *event: told.append(event))
    state = store.load(POLICY)
    store.close()
    assert (state.fresh, state.epoch, state.head) == (True, 0, None)
    assert state.term >= before
    (aside,) = kind.path.parent.glob("store.sqlite.damaged-*Z")
    ((event, reason),) = told
    assert event == "DamagedFileSetAside"
    assert aside.name in reason
    assert reopened(kind).term == state.term + 1, "the new one is kept"


def refused(kind):
    store = kind.open()
    with pytest.raises(ConfigError, match="lighthouse store") as caught:
        store.load(POLICY)
    assert caught.value.exit_code == 64
    assert len(str(caught.value).splitlines()) == 1
    store.close()


def test_a_deposed_lighthouse_decides_nothing_and_writes_nothing(in_etcd):
    """Not even what needs no write: its word is not the leader's."""
    old, client, _ = in_etcd.elected()
    state = old.load(POLICY)
    client.revoke(client.lease)  # as after a lease that ran out unnoticed
    new = in_etcd.open()
    successor = new.load(POLICY)
    assert successor.term > state.term
    with pytest.raises(StoreFailed, match="another lighthouse leads"):
        old.save(replace(state, epoch=9))
    with pytest.raises(StoreFailed, match="does not lead any more"):
        old.unsaved(state)
    with pytest.raises(StoreFailed):
        old.save(state)
    assert old.deposed
    client.close()
    new.save(replace(successor, epoch=1))
    new.close()
    assert reopened(in_etcd).epoch == 1


def test_the_term_is_never_below_the_fence_nor_below_one_that_was_used(in_etcd):
    saved(in_etcd, term=0)
    store, _, election = in_etcd.elected()
    state = store.load(POLICY)
    assert state.term == election.revision > 1
    store.save(replace(state, term=10**9))
    store.close()
    assert reopened(in_etcd).term == 10**9 + 1


def test_a_write_of_unknown_outcome_deposes(in_etcd):
    """It may have happened: only who reads the store anew knows what is in it."""
    store, client, _ = in_etcd.elected()
    state = store.load(POLICY)
    client.loses = True
    with pytest.raises(StoreFailed, match="may be lost or not"):
        store.save(replace(state, epoch=2))
    client.loses = False
    with pytest.raises(StoreFailed):
        store.save(replace(state, epoch=3))
    store.close()
    assert reopened(in_etcd).epoch == 2


def test_a_write_that_was_repeated_and_comes_late_undoes_no_newer_one(in_etcd):
    """As of a member of etcd that was frozen."""
    store, client, _ = in_etcd.elected()
    state = store.load(POLICY)
    client.repeats = True
    for epoch in (1, 2, 3):
        store.save(replace(state, epoch=epoch))
    for late in list(client.writes):
        assert client.put_if(*late) is not None
    store.save(replace(state, epoch=4))
    in_etcd.put("format", str(FORMAT))  # the leader has not written this
    with pytest.raises(StoreFailed, match="not as this"):
        store.save(replace(state, epoch=5))
    store.close()
    assert reopened(in_etcd).epoch == 4


def test_the_file_is_written_through(tmp_path):
    store = SqliteStore(tmp_path / "s.sqlite")
    database = store._db
    assert database is not None
    assert database.execute("PRAGMA synchronous").fetchone() == (2,), "FULL"
    assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    store.close()


def test_one_lighthouse_at_a_time(tmp_path):
    first = SqliteStore(tmp_path / "s.sqlite")
    with pytest.raises(ConfigError, match=r"no other lighthouse holds \(pid [0-9]+ does\)") as caught:
        SqliteStore(tmp_path / "s.sqlite")
    assert caught.value.exit_code == 64
    assert len(str(caught.value).splitlines()) == 1
    first.close()
    SqliteStore(tmp_path / "s.sqlite").close()


def text_in_its_place(path):
    path.write_bytes(b"this is no database, and never was" * 100)


def cut_short(path):
    path.write_bytes(path.read_bytes()[:5000])


def folders_beside(path):
    path.with_name(path.name + "-wal").mkdir()
    path.with_name(path.name + ".lock").unlink()
    path.with_name(path.name + ".lock").mkdir()


def pipe_in_its_place(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("damage", [text_in_its_place, cut_short, folders_beside, pipe_in_its_place])
def test_what_is_no_store_is_set_aside(file, damage):
    saved(file, epoch=4)
    damage(file.path)
    assert reopened(file).epoch == 0
    assert list(file.path.parent.glob("store.sqlite.damaged-*"))


def test_a_store_that_is_damaged_while_it_is_in_use_loses_nothing(file):
    told = []
    store = SqliteStore(file.path, lambda *event: told.append(event[0]))
    state = replace(busy(), term=store.load(POLICY).term)
    store.save(state)
    file.sql("PRAGMA wal_checkpoint(TRUNCATE)")
    with file.path.open("r+b") as bare:
        bare.write(b"\xee" * 65536)
    store._db.execute("PRAGMA shrink_memory")
    for step in range(2, 200):  # SQLite has some pages in memory, and meets the damage when it reads others
        state = replace(state, head=at(1, step), epoch=step)
        store.save(state)
    assert told in ([], ["DamagedFileSetAside"])
    store.close()
    again = reopened(file)
    assert (again.epoch, again.head) == (state.epoch, state.head) or (again.fresh and told == [])


def test_a_shortage_of_descriptors_is_no_damage(file, tmp_path):
    """SQLite cannot open the file, and the file is well."""
    path = file.path
    saved(file, epoch=4)
    failed = sqlite3.OperationalError("unable to open database file")
    failed.sqlite_errorcode = sqlite3.SQLITE_CANTOPEN
    assert not stores.damaged(path, failed)
    assert stores.full(failed)
    path.rename(tmp_path / "other")
    path.mkdir()
    assert stores.damaged(path, failed)


def test_a_place_that_cannot_be_written_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="lighthouse store"):
        SqliteStore(tmp_path / "file" / "s.sqlite")


# The lighthouse's store on a disk without space, which a limit of SQLite itself stands for.


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
    mine, sleep = {threading.get_ident(): slept.append}, time.sleep  # threads of other tests may sleep, too
    monkeypatch.setattr(time, "sleep", lambda seconds: mine.get(threading.get_ident(), sleep)(seconds))
    store = program._patiently(lambda: SqliteStore(tmp_path / "store.sqlite"))
    store.close()
    assert (len(tries), len(slept)) == (3, 2)


async def test_a_service_says_when_its_store_fails_and_when_that_is_over() -> None:
    store = MemoryStore()
    service, rows = make_service(store=store)
    store.full = True
    for replica in (0, 1):
        with pytest.raises(StoreFailed):
            service.apply(Commanded("drain", replica, "test", 0.0))
    store.full = False
    service.apply(Commanded("drain", 0, "test", 0.0))
    said = [(row["event"], row.get("over", False)) for row in rows if row["event"].startswith("Store")]
    assert said == [("StoreFailed", False), ("StoreFailed", True)]


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.glusterfs", "ext4", "9p"])
def test_a_network_file_system_is_no_place_for_the_store(tmp_path, kind) -> None:
    """Two lighthouses on two machines could both have its lock."""
    with mock.patch.object(mounts, "mount_of", return_value=Mount(tmp_path, kind, ())):
        if kind in ("ext4", "9p"):
            SqliteStore(tmp_path / "store.sqlite").close()
            return
        with pytest.raises(ConfigError, match=rf"lighthouse\.etcd: .*http://HOST:2379.*{kind}"):
            SqliteStore(tmp_path / "store.sqlite")
        assert not (tmp_path / "store.sqlite").exists()


class Hanging(SqliteStore):
    """A store whose disk answers while an event is set."""

    answers = threading.Event()

    def _commit(self, rows):
        self.answers.wait(30)
        super()._commit(rows)


def test_a_disk_that_hangs_takes_no_decision_and_holds_nobody_up(tmp_path):
    with closing(Hanging(tmp_path / "store.sqlite")) as store:
        store.answers.set()
        state = store.load(Policy(slots=2, steps=10))
        store.answers.clear()
        for epoch in (5, 6):
            with pytest.raises(StoreFailed, match="does not answer"):
                store.save(replace(state, epoch=epoch))
        store.answers.set()
        while store.unsaved(state):  # what was decided meanwhile counts for nothing
            with suppress(StoreFailed):  # the write that hung may not be over yet
                store.save(state)
    with closing(SqliteStore(tmp_path / "store.sqlite")) as store:
        assert store.load(Policy(slots=2, steps=10)).epoch == state.epoch
