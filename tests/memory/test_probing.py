from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.memory.probing import double_hashing, first_holders, probing


def alive_holders(sequence: Iterable[int], alive: frozenset[int], copies: int) -> tuple[int, ...]:
    return tuple(islice((host for host in sequence if host in alive), copies))


def test_figure_1_of_restore() -> None:
    """16 blocks on 4 hosts, 2 copies."""
    holders = [first_holders(block, 16, 4, 2) for block in range(16)]
    assert [first for first, _ in holders] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert [second for _, second in holders] == [2] * 4 + [3] * 4 + [0] * 4 + [1] * 4


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
def test_a_loss_moves_only_the_copies_of_the_lost_host(
    shard: int, hosts: int, copies: int, data: st.DataObject
) -> None:
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
