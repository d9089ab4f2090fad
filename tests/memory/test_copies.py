from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.memory.copies import (
    MemberHosts,
    Plan,
    Refusal,
    coverage,
    default_copies,
    missing_copies,
    move_refused,
)
from ft_hsdp.memory.hosts import Host, Level


def member(replica: int, *paths: str, ranks: int = 1, healthy: bool = True) -> MemberHosts:
    return MemberHosts(replica, tuple(Host.parse(path) for path in paths for _ in range(ranks)), healthy)


def told(plan: Plan) -> list[tuple[int, int, str]]:
    return [(copy.replica, copy.rank, copy.holder.name) for copy in plan.copies]


NOTHING = Plan((), (), "")


def test_a_replica_that_is_behind_is_no_copy() -> None:
    behind = member(1, "r1h0", "r1h1", healthy=False)
    assert told(missing_copies([member(0, "r0h0", "r0h1"), behind], 2, "host")) == [(0, 0, "r0h1"), (0, 1, "r0h0")]
    assert missing_copies([behind], 2, "host") == NOTHING


def test_narrower_replicas_are_no_copies_and_keep_none() -> None:
    narrow, wide = member(0, "r0h0", ranks=2), member(1, "r1h0", "r1h1", ranks=2)
    plan = missing_copies([narrow, wide], 2, "host")
    assert told(plan) == [(1, 0, "r1h1"), (1, 1, "r1h1"), (1, 2, "r1h0"), (1, 3, "r1h0")]
    assert coverage([narrow, wide], plan, "host") == 2
    assert missing_copies([narrow, wide, member(2, "r2h0", "r2h1", ranks=2)], 2, "host") == NOTHING
    alone = missing_copies([narrow, replace(wide, healthy=False)], 2, "host")
    assert (alone.copies, alone.unprotected) == ((), (0, 1))


def test_the_lowest_healthy_replica_makes_what_several_lack() -> None:
    members = [
        member(2, "a/r2h0", "b/r2h1"),
        member(1, "a/r1h0", "b/r1h1"),
        member(0, "c/r0", "c/r0", healthy=False),
    ]
    plan = missing_copies(members, 2, "rack")
    assert told(plan) == [(1, 0, "r1h1"), (1, 1, "r1h0")]


@pytest.mark.parametrize("others", range(1, 8))
def test_copies_on_hosts_of_other_replicas_stay_when_another_one_comes_or_goes(others: int) -> None:
    """All replicas have the first half of their ranks in one rack: hosts in other racks keep these shards."""

    def other(replica: int) -> MemberHosts:
        return member(replica, *(f"{'a' if i < 8 else f'b{replica}'}/r{replica}h{i}" for i in range(16)))

    first = member(0, *(f"a/r0h{i}" for i in range(16)))
    before = missing_copies([first, *map(other, range(1, 1 + others))], 2, "rack").copies
    after = missing_copies([first, *map(other, range(1, 2 + others))], 2, "rack").copies
    assert [copy.rank for copy in before] == [copy.rank for copy in after] == list(range(8))
    moved = {copy.holder.name.partition("h")[0] for copy in after if copy not in before}
    assert moved <= {f"r{1 + others}"}, "to the one that has come"


def refused(members: list[MemberHosts], *pairs: tuple[int, str], level: Level = "host", room: int = 9) -> Plan:
    """The plan of two copies after these ranks' copies were refused by these hosts."""
    plan = missing_copies(members, 2, level, room=room)
    told = [Refusal(0, rank, host) for rank, host in pairs]
    for count in range(1, len(told) + 1):
        plan = move_refused(members, plan, level, told[:count], room)
    return plan


