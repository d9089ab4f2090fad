import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest

from ft_hsdp.train.data.prefetch import Prefetcher
from ft_hsdp.train.data.step_plan import MicroBatch

DEADLINE_S = 10.0


class Shelf:
    """A source that says what it was asked for; a read of a place in ``held`` waits until it is let go."""

    def __init__(self, *held: MicroBatch) -> None:
        self.asked: list[tuple[int, int, int]] = []
        self.by: set[str] = set()
        self.gates = {place: threading.Event() for place in held}
        self.begun = {place: threading.Event() for place in held}
        self.done = threading.Semaphore(0)

    def batch(self, shard: int, index: int, rank: int, micro: int = 0) -> tuple[int, int, int, int]:
        place = at(index, shard, micro)
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


def at(index: int, shard: int = 0, micro: int = 0) -> MicroBatch:
    return MicroBatch(shard, index, micro, 3 * index + micro, 3)


@contextmanager
def prefetcher(source: Shelf) -> Iterator[Prefetcher[tuple[int, int, int, int]]]:
    reader = Prefetcher(source)
    try:
        yield reader
    finally:
        for gate in source.gates.values():
            gate.set()
        reader.close()


def test_a_guess_is_read_before_it_is_asked_for_and_only_once() -> None:
    source = Shelf()
    with prefetcher(source) as reader:
        reader.guess([at(4, 1)])
        source.until(1)
        assert reader.batch(at(4, 1), [at(5, 1)]) == (1, 4, 3, 0)
        source.until(1)
        assert reader.batch(at(5, 1), [at(6, 1)]) == (1, 5, 3, 0)
        source.until(1)
    assert source.asked == [(1, 4, 0), (1, 5, 0), (1, 6, 0)]
    assert source.by == {"prefetch"}


def test_the_next_micro_batch_is_read_while_one_is_at_work() -> None:
    source, order = Shelf(), [at(7), at(7, micro=1), at(7, micro=2), at(9)]
    with prefetcher(source) as reader:
        for now, then in pairwise(order):
            assert reader.batch(now, [then]) == (0, 7, 3, now.micro)
            source.until(2 if now is order[0] else 1)
            assert source.asked[-1] == (0, then.index, then.micro)


def test_a_wrong_guess_is_thrown_away() -> None:
    source = Shelf(at(1))
    with prefetcher(source) as reader:
        reader.guess([at(1)])
        assert source.begun[at(1)].wait(DEADLINE_S)
        for index in (2, 3, 9):  # none of them is begun: the thread is busy
            reader.guess([at(index)])
        source.gates[at(1)].set()
        assert reader.batch(at(9), [at(10)]) == (0, 9, 3, 0)
    assert source.asked[:2] == [(0, 1, 0), (0, 9, 0)]


def test_what_the_source_raises_is_raised_where_its_batch_is_asked_for() -> None:
    source = Shelf()
    with prefetcher(source) as reader:
        reader.guess([at(-1)])
        source.until(1)
        assert reader.batch(at(0), [at(-2)]) == (0, 0, 3, 0)
        with pytest.raises(OSError, match="no such batch"):
            reader.batch(at(-2), [at(1)])
        assert reader.batch(at(1), [at(2)]) == (0, 1, 3, 0)


def test_a_read_that_hangs_does_not_keep_the_end_waiting() -> None:
    source = Shelf(at(0))
    with prefetcher(source) as reader:
        reader.guess([at(0)])
        assert source.begun[at(0)].wait(DEADLINE_S)
        reader.close()
        with pytest.raises(RuntimeError, match="closed"):
            reader.batch(at(0), [at(1)])
