import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import pytest

from ft_hsdp.memory.schedule import Profile
from ft_hsdp.state import pacing, shared_memory
from ft_hsdp.state.pacing import (
    LEAST_SLICE,
    MAX_SPANS,
    MOST_SLICE,
    PAGE_BYTES,
    PATIENCE_S,
    PROFILED,
    SETTLE_S,
    STUCK_S,
    TICK_S,
    CopyStream,
    Pacer,
    SpanMeter,
)
from ft_hsdp.state.shared_memory import InMemorySnapshots
from ft_hsdp.state.transfer.donor_connection import CLASS, COPY, path
from ft_hsdp.state.transfer.http import StateServer
from tests.support.known import KnownConnection
from tests.support.state.state_helpers import STATE, TOKEN, sealed

BANDWIDTH = 1e8  # bytes per second


@dataclass
class Clock:
    """Time that passes only when somebody waits."""

    ns: int = 10**12

    def monotonic_ns(self) -> int:
        return self.ns

    def monotonic(self) -> float:
        return self.ns / 1e9

    def sleep(self, seconds: float) -> None:
        self.ns += round(1e9 * seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pacing, "time", clock)
    return clock


@pytest.fixture
def pacer() -> Iterator[Pacer]:
    pacer = Pacer()
    yield pacer
    for rank in range(4):
        pacer.close(rank)


def meter(pacer: Pacer, rank: int = 0, found: list[tuple[Profile, bool]] | None = None) -> SpanMeter:
    seen: list[tuple[Profile, bool]] = [] if found is None else found
    meter = SpanMeter(lambda profile, planned: seen.append((profile, planned)))
    meter.attach(shared_memory.attach(pacer.open(rank), PAGE_BYTES, writable=True))
    return meter


class Reader(CopyStream):
    """A stream whose bytes stay in its socket until they are acknowledged."""

    def __init__(self, pacer: Pacer, rank: int = 0) -> None:
        super().__init__(pacer, rank, lambda: self.queue)
        self.queue = 0
        pacer.enter(self)

    def __enter__(self) -> Self:
        return self

    def go(self, nbytes: int) -> int:
        """Hand over a slice at `BANDWIDTH`."""
        size = self.admit(nbytes)
        pacing.time.ns += round(1e9 * size / BANDWIDTH)  # type: ignore[attr-defined]
        self.sent(size)
        return size


def train(meter: SpanMeter, clock: Clock, steps: int, spans: tuple[float, ...] = (0.1, 0.2, 0.05)) -> None:
    """Train steps with these idle spans, and 10 ms of communication between each two of them."""
    for step in range(steps):
        for number, span in enumerate(spans):
            if number:
                meter.begin()
                clock.sleep(0.01)
                meter.end()
            clock.sleep(span)
        meter.step(step)


def measured(pacer: Pacer, clock: Clock) -> None:
    """Have the pacer see a burst at `BANDWIDTH`, of a rank that comes and goes."""
    spare, reader = meter(pacer, 3), Reader(pacer, 3)
    assert reader.go(1 << 20) == 1 << 20
    spare.begin()
    assert not pacer.room(reader, 1, late=False)
    spare.end()
    pacer.leave(reader)
    pacer.close(3)


def test_without_a_gate_nothing_waits(pacer: Pacer) -> None:
    one, two = Reader(pacer), Reader(pacer, 1)
    assert one.admit(100) == 100
    assert two.admit(1 << 30) == MOST_SLICE


def test_a_slice_waits_for_the_ranks_of_the_host_that_communicate(pacer: Pacer, clock: Clock) -> None:
    first, second = meter(pacer), meter(pacer, 1)
    reader = Reader(pacer)
    assert reader.go(100) == 100
    second.begin()
    first.begin()
    first.end()
    waited = 0

    def ends(seconds: float) -> None:
        nonlocal waited
        waited += 1
        clock.ns += round(1e9 * seconds)
        if waited == 5:
            second.end()

    pacing.time.sleep = ends  # type: ignore[assignment]
    assert reader.admit(100) == 100
    assert waited == 5
    assert pacer.late == 0


def test_bytes_were_idle_if_they_left_while_nobody_communicated(pacer: Pacer, clock: Clock) -> None:
    """A slice that the socket takes at once may leave in the middle of the next communication."""
    rank, other = meter(pacer), meter(pacer, 1)
    with Reader(pacer) as reader:
        assert reader.go(100) == 100
        assert rank.sent() == (100, 100)
        reader.queue = 70
        assert reader.go(100) == 100
        assert rank.sent() == (130, 130), "30 have left"
        other.begin()
        other.end()
        reader.queue = 40
        reader.look()
        assert rank.sent() == (160, 130), "30 have left before or after it began"
        reader.queue = 10
        reader.look()
        assert rank.sent() == (190, 160)
        other.begin()
    assert rank.sent() == (200, 160), "what is left at the end leaves while a rank communicates"
    assert other.sent() == (0, 0)