def test_a_refused_copy_moves_to_the_next_own_host_and_stays_if_there_is_none() -> None:
    three = [member(0, "h0", "h1", "h2")]
    assert told(refused(three)) == [(0, 0, "h1"), (0, 1, "h2"), (0, 2, "h0")]
    assert told(refused(three, (0, "h1"))) == [(0, 0, "h2"), (0, 1, "h2"), (0, 2, "h0")]
    assert told(refused(three, (0, "h1"), (0, "h2"))) == told(refused(three, (0, "h1"))), "nobody is left"
    assert refused(three, (0, "h1"), room=1) == refused(three, room=1), "h2 is full"
    assert refused(three, (0, "h2"), (7, "h1")) == refused(three), "nobody asked them"
    racks = [member(0, "a/h0", "b/h1", "a/h2", "b/h3")]
    assert told(refused(racks, (0, "h1"), level="rack"))[0] == (0, 0, "h3")


@given(
    st.lists(st.integers(0, 2), min_size=2, max_size=7),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from(["host", "rack"]),
    st.integers(1, 4),
    st.lists(st.integers(0, 99), max_size=6),
)
def test_a_refusal_moves_one_copy_at_most_and_never_to_a_host_that_refuses(
    racks: list[int], ranks: int, copies: int, level: Level, room: int, picks: list[int]
) -> None:
    hosts = tuple(Host("", f"k{rack}", f"h{i}") for i, rack in enumerate(racks) for _ in range(ranks))
    members = [MemberHosts(0, hosts, True)]
    plan = missing_copies(members, copies, level, room=room)
    refusals: list[Refusal] = []
    for pick in picks if plan.copies else ():
        asked = plan.copies[pick % len(plan.copies)]
        refusals.append(Refusal(0, asked.rank, asked.holder.name))
        after = move_refused(members, plan, level, refusals, room)
        gone, came = set(plan.copies) - set(after.copies), set(after.copies) - set(plan.copies)
        assert (gone, len(came)) in (({asked}, 1), (set(), 0))
        for copy in came:
            assert Refusal(0, copy.rank, copy.holder.name) not in refusals
        assert coverage(members, after, level) == coverage(members, plan, level)
        assert max(Counter(copy.holder.name for copy in after.copies).values()) <= room
        plan = after


def test_the_default_is_two_copies_where_there_are_two_hosts() -> None:
    assert default_copies([Host.parse("h0")], "host") == 1
    assert default_copies([Host.parse("h0"), Host.parse("h1")], "host") == 2
    assert default_copies([Host.parse("a/h0"), Host.parse("a/h1")], "rack") == 1


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=8),  # the rack of each host of replica 0
    st.integers(0, 2),  # further healthy replicas, on hosts of their own in those racks
    st.integers(1, 4),
    st.sampled_from(["host", "rack"]),
    st.integers(0, 3),
)
def test_copies_are_apart_and_as_many_as_possible(racks, others, copies, level, room) -> None:
    members = [
        MemberHosts(n, tuple(Host("", f"k{rack}", f"r{n}h{i}") for i, rack in enumerate(racks)), True)
        for n in range(1 + others)
    ]
    plan = missing_copies(members, copies, level, room)  # type: ignore[arg-type]
    for rank in range(len(racks)):
        natural = {m.hosts[rank].domain(level) for m in members}  # type: ignore[arg-type]
        made = [copy.holder for copy in plan.copies if copy.rank == rank]
        domains = natural | {holder.domain(level) for holder in made}  # type: ignore[arg-type]
        assert len(domains) == len(natural) + len(made), "a copy is in a domain of its own"
        assert not made or len(domains) <= copies
        assert (len(domains) < copies) == (rank in plan.unprotected)
        if rank in plan.unprotected:  # nobody was left who could keep one
            kept = Counter(copy.holder.name for copy in plan.copies)
            able = {host for m in members for host in m.hosts}
            assert all(
                kept[host.name] >= room or host.domain(level) in domains  # type: ignore[arg-type]
                for host in able
            )
    assert max(Counter(copy.holder.name for copy in plan.copies).values(), default=0) <= room
    assert bool(plan.unprotected) == bool(plan.reason)
