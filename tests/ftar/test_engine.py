from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from ft_hsdp.core import partition, ring
from ft_hsdp.errors import PeerDead, PeerTimeout, ProtocolViolation, StaleEpoch
from ft_hsdp.ftar import frame
from ft_hsdp.ftar.edges import blocking
from ft_hsdp.ftar.engine import Result, Ring
from ft_hsdp.ftar.frame import Entry, Key

KEY = Key(epoch=1, step=1, attempt=0, bucket=0, prev="00" * 16)
CHUNK = 64  # bytes: 16 elements


@contextmanager
def rings(replicas: Sequence[int], chunk: int = CHUNK, timeout_s: float = 5.0) -> Iterator[list[Ring]]:
    """The members of one ring, joined by socket pairs."""
    n = len(replicas)
    right: list[socket.socket | None] = [None] * n
    left: list[socket.socket | None] = [None] * n
    if n > 1:
        for i in range(n):
            a, b = socket.socketpair()
            right[i], left[(i + 1) % n] = blocking(a, timeout_s), blocking(b, timeout_s)
    made = [Ring(KEY.epoch, replicas, i, left[i], right[i], chunk) for i in range(n)]
    try:
        yield made
    finally:
        for each in made:
            each.release()


def entry(replica: int, weight: int = 1) -> Entry:
    return Entry(replica, weight, replica, 10 + replica, replica / 8)


def sums(
    members: list[Ring], replicas: Sequence[int], locals_: Sequence[torch.Tensor | None], n: int, key: Key = KEY
) -> tuple[list[torch.Tensor], list[Result]]:
    """All members reduce at once; what they hold in the end."""
    outs = [torch.full((n,), float("nan")) for _ in replicas]
    with ThreadPoolExecutor(len(members)) as pool:
        works = [
            pool.submit(m.all_reduce, key, x, out, entry(r, 0 if x is None else 1))
            for m, r, x, out in zip(members, replicas, locals_, outs, strict=True)
        ]
        return outs, [w.result(20) for w in works]


def folded(replicas: Sequence[int], locals_: Sequence[torch.Tensor | None], n: int) -> torch.Tensor:
    """The sum in the order that core.ring promises."""
    of = dict(zip(replicas, locals_, strict=True))
    out = torch.zeros(n)
    for index, span in enumerate(partition.shards(n, len(replicas))):
        order = ring.fold_order(index, replicas, frozenset(r for r in replicas if of[r] is not None))
        parts = [of[r][span.start : span.stop] for r in order]  # type: ignore[index]
        if parts:
            total = parts[0].clone()
            for part in parts[1:]:
                total += part
            out[span.start : span.stop] = total
    return out


