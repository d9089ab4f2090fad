"""What cannot be true, or belongs to another job, is refused and changes nothing."""

import asyncio
from dataclasses import replace

import pytest

from ft_hsdp import protocol
from ft_hsdp.config import agreed, config_hash, parse
from ft_hsdp.core.commit import MAX_ROWS, MAX_RUNS, AttemptId, CommitRecord, Contribution
from ft_hsdp.core.grant import Grant, Refused
from ft_hsdp.core.host_report import MachineRanks
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import ProtocolViolation
from ft_hsdp.protocol import ProcessReport, QuorumRequest
from lighthouse import runtime, validation
from lighthouse.http.access import Keys
from lighthouse.quorum.state import Agreement
from lighthouse.runtime import policy
from tests.support.lighthouse.lighthouse_helpers import (
    CONFIG_HASH,
    TOKEN,
    MemoryStore,
    ask,
    at,
    events,
    granted,
    make_service,
    name,
    quiet,
    refusal,
)
from tests.support.refused import refused

RECORD = CommitRecord(1, 0, 1, "0" * 32, (0, 1), 2, (Contribution(0, 1, 0, 0),), "d")


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (ask(2), "replica is 2; possible: 0 to 1"),
        (ask(-1), "replica is -1"),
        (ask(0, at(1, 13)), "state.step is 13; possible: 0 to 12"),
        (ask(0, step=2**62), "step"),
        (ask(0, epoch=2**41), "epoch"),
        (ask(0, at(2**41, 1)), "state.commit_epoch"),
        (ask(0, max_term=2**60), "max_term"),
        (ask(0, equal=(5,)), "equal"),
        (ask(0, StateId(0, 0, "not hex")), "state.lineage"),
        (replace(ask(0), report=replace(ask(0).report, incarnation="1-run-0")), "incarnation"),
        (replace(ask(0), report=replace(ask(0).report, incarnation="0-a b")), "incarnation"),
        (ask(0, equal=(1, 1)), "equal names 2 replicas; possible: each of 2 once"),
        (ask(0, saved=2**62), "saved"),
        (ask(0, void=AttemptId(1, 1, 2**40)), "void.attempt"),
        (ask(0, doubt=StateId(0, 2**62, "0" * 32)), "doubt.step"),
        (ask(0, step=10**5000), "step is a very large number"),
        (ask(0, prepared=replace(RECORD, ring=tuple(range(10**6)))), "prepared.ring names 1000000 replicas"),
        (ask(0, prepared=replace(RECORD, contributions=RECORD.contributions * 10**5)), "prepared.contributions"),
        (ask(0, prepared=replace(RECORD, contributions=(Contribution(0, 2**60, 0, 0),))), "a weight of"),
        (ask(0, prepared=replace(RECORD, contributions=(Contribution(0, 1, 7, 0),))), "units of data shard 7"),
        (ask(0, prepared=replace(RECORD, contributions=(Contribution(1, 1, 0, 0, units=0),))), "0 units from 0"),
        (ask(0, prepared=replace(RECORD, wanted=2**60)), "prepared.wanted"),
        (ask(0, prepared=replace(RECORD, spoiled=((0, 0, 1),) * 10**5)), "prepared.spoiled is 100000"),
        (ask(0, prepared=replace(RECORD, spoiled=((0, 5, 2**62),))), "prepared.spoiled"),
        (ask(0, prepared=replace(RECORD, contributions=(Contribution(7, 1, 0, 0),))), "replicas .7. contributed"),
        (ask(0, prepared=replace(RECORD, outliers=(7,))), "prepared.outliers"),
        (ask(0, prepared=replace(RECORD, prev="z" * 32)), "prepared.prev"),
        (ask(0, prepared=replace(RECORD, digest="d" * 10**5)), "prepared.digest has 100000 characters"),
        (ask(0, prepared=replace(RECORD, step=2**62)), "prepared.step"),
        (ask(0, prepared=replace(RECORD, chunk_bytes=-1)), "prepared.chunk_bytes"),
        (replace(ask(0), report=replace(ask(0).report, incarnation="0-" + "x" * 10**5)), "incarnation"),
        (replace(ask(0), ring=("nowhere",)), "host:port"),
        (replace(ask(0), state=("h:1",) * 65), "host:port"),
        (replace(ask(0), hosts=(("n0", 2),)), "hosts has 1 hosts with other than 1 ranks"),
        (replace(ask(0), hosts=(("n0", 1),) * 10**5), "hosts has 100000 hosts"),
        (replace(ask(0), hosts=(("n0", ((0, 1),) * 10**5),)), "hosts has 1 hosts with other than 1 ranks"),
        (replace(ask(0), hosts=(("n0", ((0, 10**9),)),)), "hosts has 1 hosts with other than 1 ranks"),
        (replace(ask(0), hosts=(("n0", ((1, 1),)),)), "hosts names a rank twice, or one that is not below 1"),
        (replace(ask(0), hosts=(("a/b/c/n0", 1),)), "hosts: 'a/b/c/n0' is not zone/rack/host, rack/host"),
        (replace(ask(0), hosts=(("n" * 10**5, 1),)), "hosts: 'nnn"),
        (replace(ask(0), hosts=(("n0\n", 1),)), "hosts: 'n0.n' is not"),
    ],
    ids=lambda v: v[:20] if isinstance(v, str) else "",
)
async def test_an_ask_that_cannot_be_true_is_refused(bad, field):
    service, rows = make_service()
    before = service.state
    with pytest.raises(ProtocolViolation, match=field):
        await service.ask(bad)
    assert service.state == before
    assert [r["event"] for r in rows] == ["AskRefused"]


