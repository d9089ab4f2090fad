from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.core.state_id import StateId
from ft_hsdp.memory.recovery import Gathering, Holding, newest


def state(step: int, epoch: int = 1) -> StateId:
    return StateId(epoch, step, f"{epoch}{step}" * 4)


def held(
    step: int, replica: int, rank: int, host: str, ranks: int = 2, layout: str = "", epoch: int = 1
) -> Holding:
    return Holding(state(step, epoch), replica, rank, ranks, layout or f"L{rank}", host, f"{host}:1", False)


LAYOUTS = ["L0", "L1"]
HOSTS = ["r0h0", "r0h1"]


def test_shards_of_two_states_are_no_state() -> None:
    assert newest([held(5, 0, 0, "r0h0"), held(4, 0, 1, "r0h1")], 0, LAYOUTS, HOSTS) is None


def test_a_newer_epoch_counts_more_than_a_higher_step() -> None:
    """After a job went back to a checkpoint, older epochs have higher steps."""
    rows = [held(9, 0, k, HOSTS[k], epoch=1) for k in (0, 1)] + [held(3, 0, k, HOSTS[k], epoch=2) for k in (0, 1)]
    found = newest(rows, 0, LAYOUTS, HOSTS)
    assert found is not None
    assert found.state == state(3, epoch=2)


def test_other_widths_and_layouts_are_left_out() -> None:
    rows = [
        held(5, 0, 0, "r0h0", ranks=3),
        held(5, 0, 1, "r0h1"),
        held(5, 1, 0, "r1h0", layout="other"),
        held(5, 1, 7, "r1h0"),
    ]
    assert newest(rows, 0, LAYOUTS, HOSTS) is None
    assert newest([], 0, LAYOUTS, HOSTS) is None


def test_a_source_that_fails_makes_way_for_the_next_one_then_for_an_older_state() -> None:
    rows = [held(5, 0, 0, "r0h0"), held(5, 0, 1, "r0h1"), held(5, 0, 0, "r0h1")]
    rows += [held(5, 1, 0, "a/1/r1h0"), held(4, 0, 0, "r0h0"), held(4, 0, 1, "r0h1")]
    failed: list[Holding] = []
    seen = []
    while (found := newest(rows, 0, LAYOUTS, HOSTS, failed)) is not None:
        source = found.sources[0][0]
        seen.append((found.state.step, source.replica, source.host))
        failed.append(source)
    assert seen == [(5, 0, "r0h0"), (5, 0, "r0h1"), (5, 1, "a/1/r1h0"), (4, 0, "r0h0")]


def test_a_near_source_comes_before_a_far_one() -> None:
    rows = [held(5, n, 0, path) for n, path in enumerate(["b/1/x", "a/2/x", "a/1/x", "a/1/own"], 1)]
    rows += [held(5, n, 1, "a/1/own") for n in range(1, 5)]
    found = newest(rows, 0, LAYOUTS, ["a/1/own"] * 2)
    assert found is not None
    assert [h.host for h in found.sources[0]] == ["a/1/own", "a/1/x", "a/2/x", "b/1/x"]


@given(st.integers(1, 3), st.integers(1, 3), st.data())
def test_a_state_is_found_whenever_each_shard_is_somewhere(replicas: int, ranks: int, data: st.DataObject) -> None:
    """Every set of lost hosts, one host for each rank of each replica, two states."""
    rows = [
        held(step, n, k, f"r{n}h{k}", ranks=ranks)
        for step in (4, 5)
        for n in range(replicas)
        for k in range(ranks)
    ]
    rows = data.draw(st.permutations(rows))
    hosts = [(n, k) for n in range(replicas) for k in range(ranks)]
    layouts, own = [f"L{k}" for k in range(ranks)], [f"r0h{k}" for k in range(ranks)]
    for count in range(len(hosts) + 1):
        for lost in combinations(hosts, count):
            left = [row for row in rows if (row.replica, row.rank) not in lost]
            found = newest(left, 0, layouts, own)
            assert (found is not None) == ({k for n, k in hosts if (n, k) not in lost} == set(range(ranks)))
            if found is not None:
                assert found.state == state(5)
                assert all(h.rank == k and h in left for k, sources in enumerate(found.sources) for h in sources)


def test_a_state_is_complete_once_and_older_ones_do_not_count() -> None:
    gathering = Gathering(state(5))
    older = [(state(4), 2, rank) for rank in (0, 1)]
    assert not gathering.add([*older, (state(5), 2, 0), (state(5), 3, 1), (state(5), 2, 2)])
    assert not gathering.add([(state(5), 2, 0), (state(5), 3, 0)]), "of two widths, none of which is there"
    assert gathering.add([(state(5), 2, 1)])
    assert not gathering.add([(state(5), 2, 0), (state(5), 2, 1)]), "it was said"
    assert gathering.add([(state(6), 1, 0), (state(5), 3, 0)]), "a newer one"
    assert gathering.add([(state(5), 3, 2)])
