import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.memory.hosts import Host
from ft_hsdp.memory.replacement import Action, Assignment, Evidence, assign, decide


@pytest.mark.parametrize(
    ("evidence", "action", "cordoned"),
    [
        (Evidence(exit_code=75, failures_here=1), Action.SAME_HOST, False),
        (Evidence(exit_code=-signal.SIGKILL, failures_here=2, others_train=True), Action.SAME_HOST, False),
        (Evidence(exit_code=76), Action.OTHER_HOST, True),
        (Evidence(exit_code=76, host_lost=True), Action.OTHER_HOST, True),
        (Evidence(exit_code=75, failures_here=3, others_train=True), Action.OTHER_HOST, True),
        (Evidence(exit_code=75, failures_here=9, others_train=False), Action.SAME_HOST, False),
        (Evidence(host_lost=True), Action.OTHER_HOST, False),
        (Evidence(exit_code=75, failures_here=3, others_train=True, all_ended_at=3), Action.HALT, False),
        (Evidence(exit_code=75, all_ended_at=2), Action.SAME_HOST, False),
    ],
)
def test_what_is_done_about_a_failure(evidence: Evidence, action: Action, cordoned: bool) -> None:
    decision = decide(evidence)
    assert (decision.action, decision.cordoned) == (action, cordoned)
    assert decision.reason


def hosts(*paths: str) -> tuple[Host, ...]:
    return tuple(Host.parse(path) for path in paths)


def test_without_enough_spares_a_replica_takes_none() -> None:
    """One spare cannot start the replica that lost two hosts; it starts the other one."""
    found = assign({0: hosts("a", "b"), 1: hosts("c", "d")}, ["a", "b", "d"], hosts("s0"), "host")
    assert found == {0: Assignment(hosts("a", "b"), (0, 1)), 1: Assignment(hosts("c", "s0"), ())}


def test_of_equal_replicas_the_lowest_comes_first() -> None:
    found = assign({1: hosts("c"), 0: hosts("a")}, ["a", "c"], hosts("s0"), "host")
    assert [(n, each.missing) for n, each in found.items()] == [(0, ()), (1, (0,))]


def test_a_spare_that_is_apart_comes_first_then_a_near_one() -> None:
    replicas = {0: hosts("a/1/h0", "a/1/h1"), 1: hosts("b/2/h2", "b/2/h3")}
    spares = hosts("b/2/near-other", "a/9/near", "c/3/far")

    def chosen(left: tuple[Host, ...]) -> str:
        return assign(replicas, ["h0"], left, "rack")[0].hosts[0].name

    assert chosen(spares) == "near"
    assert chosen((spares[0], spares[2])) == "far", "rack 2 has a copy of these shards"
    assert chosen(spares[:1]) == "near-other", "better than none"


@given(st.integers(1, 4), st.integers(1, 4), st.sets(st.integers(0, 15)), st.integers(0, 4))
def test_every_host_has_one_place(count: int, width: int, gone: set[int], free: int) -> None:
    replicas = {n: hosts(*(f"h{n * 4 + i}" for i in range(width))) for n in range(count)}
    lost = [f"h{i}" for i in gone]
    found = assign(replicas, lost, hosts(*(f"s{i}" for i in range(free))), "host")
    started = [host.name for each in found.values() if not each.missing for host in each.hosts]
    assert len(started) == len(set(started))
    assert not set(started) & set(lost)
    for replica, each in found.items():
        assert each.missing in ((), tuple(i for i, host in enumerate(replicas[replica]) if host.name in lost))
        assert all(a == b for a, b in zip(each.hosts, replicas[replica], strict=True) if b.name not in lost)
    waiting = [len(each.missing) for each in found.values() if each.missing]
    used = sum(name.startswith("s") for name in started)
    assert not waiting or min(waiting) > free - used, "a replica waits only if the spares do not suffice"


def test_who_goes_on_without_its_lost_hosts() -> None:
    """Three hosts of two ranks, one is lost: with at least four ranks it goes on, with at least five it waits."""
    found = assign({0: hosts("a", "b", "c")}, ["b"], (), "host")[0]
    assert found.left(2, 4) == hosts("a", "c")
    assert (found.left(2, 5), found.left(2, None)) == ((), ())
    assert assign({0: hosts("a")}, ["a"], (), "host")[0].left(2, 1) == (), "no host is left"
    whole = assign({0: hosts("a", "b")}, ["b"], hosts("s0"), "host")[0]
    assert whole.left(2, 1) == hosts("a", "s0")