def test_the_last_bytes_are_waited_for_a_moment(pacer: Pacer, clock: Clock) -> None:
    rank = meter(pacer)
    for leaves, idle in ((True, 100), (False, 100)):
        with Reader(pacer) as reader:
            reader.queue = 100
            reader.go(100)

            def passes(seconds: float, reader: Reader = reader, leaves: bool = leaves) -> None:
                clock.ns += round(1e9 * seconds)
                reader.queue = 0 if leaves else 100

            pacing.time.sleep = passes  # type: ignore[assignment]
            began = clock.ns
        assert clock.ns - began <= 1e9 * (SETTLE_S + TICK_S)
        assert rank.sent()[1] == idle
    assert rank.sent()[0] == 200


def test_all_readers_of_a_host_share_one_slice_and_take_turns(pacer: Pacer, clock: Clock) -> None:
    meter(pacer), meter(pacer, 1)
    measured(pacer, clock)
    readers = [Reader(pacer), Reader(pacer), Reader(pacer, 1)]
    most = round(pacing.SLICE_S * BANDWIDTH)
    assert readers[0].admit(1 << 30) == most
    others = [reader for reader in readers[1:] for _ in range(2)]
    assert [pacer.room(reader, 1 << 30, late=True) for reader in others] == [None] * 4
    readers[0].sent(most)
    assert [pacer.room(reader, 1 << 30, late=False) for reader in (*readers, readers[1])] == [
        None,
        most,
        None,
        None,
    ]
    readers[1].sent(most)
    assert [pacer.room(reader, 1 << 30, late=False) for reader in readers] == [None, None, most]
    assert sum(reader.unsent for reader in readers) <= pacing.UNSENT


def test_a_reader_that_takes_nothing_holds_up_the_others_for_a_moment(pacer: Pacer, clock: Clock) -> None:
    meter(pacer)
    stuck, other = Reader(pacer), Reader(pacer)
    stuck.admit(100)
    assert pacer.room(other, 100, late=False) is None
    clock.sleep(STUCK_S)
    assert pacer.room(other, 100, late=False) == 100
    waits = Reader(pacer)
    assert pacer.room(waits, 100, late=False) is None
    pacer.leave(waits)
    pacer.leave(other)
    assert stuck.go(100) == 100, "a stream that is gone has no turn"


def test_what_waits_in_the_sockets_takes_a_part_of_the_span(pacer: Pacer, clock: Clock) -> None:
    spans = meter(pacer)
    train(spans, clock, PROFILED + 1)
    measured(pacer, clock)
    spans.step(100)
    clock.sleep(0.0892)
    one, other = Reader(pacer), Reader(pacer)
    other.queue = other.pending = 10_000
    assert one.go(1 << 30) == pytest.approx(0.0007 * BANDWIDTH, rel=0.01)


def test_a_rank_that_hangs_in_a_communication_holds_up_a_slice_for_a_while_only(pacer, clock) -> None:
    meter(pacer).begin()
    began = clock.monotonic()
    assert Reader(pacer).admit(1 << 30) == LEAST_SLICE
    assert PATIENCE_S < clock.monotonic() - began < 2 * PATIENCE_S
    assert pacer.late == 1


def test_a_rank_that_is_gone_holds_up_nothing(pacer: Pacer, clock: Clock) -> None:
    meter(pacer).begin()
    pacer.close(0)
    assert Reader(pacer).admit(100) == 100
    pacer.close(0)


def test_steps_that_are_alike_make_a_plan(pacer: Pacer, clock: Clock) -> None:
    found: list[tuple[Profile, bool]] = []
    spans = meter(pacer, found=found)
    train(spans, clock, PROFILED + 1)  # the first one was not seen from its begin
    ((profile, planned),) = found
    assert planned
    assert profile.spans == pytest.approx((0.1, 0.2, 0.05))
    measured(pacer, clock)
    spans.step(100)
    reader = Reader(pacer)
    # In the first span of 100 ms, 90 are used.
    assert reader.go(1 << 30) == round(pacing.SLICE_S * BANDWIDTH)
    clock.sleep(0.0882)
    assert reader.go(1 << 30) == pytest.approx(0.0008 * BANDWIDTH, rel=0.01)
    clock.sleep(0.001)
    sent: list[int] = []
    waiting = threading.Event()

    def passes(seconds: float) -> None:
        clock.ns += round(1e9 * seconds)
        if not waiting.is_set() and clock.ns > end:
            waiting.set()
            spans.begin()
            spans.end()

    end = clock.ns + 10_000_000
    pacing.time.sleep = passes  # type: ignore[assignment]
    sent.append(reader.go(1 << 30))
    assert waiting.is_set(), "the rest of the first span is too short"
    assert sent == [round(pacing.SLICE_S * BANDWIDTH)]


