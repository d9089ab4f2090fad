from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.errors import ConfigError
from ft_hsdp.train.data import Batches, Permutation, Place, Prefetcher
from ft_hsdp.train.tokens import Tokens


def counting(n: int) -> Tokens:
    """Tokens whose value is their place."""
    return Tokens(np.arange(n, dtype=np.uint16))


layouts = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 3),
        "shards": st.integers(1, 4),
        "ranks": st.integers(1, 3),
        "accumulate": st.integers(1, 2),
    }
)


@given(layout=layouts, extra=st.integers(0, 50), seed=st.integers(0, 2**32))
def test_shards_in_step_use_every_window_once_a_pass(layout: dict[str, int], extra: int, seed: int) -> None:
    step = layout["rows"] * layout["shards"] * layout["ranks"] * layout["accumulate"]
    batches = Batches(counting((step + extra) * 8 + 1), 8, seed=seed, **layout)
    assert batches.windows == step + extra
    used = Counter(
        place
        for index in range(-(-2 * batches.windows // step))
        for shard in range(layout["shards"])
        for rank in range(layout["ranks"])
        for micro in range(layout["accumulate"])
        for place in batches.windows_of(shard, index, rank, micro)
    )
    assert max(used.values()) == 1
    for turn in (0, 1):
        assert {window for t, window in used if t == turn} == set(range(batches.windows))


def test_targets_are_the_inputs_one_token_later() -> None:
    batches = Batches(counting(1000), 9, rows=3, seed=5, shards=2, ranks=2)
    inputs, targets = batches.batch(1, 4, 1)
    assert inputs.shape == targets.shape == (3, 9)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs % 9, torch.arange(9).expand(3, 9))  # a window starts at a multiple of its length
    assert (inputs[:, 0] // 9).tolist() == [window for _, window in batches.windows_of(1, 4, 1)]


def test_the_last_window_has_its_target() -> None:
    batches = Batches(counting(17), 8, rows=2, seed=0, shards=1)
    inputs, targets = batches.batch(0, 0, 0)
    assert sorted(inputs.flatten().tolist()) == list(range(16))
    assert targets.max() == 16
    with pytest.raises(ConfigError):
        Batches(counting(16), 8, rows=2, seed=0, shards=1)


def test_a_batch_depends_on_its_arguments_alone() -> None:
    layout = {"rows": 2, "seed": 3, "shards": 2, "ranks": 2, "accumulate": 2}
    one, other = Batches(counting(5000), 8, **layout), Batches(counting(5000), 8, **layout)
    places = [(s, i, r, m) for i in range(9) for s in range(2) for r in range(2) for m in range(2)]
    forward = {p: one.batch(*p)[0] for p in places}
    backward = {p: other.batch(*p)[0] for p in reversed(places)}
    assert all(torch.equal(forward[p], backward[p]) for p in places)
    reseeded = Batches(counting(5000), 8, **{**layout, "seed": 4})
    assert not all(torch.equal(forward[p], reseeded.batch(*p)[0]) for p in places)


@given(old=st.integers(1, 5), new=st.integers(1, 5), number=st.integers(0, 200))
def test_a_batch_keeps_its_text_under_another_number_of_shards(old: int, new: int, number: int) -> None:
    one, other = (Batches(counting(801), 8, rows=2, seed=7, shards=n, ranks=2) for n in (old, new))
    for rank in range(2):
        was = one.windows_of(number % old, number // old, rank)
        assert other.windows_of(number % new, number // new, rank) == was


def test_passes_differ_in_order() -> None:
    batches = Batches(counting(801), 8, rows=1, seed=0, shards=1)
    orders = [[batches.windows_of(0, turn * 100 + i, 0)[0][1] for i in range(100)] for turn in range(2)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(100))
    assert orders[0] != orders[1]


def test_a_batch_may_lie_across_two_passes() -> None:
    batches = Batches(counting(5 * 8 + 1), 8, rows=3, seed=0, shards=1)
    assert [turn for turn, _ in batches.windows_of(0, 1, 0)] == [0, 0, 1]


def test_too_little_text_names_the_key() -> None:
    with pytest.raises(ConfigError, match=r"^data.path: got '64 tokens'; allowed: at least 65 tokens"):
        Batches(counting(64), 8, rows=2, seed=0, shards=2, ranks=2)


def test_what_lies_outside_the_layout_is_refused() -> None:
    batches = Batches(counting(1000), 8, rows=1, seed=0, shards=2, ranks=3, accumulate=2)
    for place in ((2, 0, 0, 0), (-1, 0, 0, 0), (0, 0, 3, 0), (0, 0, 0, 2), (0, -1, 0, 0)):
        with pytest.raises(ValueError, match="it must be"):
            batches.batch(*place)
    with pytest.raises(ValueError, match="rows is 0"):
        Batches(counting(1000), 8, rows=0, seed=0, shards=2)


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**63 - 1), turn=st.integers(0, 10**6))
def test_every_place_is_taken_once(n: int, seed: int, turn: int) -> None:
    permutation = Permutation(n, seed, turn)
    assert sorted(permutation[i] for i in range(n)) == list(range(n))


@pytest.mark.parametrize("n", [4, 5, 16, 17, 64, 65, 256, 257, 1024, 1025])
def test_sizes_beside_a_power_of_two(n: int) -> None:
    permutation = Permutation(n, 0, 0)
    assert {permutation[i] for i in range(n)} == set(range(n))


def test_the_same_key_gives_the_same_order_and_another_does_not() -> None:
    def order(seed: int, turn: int) -> list[int]:
        permutation = Permutation(100, seed, turn)
        return [permutation[i] for i in range(100)]

    assert order(1, 2) == order(1, 2)
    assert order(1, 2) != order(2, 2)
    assert order(1, 2) != order(1, 3)
    assert order(1, 2) != list(range(100))


def test_the_order_is_fixed_for_all_time() -> None:
    permutation = Permutation(10, seed=7, turn=0)
    assert [permutation[i] for i in range(10)] == [0, 1, 6, 7, 8, 4, 9, 5, 2, 3]


def test_neighbours_are_scattered() -> None:
    n = 10_000
    permutation = Permutation(n, seed=3, turn=0)
    places = [permutation[i] for i in range(n)]
    near = sum(abs(a - b) < n // 100 for a, b in pairwise(places))
    assert 0.5 < near / n / 0.02 < 1.5  # two independent draws are that near in 2 % of cases
    fixed = sum(i == p for i, p in enumerate(places))
    assert fixed < 10


def test_places_outside_are_refused() -> None:
    permutation = Permutation(5, 0, 0)
    assert len(permutation) == 5
    for place in (-1, 5):
        with pytest.raises(IndexError):
            permutation[place]
    with pytest.raises(ValueError, match="at least 1"):
        Permutation(0, 0, 0)


DEADLINE_S = 10.0


class Shelf:
    """A source that says what it was asked for; a read of a place in ``held`` waits until it is let go."""

    def __init__(self, *held: Place) -> None:
        self.asked: list[tuple[int, int, int]] = []
        self.by: set[str] = set()
        self.gates = {place: threading.Event() for place in held}
        self.begun = {place: threading.Event() for place in held}
        self.done = threading.Semaphore(0)

    def batch(self, shard: int, index: int, rank: int, micro: int = 0) -> tuple[int, int, int, int]:
        place = Place(shard, index, micro)
        self.asked.append((shard, index, micro))
        self.by.add(threading.current_thread().name)
        if place in self.gates:
            self.begun[place].set()
            assert self.gates[place].wait(DEADLINE_S)
        self.done.release()
        if index < 0:
            raise OSError("no such batch")
        return shard, index, rank, micro

    def until(self, reads: int) -> None:
        """Wait until so many more reads are done."""
        for _ in range(reads):
            assert self.done.acquire(timeout=DEADLINE_S)


@contextmanager
def prefetcher(source: Shelf, accumulate: int = 1) -> Iterator[Prefetcher[tuple[int, int, int, int]]]:
    reader = Prefetcher(source, 3, accumulate)
    try:
        yield reader
    finally:
        for gate in source.gates.values():
            gate.set()
        reader.close()


def test_a_guess_is_read_before_it_is_asked_for_and_only_once() -> None:
    source = Shelf()
    with prefetcher(source) as reader:
        reader.guess(1, 4)
        source.until(1)
        assert list(reader.batches(1, 4, (1, 5))) == [(1, 4, 3, 0)]
        source.until(1)
        assert list(reader.batches(1, 5, (1, 6))) == [(1, 5, 3, 0)]
        source.until(1)
    assert source.asked == [(1, 4, 0), (1, 5, 0), (1, 6, 0)]
    assert source.by == {"prefetch"}


def test_the_next_micro_batch_is_read_while_one_is_at_work() -> None:
    source = Shelf()
    with prefetcher(source, accumulate=3) as reader:
        work = reader.batches(0, 7, (0, 9))
        for micro in range(3):
            assert next(work) == (0, 7, 3, micro)
            source.until(2 if micro == 0 else 1)
            assert source.asked[-1] == ((0, 7, micro + 1) if micro < 2 else (0, 9, 0))
        assert list(work) == []


def test_a_wrong_guess_is_thrown_away() -> None:
    first = Place(0, 1, 0)
    source = Shelf(first)
    with prefetcher(source) as reader:
        reader.guess(first.shard, first.index)
        assert source.begun[first].wait(DEADLINE_S)
        for index in (2, 3, 9):  # none of them is begun: the thread is busy
            reader.guess(0, index)
        source.gates[first].set()
        assert next(reader.batches(0, 9, (0, 10))) == (0, 9, 3, 0)
    assert source.asked[:2] == [(0, 1, 0), (0, 9, 0)]


def test_what_the_source_raises_is_raised_where_its_batch_is_asked_for() -> None:
    source = Shelf()
    with prefetcher(source) as reader:
        reader.guess(0, -1)
        source.until(1)
        assert next(reader.batches(0, 0, (0, -2))) == (0, 0, 3, 0)
        with pytest.raises(OSError, match="no such batch"):
            next(reader.batches(0, -2, (0, 1)))
        assert next(reader.batches(0, 1, (0, 2))) == (0, 1, 3, 0)


def test_a_read_that_hangs_does_not_keep_the_end_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ft_hsdp.train.data.CLOSE_S", 0.01)
    source = Shelf(Place(0, 0, 0))
    with prefetcher(source) as reader:
        reader.guess(0, 0)
        assert source.begun[Place(0, 0, 0)].wait(DEADLINE_S)
        reader.close()
        with pytest.raises(RuntimeError, match="closed"):
            next(reader.batches(0, 0, (0, 1)))
