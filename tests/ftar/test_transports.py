from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ft_hsdp.errors import FTARError, PeerDead, PeerTimeout, ProtocolViolation, Skipped, StaleEpoch
from ft_hsdp.ftar import frame as wire
from ft_hsdp.ftar.allreduce import DTYPES, AllReduceOrder, AllReduceResult
from ft_hsdp.ftar.dataplane.cpu import CpuPlane
from ft_hsdp.ftar.transport.base import Transfer
from tests.support.ftar.ring_rig import FLAVOURS, Flavour, Rig, Shape, feed, framing, rig
from tests.support.ftar.ring_values import KEY, entry, folded, same, values
from tests.support.programs import inapplicable

THREADED = 72 * 1024  # bytes of a chunk that is worth a thread


@pytest.fixture(params=FLAVOURS, ids=lambda f: f.name)
def flavour(request: pytest.FixtureRequest) -> Flavour:
    return request.param


class Sums:
    """One all-reduce at all members of a rig; ``locals_`` None relays."""

    def __init__(
        self,
        rig_: Rig,
        locals_: Sequence[Tensor | None],
        step: int = 1,
        in_place: bool = False,
        n: int = 0,
        travels: torch.dtype | None = None,
    ) -> None:
        given = next((x for x in locals_ if x is not None), torch.empty(n))
        self.locals = [None if x is None else rig_.tensor(i, x) for i, x in enumerate(locals_)]
        nothing = torch.full(given.shape, -77, dtype=given.dtype)
        if given.dtype.is_floating_point:
            nothing.fill_(float("nan"))
        self.outs = [
            x if in_place and x is not None else rig_.tensor(i, nothing) for i, x in enumerate(self.locals)
        ]
        self.before = [None if x is None else x.clone() for x in locals_]
        sent = travels or given.dtype
        plan = rig_.plan(given.numel(), sent.itemsize)
        self.expected = folded(plan, rig_.names, locals_, sent).to(given.dtype)
        self._travels = travels
        self._names = rig_.names
        self._key = replace(KEY, step=step)
        self._rig = rig_
        self.works: dict[int, Future[AllReduceResult]] = {}

    def submit(self, *positions: int) -> Sums:
        for i in positions or range(len(self.outs)):
            mine = entry(self._names[i], 0 if self.locals[i] is None else 1)
            order = AllReduceOrder(self._key, self.locals[i], self.outs[i], mine, None, self._travels)
            self.works[i] = self._rig.submit(i, order)
        return self

    def wait(self, *positions: int) -> Sums:
        self._rig.wait([self.works[i] for i in positions or self.works])
        return self

    def check(self) -> None:
        """Bit for bit the same everywhere, and what the order of addition says."""
        for i, work in self.works.items():
            result = work.result(0)
            assert result.out is self.outs[i]
            assert same(self.outs[i], self.expected), f"member {i}"
            weights = [0 if x is None else 1 for x in self.locals]
            assert result.entries == tuple(entry(r, w) for r, w in zip(self._names, weights, strict=True))

    def check_inputs(self) -> None:
        for x, before in zip(self.locals, self.before, strict=True):
            assert x is None or (before is not None and same(x, before)), "an input was written"