def values(count: int, n: int, seed: int = 0) -> list[torch.Tensor]:
    """Numbers of many magnitudes: their sum depends on the order of addition."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=g) * 10 ** torch.randn(n, generator=g) for _ in range(count)]


@pytest.mark.parametrize("members", range(1, 8))
def test_the_sum_is_bit_for_bit_that_of_the_fold_order(members: int) -> None:
    replicas = [(3 * i + 1) % 7 + 10 * (i // 7) for i in range(members)]
    with rings(replicas) as made:
        for n in (0, 1, members - 1, members, members + 1, 16 * members, 1000, 1003):
            given = values(members, n, seed=n)
            before = [x.clone() for x in given]
            outs, results = sums(made, replicas, given, n, replace(KEY, bucket=n))
            expected = folded(replicas, given, n)
            for out, result in zip(outs, results, strict=True):
                assert torch.equal(out, expected), n
                assert result.entries == tuple(entry(r) for r in replicas)
            assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True)), "a local was written"


def test_the_order_of_addition_shows_in_these_values() -> None:
    given = values(5, 1000)
    assert not torch.equal(folded(range(5), given, 1000), folded(range(5), given[::-1], 1000))


@pytest.mark.parametrize("relays", [{0}, {2}, {0, 1}, {1, 3}, {0, 1, 2}, {0, 1, 2, 3}])
def test_relays_add_nothing_and_get_everything(relays: set[int]) -> None:
    replicas, n = [0, 1, 2, 3], 203
    given = [None if r in relays else x for r, x in zip(replicas, values(4, n), strict=True)]
    with rings(replicas) as made:
        outs, results = sums(made, replicas, given, n)  # what they receive into is full of NaN
    expected = folded(replicas, given, n)
    assert torch.isfinite(expected).all()
    assert all(torch.equal(out, expected) for out in outs)
    assert [e.weight for e in results[0].entries] == [0 if r in relays else 1 for r in replicas]


def test_a_relay_does_not_carry_zeros_of_its_own() -> None:
    """-0.0 + 0.0 is 0.0: adding zeros would show."""
    minus = torch.full((8,), -0.0)
    with rings([0, 1]) as made:
        outs, _ = sums(made, [0, 1], [minus, None], 8)
    assert all(torch.signbit(out).all() for out in outs)


def test_a_ring_of_one_copies_or_clears() -> None:
    with rings([4]) as (alone,):
        x, out = torch.arange(5.0), torch.full((5,), float("nan"))
        assert alone.all_reduce(KEY, x, out, entry(4)) == Result((entry(4),), 0)
        assert torch.equal(out, x)
        assert out.data_ptr() != x.data_ptr()
        alone.all_reduce(KEY, None, out, entry(4, 0))
        assert torch.equal(out, torch.zeros(5))


def test_chunks_larger_than_a_socket_buffer() -> None:
    n = 1 << 20
    given = values(3, n)
    with rings([0, 1, 2], chunk=1 << 30) as made:
        outs, results = sums(made, [0, 1, 2], given, n)
    assert all(torch.equal(out, folded([0, 1, 2], given, n)) for out in outs)
    assert all(r.bytes_sent >= 4 * n * 4 // 3 - 16 for r in results)


def test_it_returns_only_when_its_own_sends_have_drained() -> None:
    """The last chunk is received long before the right neighbour takes the last one from here."""
    n = 1 << 20
    a_right, b_left = socket.socketpair()
    b_right, a_left = socket.socketpair()
    a = Ring(1, [0, 1], 0, blocking(a_left, 5), blocking(a_right, 5), 1 << 30)
    x, y, out = torch.ones(n), torch.full((n,), 2.0), torch.empty(n)
    half, size = n // 2, n // 2 * 4
    news = [entry(1)]
    with ThreadPoolExecutor(2) as pool:
        work = pool.submit(a.all_reduce, KEY, x, out, entry(0))

        def feed() -> None:
            first = frame.header(KEY, 0, 0, size, 1, False) + b"".join(e.pack() for e in news)
            b_right.sendall(first + y[half:].numpy().tobytes())
            b_right.sendall(frame.header(KEY, 1, 0, size, 0, False) + (x + y)[:half].numpy().tobytes())

        pool.submit(feed).result(5)
        time.sleep(0.3)
        assert not work.done(), "over, but its sends are not"
        b_left.setblocking(True)
        left = 2 * (size + frame.HEADER.size) + frame.ENTRY.size
        while left:
            left -= len(b_left.recv(min(left, 1 << 20)))
        assert torch.equal(out, x + y)
        result = work.result(5)
        assert result.bytes_sent == 2 * (size + frame.HEADER.size) + frame.ENTRY.size
    a.release()
    for sock in (b_left, b_right):
        sock.close()


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (replace(KEY, epoch=2), StaleEpoch),
        (replace(KEY, step=2), StaleEpoch),
        (replace(KEY, attempt=1), StaleEpoch),
        (replace(KEY, prev="11" * 16), StaleEpoch),
        (replace(KEY, bucket=1), ProtocolViolation),
        (None, ProtocolViolation),  # another size
    ],
)
def test_a_wrong_header_touches_no_memory(wrong: Key | None, error: type[Exception]) -> None:
    left, peer = socket.socketpair()
    sink, right = socket.socketpair()
    member = Ring(1, [0, 1], 0, blocking(left, 5), blocking(right, 5), 1 << 20)
    out = torch.full((8,), 7.0)
    size = 16 if wrong else 20
    head = frame.header(wrong or KEY, 0, 0, size, 1, False)
    peer.sendall(head + entry(1).pack() + torch.zeros(5).numpy().tobytes())
    with pytest.raises(error):
        member.all_reduce(KEY, torch.ones(8), out, entry(0))
    assert torch.equal(out, torch.full((8,), 7.0))
    member.release()
    for sock in (peer, sink):
        sock.close()


def test_a_closed_and_a_silent_neighbour_are_named() -> None:
    with rings([5, 6, 7], timeout_s=0.2) as made:
        with pytest.raises(PeerTimeout) as silent:
            made[0].all_reduce(KEY, torch.ones(9), torch.empty(9), entry(5))
        assert silent.value.suspect == 7
        made[2].close()
        with pytest.raises(PeerDead) as dead:
            made[0].all_reduce(KEY, torch.ones(9), torch.empty(9), entry(5))
        assert dead.value.suspect == 7


def test_a_right_neighbour_that_takes_nothing_is_named() -> None:
    """All that is due from the left (replica 7) is there; the right one (replica 6) does not read."""
    n, size = 3 << 20, 4 << 20
    left, peer = socket.socketpair()
    sink, right = socket.socketpair()
    member = Ring(1, [5, 6, 7], 0, blocking(left, 5), blocking(right, 0.3), 1 << 30)

    def feed() -> None:
        for number, news in enumerate(([entry(7)], [entry(6), entry(7)], [], [])):
            peer.sendall(frame.header(KEY, number, 0, size, len(news), False))
            peer.sendall(b"".join(e.pack() for e in news) + bytes(size))

    with ThreadPoolExecutor(1) as pool:
        pool.submit(feed)
        with pytest.raises(PeerTimeout) as stuck:
            member.all_reduce(KEY, torch.ones(n), torch.empty(n), entry(5))
        assert stuck.value.suspect == 6
    member.release()
    for sock in (peer, sink):
        sock.close()


def test_closing_releases_whoever_waits() -> None:
    with rings([0, 1, 2], timeout_s=30) as made, ThreadPoolExecutor(1) as pool:
        work = pool.submit(made[0].all_reduce, KEY, torch.ones(9), torch.empty(9), entry(0))
        time.sleep(0.05)
        made[0].close()
        made[0].close()
        began = time.monotonic()
        with pytest.raises(PeerDead):
            work.result(5)
        assert time.monotonic() - began < 1


def test_another_shape_or_type_is_a_programmers_error() -> None:
    with rings([0]) as (alone,):
        for local in (torch.ones(4), torch.ones(5, dtype=torch.float64)):
            with pytest.raises(ValueError, match="local is"):
                alone.all_reduce(KEY, local, torch.empty(5), entry(0))
