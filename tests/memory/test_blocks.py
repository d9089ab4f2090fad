"""Placement, submission and loading of blocks: ReStore's figures, and what holds for any numbers."""

from collections import Counter, defaultdict
from itertools import combinations
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_hsdp.memory.blocks import BlockLayout, LoadPlan, first_hosts, plan_load, plan_submission, share

FIGURE_1 = {  # p = 4, n = 16, r = 2: the blocks of each copy on each host
    0: [range(4), range(8, 12)],
    1: [range(4, 8), range(12, 16)],
    2: [range(8, 12), range(4)],
    3: [range(12, 16), range(4, 8)],
}


def holders_of(layout: BlockLayout, hosts: int, copies: int) -> dict[int, tuple[int, ...]]:
    return {each: first_hosts(each, layout.slices, hosts, copies) for each in range(layout.slices)}


def slice_of(layout: BlockLayout, block: int) -> int:
    (run,) = layout.runs([(block, block + 1)])
    return run.slice


def test_figure_1_of_restore() -> None:
    layout = BlockLayout(16, 1, 4, None)
    for host, copies in FIGURE_1.items():
        for k, blocks in enumerate(copies):
            on_host = [x for x in range(16) if first_hosts(slice_of(layout, x), 4, 4, 2)[k] == host]
            assert on_host == list(blocks)


def test_the_slice_of_a_block_is_the_first_holder_of_the_paper() -> None:
    """floor(pi(x) p / n), for ranges of one block and of more."""
    for size, seed in ((1, None), (2, None), (2, 0), (4, 7)):
        layout = BlockLayout(48, size, 4, seed)
        for x in range(48):
            pi = layout.position(x // size) * size + x % size
            assert slice_of(layout, x) == pi * 4 // 48


@st.composite
def layouts(draw: st.DrawFn) -> BlockLayout:
    shares, parts = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    blocks, of_range = draw(st.integers(1, 700)), draw(st.integers(1, 40))
    return BlockLayout(blocks, of_range, shares * parts, draw(st.none() | st.integers(0, 5)), parts)


@given(layout=layouts())
def test_each_block_lies_at_one_place_that_its_slice_knows(layout: BlockLayout) -> None:
    there = {}
    for number in range(layout.slices):
        offset = 0
        for run in layout.contents(number):
            assert run.offset == offset
            offset += layout.range_blocks
            for i in range(run.count):
                assert run.block + i not in there
                there[run.block + i] = (number, run.offset + i)
        assert offset == layout.slice_blocks(number)
        assert layout.count(number) == sum(run.count for run in layout.contents(number))
    assert sorted(there) == list(range(layout.blocks))
    found = {}
    for run in layout.runs([(0, layout.blocks)]):
        found.update({run.block + i: (run.slice, run.offset + i) for i in range(run.count)})
    assert found == there
    sizes = [len(layout.positions(number)) for number in range(layout.slices)]
    assert max(sizes) - min(sizes) <= 1


@given(hosts=st.integers(1, 24), data=st.data())
def test_holders_are_distinct_and_hold_the_same_number_of_slices(hosts: int, data: st.DataObject) -> None:
    copies = data.draw(st.integers(1, hosts))
    found = [first_hosts(number, hosts, hosts, copies) for number in range(hosts)]
    assert all(len(set(each)) == copies for each in found)
    assert Counter(host for each in found for host in each) == dict.fromkeys(range(hosts), copies)
    assert len({frozenset(each) for each in found}) <= hosts // copies + (
        hosts % copies and copies + hosts % copies
    )


@given(hosts=st.integers(2, 12), data=st.data())
@settings(max_examples=60)
def test_nothing_is_lost_while_a_host_of_each_group_is_left(hosts: int, data: st.DataObject) -> None:
    copies = data.draw(st.integers(1, min(4, hosts)))
    sets = {frozenset(first_hosts(number, hosts, hosts, copies)) for number in range(hosts)}
    for lost in combinations(range(hosts), copies):
        gone = [each for each in sets if each <= set(lost)]
        assert bool(gone) == (frozenset(lost) in sets)
    for lost in combinations(range(hosts), copies - 1):
        assert not any(each <= set(lost) for each in sets)