def test_a_record_of_replicas_that_trained_several_runs_is_believed():
    """In holes and at the cursor, and more of them after a loss."""
    service, _ = make_service()
    runs = range(MAX_ROWS)
    rows = tuple(Contribution(r, 4, r, 9 * n, 1.0, 4, max(0, n - MAX_RUNS + 1)) for r in (0, 1) for n in runs)
    record = replace(RECORD, contributions=rows, spoiled=tuple(c.run for c in rows), retries=3, wanted=60)
    validation.check_ask(service.state, ask(0, prepared=record))


async def test_limits_follow_the_head_and_the_epoch():
    service, _ = make_service(total=1)
    answer = await service.ask(ask(0, at(2**20, 3), epoch=2**20))
    assert answer.epoch == 2**20 + 1
    assert (await service.ask(ask(0, at(2**20, 3), epoch=2**20))).epoch == 2**20 + 1


@pytest.mark.parametrize("field", ["epoch", "max_term", "number"])
async def test_numbers_grow_by_little_and_the_largest_that_is_let_in_ends_nobody(field):
    """What one wrong report may leave behind is far below what is refused."""
    service, _ = make_service()
    await granted(service, 0, 1)
    with pytest.raises(ProtocolViolation, match=field):
        await service.ask(ask(0, **{"epoch": 1, field: 2**50}))
    known = {"epoch": service.state.epoch, "max_term": service.state.term, "number": service.state.admissions}
    more = {"epoch": 2**20, "max_term": 2**32, "number": 2**32}[field]
    service.submit(ask(0, **{"epoch": 1, field: known[field] + more}))
    s = service.state
    for largest in (
        {"epoch": s.epoch + 1},
        {"max_term": s.term + 1},
        {"number": max(n.number for n in s.lives) + 1},
    ):
        validation.check_ask(replace(s, grant=None), ask(1, **largest))


@pytest.mark.parametrize(
    "bad",
    [
        ProcessReport("2-run-0"),
        ProcessReport("nonsense"),
        ProcessReport(machine=MachineRanks("2-run-0", "a", 1, gone=True)),
        ProcessReport(machine=MachineRanks(name(0), "a/b", 1, gone=True)),
        ProcessReport(machine=MachineRanks(name(0), "a", 0, gone=True)),
    ],
)
def test_a_report_that_cannot_be_true_is_refused(bad):
    service, _ = make_service()
    with pytest.raises(ProtocolViolation):
        service.processes(bad)


STEPS = {"train.steps": "60"}


@pytest.mark.parametrize(
    ("agreed_on", "said", "why"),
    [
        (None, {}, "config hash 'cccc"),
        ({"max_replicas": "3", **STEPS}, {"max_replicas": "4", **STEPS}, "max_replicas is 4 here, and 3"),
        ({"max_replicas": "3", **STEPS}, STEPS, "max_replicas is nothing"),
        # An earlier version names no protocol, and lacks keys that this one has.
        ({"data.weight": '"units"', "protocol": "2", **STEPS}, STEPS, "protocol is nothing"),
        ({"entry": '"train.py ab"'}, {"entry": '"train.py cd"'}, 'entry is "train.py cd"'),
    ],
)
async def test_another_rule_is_refused_with_its_key_and_both_values(agreed_on, said, why):
    service, rows = make_service(config_hash="d" * 32, rules=agreed_on)
    answer = refusal(await service.ask(replace(ask(0), rules=said)))
    assert (answer.exit_code, answer.reason[: len(why)]) == (64, why)
    (row,) = events(rows, "AskRefused")
    assert (row["replica"], row["incarnation"]) == (0, name(0))
    assert service.state.views[0].incarnation is None


