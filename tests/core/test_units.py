import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.core.units import Places, UnitPolicy, deal, head, joined, redeal


def constant(replicas: int, accumulate: int, cap: int = 10**6) -> UnitPolicy:
    return UnitPolicy(replicas, accumulate, "constant", max_accumulate=cap)


@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 12))
def test_a_constant_batch_is_shared_out_as_evenly_as_possible(replicas: int, accumulate: int, count: int) -> None:
    quotas = constant(replicas, accumulate).shares([1] * count)
    assert len(quotas) == count
    assert max(quotas) - min(quotas) <= 1
    assert min(quotas) >= 1
    assert list(quotas) == sorted(quotas, reverse=True), "the first ones in ring order take more"
    if count <= replicas * accumulate:
        assert sum(quotas) == replicas * accumulate


def test_quotas_are_capped_and_adapt() -> None:
    assert constant(4, 3).shares([1, 1, 1]) == (4, 4, 4)
    assert constant(4, 3, cap=4).shares([1]) == (4,)
    assert constant(4, 1).shares([1, 1, 1]) == (2, 1, 1)
    assert UnitPolicy(4, 3).shares([1, 1, 1]) == (3, 3, 3)
    assert constant(4, 3).shares([]) == ()


@pytest.mark.parametrize(("able", "count"), [(9, 8), (8, 8), (7, 4), (3, 2), (1, 0)])
def test_the_largest_allowed_number_contributes(able: int, count: int) -> None:
    assert UnitPolicy(allowed=(2, 4, 8)).contributors(able) == count
    assert UnitPolicy().contributors(able) == able


def test_contributors_take_one_run_each() -> None:
    assert deal([4, 2, 0, 3], shared=True) == (((0, 4),), ((4, 2),), (), ((6, 3),))
    assert deal([4, 2], shared=False) == (((0, 4),), ((0, 2),))


def test_those_that_stay_keep_their_places_and_take_those_of_the_lost() -> None:
    before: dict[int, Places] = {0: ((0, 3),), 1: ((3, 3),), 2: ((6, 3),), 3: ((9, 3),)}
    after, dealt = redeal(before, {0: 4, 1: 4, 3: 4}, shared=True, refill=True)
    assert after == {0: ((0, 3), (6, 1)), 1: ((3, 3), (7, 1)), 3: ((9, 3), (8, 1))}
    assert dealt == 12
    after, dealt = redeal(before, {0: 4, 1: 4, 3: 4}, shared=True, refill=False)
    assert after == {0: ((0, 3),), 1: ((3, 3),), 3: ((9, 3),)}


def test_places_that_are_given_up_go_to_none_in_this_step() -> None:
    before: dict[int, Places] = {0: ((0, 4),), 1: ((4, 4),)}
    after, dealt = redeal(before, {0: 3, 1: 3, 2: 2}, shared=True, refill=True)
    assert after == {0: ((0, 3),), 1: ((4, 3),), 2: ((8, 2),)}
    assert dealt == 10


def test_with_data_shards_of_their_own_all_begin_at_the_first_place() -> None:
    before: dict[int, Places] = {0: ((0, 3),), 1: ((0, 3),)}
    assert redeal(before, {0: 4, 2: 4}, shared=False, refill=False)[0] == {0: ((0, 3),), 2: ((0, 4),)}
    assert redeal(before, {0: 6}, shared=False, refill=True)[0] == {0: ((0, 6),)}


def test_runs_of_places_are_cut_and_joined() -> None:
    assert head(((0, 3), (7, 2)), 4) == ((0, 3), (7, 1))
    assert head(((0, 3),), 9) == ((0, 3),)
    assert joined([(0, 2), (2, 3), (9, 0), (6, 1)]) == ((0, 5), (6, 1))


@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 12), st.integers(1, 4), st.integers(1, 9))
def test_shares_of_equal_widths_are_those_of_one_rank_times_the_width(
    replicas: int, accumulate: int, count: int, width: int, cap: int
) -> None:
    for policy in (constant(replicas, accumulate, max(cap, accumulate)), UnitPolicy(replicas, accumulate)):
        assert policy.shares([width] * count) == tuple(n * width for n in policy.shares([1] * count))


def test_a_replica_of_fewer_ranks_takes_a_share_of_its_width() -> None:
    assert UnitPolicy(2, 3, data_ranks=4).shares([4, 3]) == (12, 9)
    one = UnitPolicy(1, 3, "constant", max_accumulate=9, data_ranks=4)
    assert one.shares([4]) == (12,)
    assert one.shares([3]) == (12,), "four micro-batches instead of three"
    assert one.shares([2]) == (12,)
    assert one.shares([1]) == (9,), "the cap"
    assert UnitPolicy(1, 1, "constant", max_accumulate=2, data_ranks=4).shares([3]) == (3,), "never too many"
    assert UnitPolicy(1, 1, "constant", max_accumulate=9, data_ranks=2).shares([4]) == (4,)


@pytest.mark.parametrize(
    ("widths", "accumulate", "shares"),
    [
        ([4, 3], 1, (4, 3)),  # 7 of 8: one unit fills no micro-batch
        ([4, 3], 2, (8, 6)),  # 14 of 16
        ([4, 3], 3, (12, 12)),  # all 24: three fill one of the narrower replica
        ([4, 3], 4, (20, 12)),  # all 32: four fill one of the whole replica
        ([4, 2], 1, (4, 4)),  # all 8: two fill none of the whole replica
        ([2, 4], 2, (4, 12)),  # all 16, also if the narrower one comes first
        ([4, 1], 1, (4, 2)),  # 6 of 8
        ([3, 4, 4], 4, (12, 20, 16)),  # all 48: the whole one that comes first
    ],
)
def test_whole_replicas_take_over_what_fewer_ranks_do_not_train(widths, accumulate, shares) -> None:
    policy = UnitPolicy(len(widths), accumulate, "constant", max_accumulate=99, data_ranks=4)
    assert policy.shares(widths) == shares


@given(st.integers(1, 4), st.integers(1, 5), st.lists(st.integers(1, 8), min_size=1, max_size=6))
def test_shares_of_any_widths_come_near_what_is_wanted(replicas: int, accumulate: int, widths: list[int]) -> None:
    policy = UnitPolicy(replicas, accumulate, "constant", max_accumulate=10**6, data_ranks=8)
    shares, wanted = policy.shares(widths), replicas * accumulate * 8
    micro = [share // width for share, width in zip(shares, widths, strict=True)]
    assert [n * w for n, w in zip(micro, widths, strict=True)] == list(shares)
    assert max(micro) - min(micro) <= 1
    assert min(micro) >= 1
    if sum(widths) <= wanted:
        assert wanted - max(widths) < sum(shares) <= wanted
    assert sorted(policy.shares(widths[::-1])) == sorted(shares), "the order in the ring adds no unit"