def submitted(
    slices: int, hosts: int, copies: int, held: dict[int, set[int]], refused: frozenset[tuple[int, int]]
) -> dict[int, set[int]]:
    """Who holds what once a plan is carried out, round by round as ranks do it."""
    now = {number: set(each) for number, each in held.items()}
    for _ in range(3):
        plan = plan_submission(slices, hosts, copies, now, refused)
        for number, host in plan.dropped:
            now[number].discard(host)
        for number, host in plan.written:
            assert not now.get(number)
            now.setdefault(number, set()).add(host)
        if not plan.written:
            for order in plan.copied:
                assert set(order.sources) <= now[order.slice]
                now[order.slice].add(order.host)
    assert plan_submission(slices, hosts, copies, now, refused).copied == ()
    return now


@given(hosts=st.integers(1, 9), slices=st.integers(1, 9), copies=st.integers(1, 4), data=st.data())
def test_a_submission_gives_each_slice_its_holders_and_moves_no_copy_that_is_there(
    hosts: int, slices: int, copies: int, data: st.DataObject
) -> None:
    held = {n: data.draw(st.sets(st.integers(0, hosts - 1))) for n in range(slices)}
    pairs = st.tuples(st.integers(0, slices - 1), st.integers(0, hosts - 1))
    refused = frozenset(data.draw(st.sets(pairs, max_size=3)))
    after = submitted(slices, hosts, copies, held, refused)
    wanted = min(copies, hosts)
    for number in range(slices):
        able = {host for host in range(hosts) if (number, host) not in refused} | held[number]
        assert len(after.get(number, ())) == min(wanted, len(able))
        assert after.get(number, set()) <= able
        if len(held[number]) <= wanted:
            assert held[number] <= after.get(number, set())


def test_a_host_that_replaces_a_lost_one_gets_what_that_one_held() -> None:
    first = submitted(6, 6, 2, {}, frozenset())
    assert first == {number: set(first_hosts(number, 6, 6, 2)) for number in range(6)}
    lost = {number: each - {4} for number, each in first.items()}
    plan = plan_submission(6, 6, 2, lost)
    assert {(order.slice, order.host) for order in plan.copied} == {(1, 4), (4, 4)}
    assert plan.written == plan.dropped == plan.short == ()


@given(layout=layouts(), copies=st.integers(1, 3), lost=st.integers(0, 8), data=st.data())
@settings(max_examples=60)
def test_each_wanted_block_is_read_once_from_a_holder_or_is_missing(layout, copies, lost, data) -> None:
    copies = min(copies, layout.slices)
    holders = holders_of(layout, layout.slices, copies)
    alive = {number: [host for host in each if host != lost] for number, each in holders.items()}
    spans = share(layout.blocks, 4, data.draw(st.integers(1, 5)))
    requests = {rank: [span] for rank, span in enumerate(spans)}
    plan = plan_load(layout, requests, alive, {0: 0})
    read = Counter((read.reader, read.run.block + i) for read in plan.reads for i in range(read.run.count))
    read.update((reader, block) for reader, span in plan.missing for block in range(*span))
    assert read == Counter((rank, block) for rank, span in enumerate(spans) for block in range(*span))
    for each in plan.reads:
        assert each.holder in alive[each.run.slice]
        assert each.holder != lost
        if each.reader == 0 and 0 in alive[each.run.slice]:
            assert each.holder == 0
    gone = {number for number, each in alive.items() if not each}
    assert {slice_of(layout, first) for _, (first, _) in plan.missing} <= gone


def test_one_rank_and_all_ranks_ask_for_the_same_blocks() -> None:
    """The two request modes of §V: a rank knows its own wishes, or those of all."""
    layout, copies, ranks = BlockLayout(1600, 10, 8), 2, 8
    holders = holders_of(layout, 8, copies)
    requests = {rank: [span] for rank, span in enumerate(share(1600, ranks))}
    everybody = plan_load(layout, requests, holders)
    alone = [plan_load(layout, {rank: spans}, holders) for rank, spans in requests.items()]
    for rank, plan in enumerate(alone):
        mine = [read.run for read in everybody.reads if read.reader == rank]
        assert [read.run for read in plan.reads] == mine
    assert max(sent(everybody).values()) <= 1.15 * 1600 / 8
    together = Counter[int]()
    for plan in alone:
        together.update(sent(plan))
    assert max(together.values()) <= 1.6 * 1600 / 8, "ranks that do not know of each other ask different hosts"


def sent(plan: LoadPlan) -> Counter[int]:
    """Return the blocks that each host sends."""
    found = Counter[int]()
    for read in plan.reads:
        found[read.holder] += read.run.count
    return found