async def test_what_was_agreed_with_the_first_grant_outlives_the_lighthouse():
    """Without that, whoever asks a lighthouse first that has just started would say what the job is."""
    store = MemoryStore()
    service, _ = make_service(store=store)
    first = {"max_replicas": "3"}
    asks = [replace(ask(r), rules=first) for r in (0, 1)]
    await asyncio.gather(*(service.ask(a) for a in asks))
    again, _ = make_service(store=MemoryStore(store.rows))
    for other, what in (
        (replace(ask(1), config_hash="other", rules={"max_replicas": "4"}), "max_replicas is 4 here, and 3 in"),
        (replace(ask(1), layout="other"), "model layout"),
        (replace(ask(1), numerics="other"), "numerics"),
        (replace(ask(1), frozen="other"), "frozen weights"),
    ):
        answer = refusal(await again.ask(other))
        assert (answer.exit_code, what in answer.reason) == (64, True)


@pytest.mark.parametrize(
    "wrong",
    [
        *({field: "x" * 257} for field in ("config_hash", "layout", "numerics", "frozen")),
        *({field: {str(n): "" for n in range(65)}} for field in ("rules", "data")),
        *({field: {"k" * 257: ""}} for field in ("rules", "data")),
        *({field: {"k": "v" * 257}} for field in ("rules", "data")),
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_texts_and_facts_are_bounded_on_arrival(wrong):
    body = protocol.encode(replace(ask(0), **wrong))
    with pytest.raises(ProtocolViolation, match=next(iter(wrong))):
        protocol.decode(body, QuorumRequest)


@pytest.mark.parametrize("field", ["rules", "data"])
async def test_facts_are_printable(field):
    service, _ = make_service()
    with pytest.raises(ProtocolViolation, match=field):
        await service.ask(replace(ask(0), **{field: {"k": "\x1b[2J"}}))


@pytest.mark.parametrize(
    ("field", "called"),
    [("layout", "model layout"), ("numerics", "numerics"), ("frozen", "digest of the frozen weights and buffers")],
)
async def test_what_differs_from_the_first_is_refused(field, called):
    service, _ = make_service(config_hash=CONFIG_HASH)
    first = asyncio.create_task(service.ask(ask(0)))
    await quiet()
    answer = refusal(await service.ask(replace(ask(1), **{field: "other"})))
    assert answer.exit_code == 64
    assert called in answer.reason
    assert isinstance(await service.ask(ask(1)), Grant)
    await first


async def test_other_data_are_refused_by_name_and_the_healthy_ones_go_on():
    service, rows = make_service()

    def told(replica, **facts):
        return replace(ask(replica), data={"seed": "0", **facts})

    first = asyncio.create_task(service.ask(told(0, length="160", **{"sample 0": "random"})))
    await quiet()
    answer = refusal(await service.ask(told(1, length="159", seed="1")))
    assert answer.exit_code == 64
    assert answer.reason.startswith("data: length is 159")
    assert isinstance(await service.ask(told(1, length="160", **{"sample 0": "ab", "sample 9": "cd"})), Grant)
    assert isinstance(await first, Grant)
    assert events(rows, "AskRefused")
    late = await service.ask(told(1, length="160", **{"sample 9": "ef"}))
    assert isinstance(late, Refused), "what the second one told first holds, too"


def test_a_lighthouse_with_other_rules_than_its_run_agreed_on_does_not_start(tmp_path):
    config = parse({"replicas": 2})
    store = MemoryStore()
    state = store.load(policy(config))
    rules = tuple(agreed(config).items())
    store.save(replace(state, agreed=Agreement(config_hash(config), "layout", "numerics", rules)))

    def start(**keys):
        keys = {"replicas": 2, **keys}
        runtime.begin(parse(keys), tmp_path, Keys(TOKEN), MemoryStore(store.rows), None, 0, "", print)

    refused(lambda: start(train={"steps": 90}), r"train.steps: .*90.*100, on which this run has agreed")
    refused(lambda: start(max_replicas=5), "max_replicas")


# Where a replica may say that it listens: at home, or where the operator allows it; nowhere else.


ALLOW = validation.networks(["10.0.0.0/8", "fd00::/8"])

GOOD = [
    ("127.0.0.1", "127.0.0.1:7000"),
    ("127.0.0.1", "127.0.1.1:7000"),
    ("::1", "127.0.0.1:65535"),
    ("::1", "[::1]:1"),
    ("::1", "::1:7000"),
    ("192.0.2.7", "192.0.2.7:80"),
    ("::ffff:192.0.2.7", "192.0.2.7:80"),
    ("192.0.2.7", "[::ffff:192.0.2.7]:80"),
    ("2001:db8::1", "[2001:db8:0:0::1]:80"),
    ("fe80::1%eth0", "10.1.2.3:80"),
    ("192.0.2.7", "10.255.0.1:7000"),
    ("192.0.2.7", "[fd00::5]:7000"),
    (None, "8.8.8.8:53"),
]
ELSEWHERE = "neither where its replica asks from"
NOWHERE = "no replica can be reached"
FORM = "is not host:port"
BAD = [
    ("192.0.2.7", "192.0.2.8:80", ELSEWHERE),
    ("192.0.2.7", "127.0.0.1:22", ELSEWHERE),
    ("127.0.0.1", "192.0.2.7:80", ELSEWHERE),
    ("192.0.2.7", "[2001:db8::1]:80", ELSEWHERE),
    ("127.0.0.1", "169.254.169.254:80", NOWHERE),
    ("169.254.169.254", "169.254.169.254:80", NOWHERE),
    ("::1", "[::ffff:169.254.169.254]:80", NOWHERE),
    ("::1", "[fe80::1]:80", NOWHERE),
    ("10.0.0.1", "[fd00:ec2::254]:80", NOWHERE),
    ("127.0.0.1", "0.0.0.0:80", NOWHERE),
    ("127.0.0.1", "[::]:80", NOWHERE),
    ("127.0.0.1", "224.0.0.1:80", NOWHERE),
    ("127.0.0.1", "255.255.255.255:80", NOWHERE),
    ("127.0.0.1", "localhost:80", FORM),
    ("127.0.0.1", "0x7f.1:80", FORM),
    ("127.0.0.1", "127.0.0.1", FORM),
    ("127.0.0.1", "127.0.0.1:0", FORM),
    ("127.0.0.1", "127.0.0.1:65536", FORM),
    ("127.0.0.1", "127.0.0.1:\u0661", FORM),
    ("127.0.0.1", "127.0.0.1:80/path", FORM),
    ("127.0.0.1", "", FORM),
    ("127.0.0.1", "x" * 10**5, FORM),
]


@pytest.mark.parametrize(("peer", "address"), GOOD)
@pytest.mark.parametrize("ring", [True, False])
def test_at_home_and_where_the_operator_allows(peer, address, ring):
    validation.check((address,) if ring else (), () if ring else (address,), peer, ALLOW)


@pytest.mark.parametrize(("peer", "address", "why"), BAD, ids=lambda v: str(v)[:40])
@pytest.mark.parametrize("ring", [True, False])
def test_nowhere_else(peer, address, why, ring):
    with pytest.raises(ProtocolViolation, match=why) as caught:
        validation.check((address,) if ring else (), () if ring else (address,), peer, ALLOW)
    line = str(caught.value)
    assert line.startswith("ring" if ring else "state")
    assert len(line) < 300
    assert "\n" not in line


def test_a_refusal_is_not_remembered_as_a_yes_nor_one_peers_yes_as_anothers():
    for _ in range(2):
        with pytest.raises(ProtocolViolation):
            validation.check(("192.0.2.8:80",), (), "192.0.2.7", ())
    validation.check(("192.0.2.8:80",), (), "192.0.2.8", ())
    with pytest.raises(ProtocolViolation):
        validation.check(("192.0.2.8:80",), (), "192.0.2.7", ())


def test_a_replica_has_at_most_64_addresses():
    validation.check(("127.0.0.1:1",) * 64, (), "127.0.0.1", ())
    with pytest.raises(ProtocolViolation, match="ring has 65 addresses"):
        validation.check(("127.0.0.1:1",) * 65, (), "127.0.0.1", ())