def test_sums_of_all_types_and_sizes(flavour: Flavour) -> None:
    """None, one, N-1 and N elements, ragged chunks, many partitions; all out of place. fp32 may travel as bf16."""
    some = (0, 1, 2, 3, 101, 800)
    cases = [(dtype, None, n) for dtype in DTYPES for n in (some if dtype is torch.float32 else (2, 101))]
    cases += [(torch.float32, torch.bfloat16, n) for n in some]
    with rig(flavour, 3) as ring:
        for step, (dtype, travels, n) in enumerate(cases):
            sums = Sums(ring, values(3, n, dtype, seed=n), step, travels=travels).submit().wait()
            sums.check()
            sums.check_inputs()
            sent = [work.result().bytes_sent for work in sums.works.values()]
            size = (travels or dtype).itemsize
            least = 4 * (n // 3) * size
            most = least + 4 * 2 * size + 200 * (4 + n) + 3 * wire.ENTRY_BYTES
            assert all(least <= s <= most for s in sent)


def test_large_chunks_in_many_partitions(flavour: Flavour) -> None:
    """No more than S x C on its way to a neighbour, at any time; and that much is used."""
    members, shape = 4, Shape(THREADED, 3)
    with rig(flavour, members, shape) as ring:
        sums = Sums(ring, values(members, THREADED // 4 * 3 * members + 1001)).submit().wait()
        sums.check()
        sums.check_inputs()
        for sender in ring.senders:
            assert THREADED <= sender.high_water <= THREADED * shape.slots


@pytest.mark.parametrize("chunk", [64, THREADED])
def test_several_works_in_the_queue(flavour: Flavour, chunk: int) -> None:
    """Small and large ones, in and out of place, one after the other on the same edges."""
    with rig(flavour, 3, Shape(chunk)) as ring:
        works = []
        for step, n in enumerate((5, 40_000, 0, 50_001, 3)):
            works.append(Sums(ring, values(3, n if chunk > 64 else n // 50, seed=n), step, in_place=step % 2 == 1))
        for sums in works:
            sums.submit()
        for sums in works:
            sums.wait().check()
            sums.check_inputs() if sums is not works[1] and sums is not works[3] else None
        assert [o.frames for o in ring.senders] == [i.frames for i in ring.receivers]


@pytest.mark.parametrize("travels", [None, torch.bfloat16])
def test_relays(flavour: Flavour, travels: torch.dtype | None) -> None:
    """What a relay holds is NaN, and stays with it; if all relay the sum is zeros.

    -0.0 + 0.0 is 0.0: a relay that added zeros would show.
    """
    with rig(flavour, 4) as ring:
        for step, (relays, n) in enumerate(itertools.product(({0}, {1, 3}, {0, 1, 2}, {0, 1, 2, 3}), (3, 501))):
            locals_ = [None if i in relays else x for i, x in enumerate(values(4, n))]
            sums = Sums(ring, locals_, step, n=n, travels=travels).submit().wait()
            sums.check()
            assert torch.isfinite(sums.expected).all()
        only = [torch.full((9,), -0.0), None, None, None]
        negative = Sums(ring, only, 100, travels=travels).submit().wait()
        negative.check()
        assert torch.signbit(negative.outs[0]).all()


@pytest.mark.parametrize("chunk", [64, THREADED])
def test_a_neighbour_that_closes_in_the_middle(flavour: Flavour, chunk: int) -> None:
    """All are released, somebody names it, no input was written. (Who is to blame is the group's to say.)"""
    for last in (1, 4, 9):
        with rig(flavour, 3, Shape(chunk)) as ring:
            sums = Sums(ring, values(3, 2 * chunk))
            ring.dies(1, last)
            sums.submit().wait(0, 2)
            errors = [sums.works[i].exception() for i in (0, 2)]
            assert all(isinstance(e, PeerDead) for e in errors)
            assert ring.names[1] in [e.suspect for e in errors if isinstance(e, FTARError)]
            sums.check_inputs()


def test_with_two_members_both_ends_name_each_other(flavour: Flavour) -> None:
    for last in (0, 1, 3):
        with rig(flavour, 2, Shape(64)) as ring:
            sums = Sums(ring, values(2, 128))
            ring.dies(1, last) if last else ring.hang_up(1)
            error = sums.submit(*(0, 1)[: last + 1]).wait(0).works[0].exception()
            assert isinstance(error, PeerDead)
            assert error.suspect == ring.names[1]
            sums.check_inputs()
            again = Sums(ring, values(2, 5), 2).submit(0).wait()
            assert isinstance(again.works[0].exception(), PeerDead | Skipped)


def test_a_silent_left_neighbour(flavour: Flavour) -> None:
    with rig(flavour, 2, Shape(64, timeout_s=0.2)) as ring:
        sums = Sums(ring, values(2, 100)).submit(0).wait()
        error = sums.works[0].exception()
        assert isinstance(error, PeerTimeout), error
        assert error.suspect == ring.names[1]
        sums.check_inputs()


def test_a_right_neighbour_that_takes_nothing(flavour: Flavour) -> None:
    """All that is due from it as the left neighbour comes."""
    with rig(flavour, 2, Shape(64, 4, timeout_s=0.3)) as ring:
        n = 16 * 2 * 6
        sums = Sums(ring, values(2, n)).submit(0)
        sent = feed(ring, 1, n, framing(ring, 1, n))
        error = sums.wait().works[0].exception()
        assert isinstance(error, PeerTimeout), error
        assert error.suspect == ring.names[1]
        assert ring.senders[0].high_water <= 4 * 64
        assert len(sent) == 2 * 6


def attack(ring: Rig, head: bytes, error: type[FTARError], payload: Tensor, n: int = 8) -> None:
    """Member 1 of 2 sends one frame in a sum of ``n``; member 0 refuses it, and no memory is written."""
    sums = Sums(ring, values(2, n))
    out, sent = sums.outs[0].clone(), ring.tensor(1, payload)
    ring.senders[1].begin(lambda _: None)
    ring.senders[1].send(head, sent, False)
    got = sums.submit(0).wait().works[0].exception()
    assert isinstance(got, error), got
    assert same(sums.outs[0], out), "the output was written"
    sums.check_inputs()


def test_a_frame_of_another_all_reduce(flavour: Flavour) -> None:
    """`test_frame` has all that a header can say; here one of each error passes through every transport."""
    for key, error in ((replace(KEY, prev="11" * 16), StaleEpoch), (replace(KEY, bucket=1), ProtocolViolation)):
        with rig(flavour, 2) as ring:
            how = framing(ring, 1, 8, key=key)
            attack(ring, how.header(how.operations[0], 0, False) + entry(6).pack(), error, torch.ones(4))


@pytest.mark.parametrize("what", ["size", "noise", "early"])
def test_a_frame_that_the_plan_does_not_have(flavour: Flavour, what: str) -> None:
    if what == "early" and flavour.connections > 1:
        inapplicable("no connection knows what the others carry")
    with rig(flavour, 2) as ring:
        how = framing(ring, 1, 64 if what == "early" else 10)
        if what == "early":  # a final chunk of a later round: a final sum would be overwritten
            attack(ring, how.header(how.operations[1], 1, False), ProtocolViolation, torch.ones(16), 64)
        elif what == "size":
            head = how.header(how.operations[0], 0, False) + entry(6).pack()
            attack(ring, head, ProtocolViolation, torch.ones(5))
        else:
            attack(ring, bytes(range(wire.HEADER.size)) + entry(6).pack(), ProtocolViolation, torch.ones(4))


def test_closing_releases_whoever_waits(flavour: Flavour) -> None:
    """From another thread, any number of times, with nobody's help."""
    with rig(flavour, 3, Shape(THREADED, timeout_s=60)) as ring:
        sums = Sums(ring, values(3, 100)).submit(0)
        for _ in range(2):
            ring.receivers[0].close()
            ring.senders[0].close()
        if "sim" not in flavour.name:
            sums.wait()
            assert isinstance(sums.works[0].exception(), PeerDead)


def test_memory_of_a_neighbour_that_has_left_is_not_believed(flavour: Flavour) -> None:
    """It may have been something else when it was read; only an answer that gets through shows that it was not."""
    if flavour.transport != "shm" and not flavour.registered:
        inapplicable("what has come is ours")
    with rig(flavour, 2) as ring:
        how = framing(ring, 1, 8)
        out = torch.empty(8)
        ring.receivers[0].begin(
            Transfer(framing(ring, 0, 8), CpuPlane().open(None, out, ring.plan(8, 4)), 2, True)
        )
        sent = ring.tensor(1, torch.ones(4))
        ring.senders[1].begin(lambda _: None)
        ring.senders[1].send(how.header(how.operations[0], 0, False) + entry(6).pack(), sent, True)
        ring.wait([])
        arrival = ring.receivers[0].next(block=True)
        assert arrival is not None
        assert arrival.data is not None
        assert same(arrival.data, torch.ones(4))
        ring.senders[1].close()
        with pytest.raises(PeerDead) as left:
            ring.receivers[0].release(arrival)
        assert left.value.suspect == ring.names[1]
        del arrival