def bottleneck_blocks(blocks: int, hosts: int, copies: int, *, permuted: bool) -> float:
    """Return what the busiest host sends when the others share the blocks of a lost one (§IV-B).

    That is n/p^2 if ranges are permuted, else n/(p r), because only the holders of those blocks send. The paper
    counts the lost host among the senders. It is none, and its share falls to the other r - 1 holders of the same
    slices: both figures are r/(r - 1) times as large.
    """
    whole = blocks / hosts**2 if permuted else blocks / (hosts * copies)
    return whole * copies / (copies - 1)


def bottleneck_senders(blocks: int, hosts: int, range_blocks: int) -> int:
    """Return from how many hosts a rank receives at most if ranges are permuted and cut at their ends (§IV-B)."""
    return ceil(blocks / (hosts * (hosts - 1)) / range_blocks)


def load_of_a_lost_host(hosts: int, copies: int, seed: int | None, parts: int = 1) -> tuple[float, int, int]:
    """What the busiest host sends by what it should, and the most senders of a rank with what they should be.

    Blocks of 64 bytes, 16 MiB a host, ranges of 256 KiB (§VI-B).
    """
    per_host, of_range, align = 1 << 18, 1 << 12, 256
    layout = BlockLayout(per_host * hosts, of_range, hosts * parts, seed, parts)
    lost = 1
    holders = {n: [h for h in each if h != lost] for n, each in holders_of(layout, hosts, copies).items()}
    begin, end = share(layout.blocks, hosts, align)[lost]
    left = [rank for rank in range(hosts) if rank != lost]
    parts_of_it = share(end - begin, len(left), align)  # which the others take over
    wanted = {rank: [(begin + low, begin + high)] for rank, (low, high) in zip(left, parts_of_it, strict=True)}
    plan = plan_load(layout, wanted, holders)
    ideal = bottleneck_blocks(layout.blocks, hosts, copies, permuted=seed is not None)
    senders = bottleneck_senders(layout.blocks, hosts, of_range)
    asked: dict[int, set[int]] = defaultdict(set)
    for read in plan.reads:
        asked[read.reader].add(read.holder)
    return max(sent(plan).values()) / ideal, max(map(len, asked.values())), senders


@given(blocks=st.integers(1, 700), of_range=st.integers(1, 40), shares=st.integers(1, 9), parts=st.integers(1, 4))
def test_slices_of_a_share_cut_it_and_leave_each_block_on_its_hosts(blocks, of_range, shares, parts) -> None:
    """ReStore's placement does not depend on how a share is cut."""
    whole = BlockLayout(blocks, of_range, shares)
    cut = BlockLayout(blocks, of_range, shares * parts, 0, parts)
    for number in range(whole.ranges):
        assert cut.position(number) == whole.position(number)
        first = number * of_range
        assert slice_of(cut, first) // parts == slice_of(whole, first)
    for copies in range(1, shares + 1):
        for number in range(cut.slices):
            there = first_hosts(number // parts, shares, shares, copies)
            assert first_hosts(number, cut.slices, shares, copies) == there


@pytest.mark.parametrize(("hosts", "parts"), [(8, 1), (16, 1), (8, 8), (16, 4)])
def test_a_scattered_load_is_near_the_formulas_of_restore(hosts: int, parts: int) -> None:
    ratio, most, formula = load_of_a_lost_host(hosts, 4, 0, parts)
    assert ratio <= 1.15
    assert most <= formula + 1, "parts that are not cut at the ends of ranges touch one more"


def test_without_permutation_only_the_holders_of_the_lost_part_send() -> None:
    ratio, most, _ = load_of_a_lost_host(16, 4, None)
    assert ratio <= 1.15
    assert most == 1
    scattered, _, _ = load_of_a_lost_host(16, 4, 0)
    ideal = bottleneck_blocks(1 << 22, 16, 4, permuted=False) / bottleneck_blocks(1 << 22, 16, 4, permuted=True)
    assert ideal == 4
    assert ratio * ideal / scattered > 3.5, "the busiest sender sends less than a third of it when scattered"


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="0 blocks"):
        BlockLayout(0, 1, 1)
    with pytest.raises(ValueError, match="4 slices, 3 of a share"):
        BlockLayout(8, 1, 4, 0, 3)
    with pytest.raises(ValueError, match="blocks 3 to 9 of 8"):
        list(BlockLayout(8, 1, 1).runs([(3, 9)]))