@pytest.mark.parametrize(("more", "planned"), [(0, True), (1, False)])
def test_a_plan_has_as_many_spans_as_the_page_has_room_for(pacer, clock, more, planned) -> None:
    """80 layers with 3 communications each, and 16 micro-batches, are 3,841 spans."""
    assert MAX_SPANS > 2 * 80 * 3 * 16
    found: list[tuple[Profile, bool]] = []
    spans = meter(pacer, found=found)
    train(spans, clock, PROFILED + 1, (0.001,) * (MAX_SPANS + more))
    ((profile, kept),) = found
    assert profile.steady
    assert (len(profile.spans), kept) == (MAX_SPANS + more, planned)


def test_the_last_span_of_a_plan_has_an_open_end(pacer: Pacer, clock: Clock) -> None:
    spans = meter(pacer)
    train(spans, clock, PROFILED + 1)
    measured(pacer, clock)
    spans.step(100)
    reader = Reader(pacer)
    for _ in range(2):
        spans.begin()
        spans.end()
    clock.sleep(10.0)
    began = clock.ns
    assert reader.admit(1 << 30) == round(pacing.SLICE_S * BANDWIDTH)
    assert clock.ns == began


def test_steps_that_differ_make_none(pacer: Pacer, clock: Clock) -> None:
    found: list[tuple[Profile, bool]] = []
    spans = meter(pacer, found=found)
    for step in range(PROFILED + 1):
        train(spans, clock, 1, (0.1, 0.05 if step % 2 else 0.2))
    ((profile, planned),) = found
    assert not planned
    assert not profile.steady
    measured(pacer, clock)
    spans.step(100)
    reader = Reader(pacer)
    clock.sleep(10.0)
    began = clock.ns
    assert reader.admit(100) == 100
    assert clock.ns == began, "that nobody communicates is enough"


def test_a_meter_without_a_page_does_nothing(pacer: Pacer, clock: Clock) -> None:
    spans = SpanMeter(lambda *_: pytest.fail("a profile of nothing"))
    train(spans, clock, 2 * PROFILED)
    attached = meter(pacer)
    attached.begin()
    attached.detach()
    assert Reader(pacer).admit(100) == 100
    attached.end()


def test_communications_overlap(pacer: Pacer, clock: Clock) -> None:
    found: list[tuple[Profile, bool]] = []
    spans = meter(pacer, found=found)
    for step in range(PROFILED + 1):
        clock.sleep(0.1)
        spans.begin()
        spans.begin()
        clock.sleep(0.1)
        spans.end()
        clock.sleep(0.1)
        spans.end()
        clock.sleep(0.3)
        spans.step(step)
    ((profile, _),) = found
    assert profile.spans == pytest.approx((0.1, 0.3))


class Small(Pacer):
    """Counts what is asked, and hands out small slices."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[int] = []

    def room(self, stream: CopyStream, nbytes: int, *, late: bool) -> int:
        self.given.append(min(nbytes, 100_000))
        return self.given[-1]


def test_the_server_paces_copies_and_nothing_else() -> None:
    snapshot, _ = sealed(size=1 << 20)
    source, pacer = InMemorySnapshots(), Small()
    source.put(snapshot.manifest, snapshot.room)
    spans = meter(pacer)
    server = StateServer("127.0.0.1", 0, source, TOKEN, pacer)
    try:
        none: dict[str, str] = {}
        for headers, slices in ((none, 0), ({CLASS: COPY}, -(-len(snapshot.data) // 100_000))):
            connection = KnownConnection(server.address, TOKEN)
            connection.request("GET", path(STATE, 0).format("data"), headers=headers)
            assert connection.getresponse().read() == bytes(snapshot.data)
            connection.close()
            assert len(pacer.given) == slices
    finally:
        server.close()  # which waits for its readers' threads
    assert sum(pacer.given) == len(snapshot.data)
    assert spans.sent()[0] == len(snapshot.data)
    pacer.close(0)