def test_free_hosts_go_to_those_that_do_not_run_and_then_to_the_smallest() -> None:
    replicas = {0: hosts("a", "b", "c"), 1: hosts("d", "e", "f"), 2: hosts("g", "h", "i")}
    lost = ["b", "e", "f", "h", "i"]

    def whole(spares: tuple[Host, ...], shrunk: dict[int, int]) -> list[int]:
        found = assign(replicas, lost, spares, "host", shrunk=shrunk)
        return [n for n, each in found.items() if not each.missing]

    two = hosts("s0", "s1")
    assert whole(two, {0: 2, 1: 1, 2: 1}) == [1]
    assert whole(two, {0: 2, 1: 1}) == [2], "it does not run at all"
    assert whole(hosts("s0", "s1", "s2"), {0: 2, 1: 1}) == [0, 2], "what is left is enough for one"


def test_a_replica_that_cannot_go_on_lends_its_hosts_and_takes_the_lost_ones() -> None:
    replicas = {0: hosts("a", "b"), 1: hosts("c", "d")}
    assert assign(replicas, ["b", "c"], (), "host", lenders=[0]) == {
        0: Assignment(hosts("c", "b"), (0, 1)),
        1: Assignment(hosts("a", "d"), ()),
    }
    waits = {0: Assignment(hosts("a", "b"), (1,)), 1: Assignment(hosts("c", "d"), (0,))}
    assert assign(replicas, ["b", "c"], (), "host") == waits, "it has not waited long enough"
    assert assign(replicas, ["b", "c", "d"], (), "host", lenders=[0])[0] == waits[0], "that would start nobody"


def test_a_spare_host_comes_before_what_is_lent_and_the_first_of_two_lenders_runs() -> None:
    replicas = {0: hosts("a", "b"), 1: hosts("c", "d"), 2: hosts("e", "f")}
    found = assign(replicas, ["b", "c", "f"], hosts("s0"), "host", lenders=[0, 1, 2])
    assert found[0] == Assignment(hosts("a", "s0"), ()), "it needs no more than the spare host"
    assert found[1] == Assignment(hosts("e", "d"), ())
    assert found[2] == Assignment(hosts("c", "f"), (0, 1))


def test_the_lender_that_needs_the_most_hosts_lends_first() -> None:
    replicas = {0: hosts("a", "b", "c", "d"), 1: hosts("e", "f", "g", "h"), 2: hosts("i", "j", "k", "l")}
    for most, host in ((["a", "b", "c", "e", "f"], "d"), (["a", "b", "e", "f", "g"], "h")):
        found = assign(replicas, [*most, "l"], (), "host", lenders=[0, 1])
        assert found[2].hosts == hosts("i", "j", "k", host)


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.sets(st.integers(0, 15)),
    st.integers(0, 3),
    st.sets(st.integers(0, 3)),
    st.sets(st.integers(0, 3)),
)
def test_lending_starts_more_replicas_and_stops_none(count, width, gone, free, lending, narrow) -> None:
    replicas = {n: hosts(*(f"h{n * 4 + i}" for i in range(width))) for n in range(count)}
    lost, spares = [f"h{i}" for i in gone], hosts(*(f"s{i}" for i in range(free)))
    shrunk = {n: 1 for n in narrow if n not in lending}
    lenders = [n for n in lending if n < count]
    before = assign(replicas, lost, spares, "host", shrunk=shrunk)
    after = assign(replicas, lost, spares, "host", shrunk=shrunk, lenders=lenders)
    started = {n for n, each in after.items() if not each.missing}
    assert started >= {n for n, each in before.items() if not each.missing}
    named = [host.name for each in after.values() for host in each.hosts]
    assert len(named) == len(set(named)), "a host is in one place"
    assert {host.name for each in replicas.values() for host in each} <= {*named, *lost}, "no host is forgotten"
    for replica, each in after.items():
        assert each.missing == (() if replica in started else each.missing)
        assert {each.hosts[i].name for i in each.missing} <= {*lost}
        assert not {host.name for i, host in enumerate(each.hosts) if i not in each.missing} & {*lost}
        if replica not in lending:
            kept = {h.name for h in replicas[replica]} - {*lost}
            assert kept <= {h.name for h in each.hosts}, "who does not lend keeps its hosts"
