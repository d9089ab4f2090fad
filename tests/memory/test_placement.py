from collections.abc import Iterable
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.memory.hosts import Host
from ft_hsdp.memory.placement import double_hashing, first_holders, groups, holders, place, probing


def racks(count: int, per_rack: int) -> list[Host]:
    return [Host.parse(f"z/{i // per_rack}/h{i}") for i in range(count)]


@pytest.mark.parametrize(
    ("hosts", "copies", "expected", "strategy"),
    [
        (4, 2, [[0, 1], [2, 3]], "group"),
        (5, 2, [[0, 1], [2, 3, 4]], "mixed"),
        (6, 3, [[0, 1, 2], [3, 4, 5]], "group"),
        (7, 3, [[0, 1, 2], [3, 4, 5, 6]], "mixed"),
        (8, 3, [[0, 1, 2], [3, 4, 5, 6, 7]], "mixed"),
        (16, 2, [[i, i + 1] for i in range(0, 16, 2)], "group"),
        (3, 3, [[0, 1, 2]], "group"),
        (3, 1, [[0], [1], [2]], "group"),
    ],
)
def test_algorithm_1(hosts: int, copies: int, expected: list[list[int]], strategy: str) -> None:
    assert place(hosts, copies) == (expected, strategy)


@pytest.mark.parametrize(("hosts", "copies"), [(3, 4), (3, 0), (0, 1)])
def test_copies_that_cannot_be_placed_are_refused(hosts: int, copies: int) -> None:
    with pytest.raises(ValueError, match="copies on"):
        place(hosts, copies)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(1, 4))
def test_groups_share_no_rack_if_that_is_possible(sizes: list[int], copies: int) -> None:
    hosts = [Host.parse(f"{rack}/h{rack}-{i}") for rack, size in enumerate(sizes) for i in range(size)]
    if copies > len(hosts):
        return
    divided = groups(hosts, copies, "rack")
    assert sorted(host for group in divided for host in group) == sorted(hosts)
    assert len(divided) == len(hosts) // copies
    assert all(len(group) >= copies for group in divided)
    if max(sizes) <= len(divided):
        assert all(len({host.rack for host in group}) == len(group) for group in divided)


@given(st.integers(1, 12), st.integers(1, 4))
def test_each_host_keeps_as_many_copies_as_it_gives(count: int, copies: int) -> None:
    if copies > count:
        return
    hosts = racks(count, 1)
    kept = [
        holder
        for group in groups(hosts, copies, "host")
        for owner in group
        for holder in holders(group, owner, copies)
    ]
    assert all(kept.count(host) == copies - 1 for host in hosts)


def test_a_host_knows_its_domains() -> None:
    host, same, next_rack = Host.parse("a/7/n1"), Host.parse("a/7/n2"), Host.parse("a/8/n3")
    assert str(host) == "a/7/n1"
    assert host.domain("rack") == same.domain("rack") != next_rack.domain("rack")
    assert host.domain("zone") == next_rack.domain("zone")
    assert [host.distance(h) for h in (host, same, next_rack, Host.parse("b/7/n4"))] == [0, 1, 2, 3]
    # What is not known is not shared.
    lone, other = Host.parse("n5"), Host.parse("n6")
    assert lone.domain("zone") == lone.domain("host") != other.domain("zone")
    assert lone.distance(other) == 3
    assert Host.parse("7/n7").domain("zone") == ("rack", "", "7")
    unknown_rack = Host.parse("a//n8")
    assert (unknown_rack.domain("rack"), unknown_rack.domain("zone")) == (("host", "n8"), ("zone", "a"))
    assert [host.distance(unknown_rack), Host.parse("a//n9").distance(unknown_rack)] == [2, 2]


@pytest.mark.parametrize("path", ["n1", "7/n1", "a/7/n1", "a//n1", "a" * 63 + "/" + "7" * 63 + "/" + "n" * 64])
def test_a_path_and_its_host_are_one(path: str) -> None:
    assert str(Host.parse(path)) == path


@pytest.mark.parametrize(
    "path", ["", "/", "a///b", "//b", "a/b/c/d", "/n1", "n1/", "a b", "a\nb", "n1\n", "x" * 65]
)
def test_a_path_that_is_none_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="zone/rack/host"):
        Host.parse(path)


def alive_holders(sequence: Iterable[int], alive: frozenset[int], copies: int) -> tuple[int, ...]:
    return tuple(islice((host for host in sequence if host in alive), copies))


def test_copies_that_do_not_divide_the_hosts_are_refused() -> None:
    with pytest.raises(ValueError, match="a divisor of 5"):
        first_holders(0, 5, 5, 2)


def test_figure_8_of_restore() -> None:
    """500 hosts, 3 copies: a step of 20 has a divisor in common with 500, and host 8 is lost."""
    alive = frozenset(range(500)) - {8}
    assert alive_holders(double_hashing(1, [3], 500), alive, 3) == (1, 4, 7)
    assert tuple(islice(double_hashing(1, [20, 7], 500), 4)) == (1, 8, 15, 22)
    assert alive_holders(double_hashing(1, [20, 7], 500), alive, 3) == (1, 15, 22)


@given(st.integers(0, 1000), st.integers(1, 60), st.data())
def test_a_sequence_names_each_host_once(shard: int, hosts: int, data: st.DataObject) -> None:
    first = data.draw(st.lists(st.integers(0, hosts - 1), max_size=4))
    sequence = list(probing(shard, hosts, first))
    assert sorted(sequence) == list(range(hosts))
    assert sequence[: len(set(first))] == list(dict.fromkeys(first))


@given(st.integers(0, 1000), st.integers(2, 40), st.integers(1, 4), st.data())
def test_a_loss_moves_only_the_copies_of_the_lost_host(shard, hosts, copies, data) -> None:
    alive = frozenset(data.draw(st.sets(st.integers(0, hosts - 1), min_size=1)))
    before = alive_holders(probing(shard, hosts), alive, copies)
    lost = data.draw(st.sampled_from(sorted(alive)))
    after = alive_holders(probing(shard, hosts), alive - {lost}, copies)
    assert [host for host in before if host != lost] == list(after[: len(before) - (lost in before)])
    assert len(after) == min(copies, len(alive) - 1)


def test_the_next_holders_of_many_shards_are_spread_over_all_hosts() -> None:
    """If one holder took over all shards of a lost one, it would be the bottleneck of the repair."""
    following = [next(probing(shard, 16, [])) for shard in range(1600)]
    counts = [following.count(host) for host in range(16)]
    assert min(counts) > 50
    assert max(counts) < 150
