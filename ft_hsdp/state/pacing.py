"""When copies travel: in the spans in which a host's ranks use the network for nothing else (GEMINI §5).

Copies for other hosts share links with FSDP's collectives and FTAR's ring. Each rank of a host that sends copies
tells the host's state agent when it communicates, in a small page of memory that both map: the *gate*. Neither end
waits for the other, and a read that falls into the middle of a write delays one slice at most.

- `SpanMeter` is the rank's end. It counts the communications that are under way, measures the idle spans between
  them, and puts the profile of `PROFILED` steps into the page if it is steady.
- `Pacer` is the agent's end. Its state server opens a `CopyStream` for each copy reader, and asks it before each
  slice, on the reader's thread.

A slice goes only while no rank of the host communicates and no other slice is under way: all copies that a host
sends share its link, so their readers take turns. While the profile is steady, it goes only if Algorithm 2
(`memory.schedule`) still fits it into the span under way. The last span of a step has an open end: there the
votes wait for what is missing. Without a steady profile, or without a bandwidth, that nobody communicates is
enough: then a slice may reach into the next communication, for its own length at most.

How much leaves in idle spans is counted when it has left: a byte that waits in the socket when a communication
begins, or that has left since the stream looked last, was not idle.

Only copies wait here. Fetches of replicas that are behind never do.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import numpy.typing as npt

from ft_hsdp.memory.schedule import Profile, fit, profile, schedule
from ft_hsdp.state import shared_memory
from ft_hsdp.state.shared_memory import Bytes

PAGE_BYTES = 64 << 10  # room for the spans of a step: 80 layers and 16 micro-batches have about 4,000
PROFILED = 20  # steps of a profile (GEMINI §5.4)
USED = 0.9  # part of a span that is used: GEMINI's mu
SLICE_S = 0.001  # of the link: what a communication that begins is held up by at most
LEAST_SLICE, MOST_SLICE = 64 << 10, 1 << 20  # bytes
TICK_S = 0.001  # between two looks at a gate that is closed
PATIENCE_S = 1.0  # after which a slice goes in any case: a rank may hang in a communication
NICE = 10  # of the threads that send and receive copies
BURSTS = 32  # from which the bandwidth is computed
UNSENT = 128 << 10  # bytes of all copies that wait in sockets: they leave although a communication has begun
LEAST_UNSENT = 16 << 10  # of one of them
STUCK_S = 0.1  # after which a slice under way holds up no other one: its reader takes nothing
SETTLE_S = 0.02  # longest wait at the end of a stream until its last bytes have left

# Words of a page, each an int64.
_BUSY, _SPAN, _STEP, _SINCE, _COUNT, _SENT, _IDLE, _BEGUN, _LENGTHS = range(9)
MAX_SPANS = PAGE_BYTES // 8 - _LENGTHS

Words = npt.NDArray[np.int64]


def lower_priority() -> None:
    """Let this thread, and those that it starts, give way to training. It cannot be undone."""
    os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))  # 0: the calling thread


def words(page: Bytes) -> Words:
    return page.view(np.int64)


class SpanMeter:
    """A rank's end of the gate. Any thread may call it; no call makes a system call or waits for the agent.

    Until `attach`, and after `detach`, it does nothing.

    Args:
        found: Takes each profile, and whether copies keep to it; called on the thread that ends a step.
    """

    def __init__(self, found: Callable[[Profile, bool], None] = lambda _, __: None) -> None:
        self._found = found
        self._lock = threading.Lock()  # between this rank's threads, for some instructions
        self._words: Words | None = None
        self._busy = 0  # communications under way
        self._since = 0  # ns, when the idle span under way began
        self._spans: list[float] = []  # of the step under way, in seconds
        self._steps: list[list[float]] = []  # of the steps of the profile under way
        self._whole = False  # the step under way was seen from its begin

    def attach(self, page: Bytes) -> None:
        with self._lock:
            self._words = words(page)
            self._since, self._spans, self._steps, self._whole = time.monotonic_ns(), [], [], False
            self._words[_COUNT], self._words[_SPAN], self._words[_SINCE] = 0, 0, self._since
            self._words[_BUSY] = self._busy

    def detach(self) -> None:
        with self._lock:
            if self._words is not None:
                self._words[_BUSY] = self._words[_COUNT] = 0
            self._words = None

    def sent(self) -> tuple[int, int]:
        """Return the bytes of copies that have left, and how many of them while no rank communicated."""
        with self._lock:
            return (0, 0) if self._words is None else (int(self._words[_SENT]), int(self._words[_IDLE]))

    def begin(self) -> None:
        with self._lock:
            self._busy += 1
            if self._words is None:
                return
            self._words[_BUSY] = self._busy
            self._words[_BEGUN] += 1
            # More spans than that make no plan, and an evaluation may take hours.
            if self._busy == 1 and len(self._spans) <= MAX_SPANS:
                self._spans.append((time.monotonic_ns() - self._since) / 1e9)

    def end(self) -> None:
        with self._lock:
            self._busy = max(0, self._busy - 1)
            if self._words is None:
                return
            if self._busy == 0:
                self._since = time.monotonic_ns()
                self._words[_SPAN], self._words[_SINCE] = len(self._spans), self._since
            self._words[_BUSY] = self._busy

    def step(self, step: int) -> None:
        """Note that ``step`` is committed here: the spans of the next one are counted anew."""
        with self._lock:
            if self._words is None:
                return
            now = time.monotonic_ns()
            if self._busy == 0:
                self._spans.append((now - self._since) / 1e9)
            if self._whole:
                self._steps.append(self._spans)
            self._spans, self._since, self._whole = [], now, True
            self._words[_SPAN], self._words[_STEP], self._words[_SINCE] = 0, step, now
            if len(self._steps) < PROFILED:
                return
            seen, self._steps = profile(self._steps), []
            planned = seen.steady and len(seen.spans) <= MAX_SPANS
            self._words[_COUNT] = 0
            if planned:
                lengths = [round(1e9 * span) for span in seen.spans]
                self._words[_LENGTHS : _LENGTHS + len(lengths)] = lengths
                self._words[_COUNT] = len(lengths)
        self._found(seen, planned)


@dataclass(slots=True)
class _Gate:
    """The page of one rank, and its descriptor."""

    fd: int
    words: Words


@dataclass(slots=True)
class _Link:
    """How fast the copies that a host sends leave, from bursts: slices without a wait between them."""

    bursts: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=BURSTS))  # bytes, seconds
    size: int = 0  # of the burst under way
    seconds: float = 0.0
    alpha: float = 0.0  # seconds
    bandwidth: float = 0.0  # bytes per second; 0: not known

    def end(self) -> None:
        if self.size:
            self.bursts.append((self.size, self.seconds))
            self.size, self.seconds = 0, 0.0
            try:
                alpha, self.bandwidth = fit(self.bursts)
                self.alpha = min(alpha, SLICE_S)
            except ValueError:  # bursts of one size, or too short for the link to count
                took = sum(seconds for _, seconds in self.bursts)
                self.alpha, self.bandwidth = 0.0, sum(size for size, _ in self.bursts) / took if took else 0.0


class CopyStream:
    """One copy on its way to a reader, as a context. On the reader's thread.

    Args:
        rank: Whose shard is sent.
        queued: Returns how many bytes the reader's end has not acknowledged.
    """

    def __init__(self, pacer: Pacer, rank: int, queued: Callable[[], int]) -> None:
        self._pacer = pacer
        self._queued = queued
        self.rank = rank
        self.pending = 0  # bytes that were handed over, and have not left as far as the last look has seen
        self.slice_since = 0.0  # when a slice went that is under way; 0: none
        self._begun = -1  # communications of the host that had begun at the last look

    @property
    def unsent(self) -> int:
        return self._pacer.unsent

    def __enter__(self) -> Self:
        self._pacer.enter(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        until = time.monotonic() + SETTLE_S
        while kind is None and self.look() and self.pending and time.monotonic() < until:
            time.sleep(TICK_S)
        self._pacer.leave(self)

    def look(self) -> bool:
        """Count what has left since the last look, and return whether nobody has communicated since then."""
        queued = self._queued()
        begun = self._pacer.begun()
        left = max(0, self.pending - queued)
        quiet = begun >= 0 and begun == self._begun
        self.pending, self._begun = self.pending - left, begun
        self._pacer.count(self.rank, left, idle=quiet)
        return quiet

    def admit(self, nbytes: int) -> int:
        """Wait until a slice may go, and return how large it may be.

        Blocks for `PATIENCE_S` at most, and as long as the slices of others take. Without a gate it does not
        block.

        Returns:
            1 to ``nbytes``.
        """
        until = 0.0
        while True:
            self.look()
            now = time.monotonic()
            until = until or now + PATIENCE_S
            room = self._pacer.room(self, nbytes, late=now > until)
            if room:
                return room
            if room is not None:  # it has waited for its turn
                time.sleep(TICK_S)

    def sent(self, nbytes: int) -> None:
        self.pending += nbytes
        self._pacer.sent(self, nbytes)
        self.look()


class Pacer:
    """The agent's end of the gates of its host's ranks. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._gates: dict[int, _Gate] = {}
        self._link = _Link()
        self._streams: list[CopyStream] = []
        self._turns: deque[CopyStream] = deque()  # those that wait for a slice, the next one first
        self.slices = 0  # that went so far,
        self.late = 0  # and of these, after `PATIENCE_S` in vain

    def open(self, rank: int) -> int:
        """Return the descriptor of the page of ``rank``, which stays the pacer's.

        Raises:
            OSError: There is no memory or descriptor for it.
        """
        with self._lock:
            if rank not in self._gates:
                fd = shared_memory.create(PAGE_BYTES)
                try:
                    page = shared_memory.attach(fd, PAGE_BYTES, writable=True)
                except BaseException:
                    os.close(fd)
                    raise
                self._gates[rank] = _Gate(fd, words(page))
            return self._gates[rank].fd

    def close(self, rank: int) -> None:
        """Forget the page of ``rank``, which is gone, or sends no copies any more."""
        with self._lock:
            gate = self._gates.pop(rank, None)
            if not self._gates:
                self._link = _Link()
        if gate is not None:
            os.close(gate.fd)

    def stream(self, rank: int, queued: Callable[[], int]) -> CopyStream:
        return CopyStream(self, rank, queued)

    @property
    def unsent(self) -> int:
        """How many bytes may wait in each socket, so that those of all streams together are `UNSENT` at most."""
        return max(LEAST_UNSENT, UNSENT // max(1, len(self._streams)))

    # For streams.

    def enter(self, stream: CopyStream) -> None:
        with self._lock:
            self._streams.append(stream)

    def leave(self, stream: CopyStream) -> None:
        with self._lock:
            self._streams.remove(stream)
            if stream in self._turns:
                self._turns.remove(stream)
            stream.slice_since = 0.0
            self._count(stream.rank, stream.pending, idle=False)
            self._lock.notify_all()

    def begun(self) -> int:
        """Return how many communications have begun here; -1: one is under way, or there is no gate."""
        with self._lock:
            if self._busy or not self._gates:
                return -1
            return sum(int(gate.words[_BEGUN]) for gate in self._gates.values())

    def count(self, rank: int, nbytes: int, *, idle: bool) -> None:
        with self._lock:
            self._count(rank, nbytes, idle=idle)

    def room(self, stream: CopyStream, nbytes: int, *, late: bool) -> int | None:
        """Return how large a slice may go now; 0: none. Blocks for `TICK_S` at most.

        Args:
            stream: That asks.
            nbytes: What it has left to send, above 0.
            late: A small one goes even if a rank communicates.

        Returns:
            Bytes. None: it is another stream's turn.
        """
        with self._lock:
            if not self._gates:
                return min(nbytes, MOST_SLICE)
            if stream not in self._turns:
                self._turns.append(stream)
            if not self._lock.wait_for(lambda: self._turns[0] is stream and not self._sending, TICK_S):
                return None
            room = self._room(stream, nbytes)
            if not room:
                self._link.end()
                if late:
                    self.late += 1
                    room = min(nbytes, LEAST_SLICE)
            if room:
                self._turns.popleft()
                self.slices += 1
                stream.slice_since = time.monotonic()
            return room

    def sent(self, stream: CopyStream, nbytes: int) -> None:
        with self._lock:
            if stream.slice_since:
                self._link.size += nbytes
                self._link.seconds += time.monotonic() - stream.slice_since
            stream.slice_since = 0.0
            self._lock.notify_all()

    def _count(self, rank: int, nbytes: int, *, idle: bool) -> None:
        if (gate := self._gates.get(rank)) is not None:
            gate.words[_SENT] += nbytes
            gate.words[_IDLE] += nbytes if idle else 0

    @property
    def _busy(self) -> bool:
        return any(bool(gate.words[_BUSY]) for gate in self._gates.values())

    @property
    def _sending(self) -> bool:
        latest = time.monotonic() - STUCK_S
        return any(stream.slice_since > latest for stream in self._streams)

    def _room(self, stream: CopyStream, nbytes: int) -> int:
        """Return how many bytes may go now, if no other slice is under way."""
        if self._busy:
            return 0
        link, largest = self._link, MOST_SLICE
        if link.bandwidth:
            largest = min(max(LEAST_SLICE, round(SLICE_S * link.bandwidth)), MOST_SLICE)
        gate = self._gates.get(stream.rank)
        count = int(gate.words[_COUNT]) if gate is not None else 0
        if gate is None or not 0 < count <= MAX_SPANS or not link.bandwidth:
            return min(nbytes, largest)
        span = int(gate.words[_SPAN])
        if span >= count - 1:
            return min(nbytes, largest)
        spent_s = max(0, time.monotonic_ns() - int(gate.words[_SINCE])) / 1e9
        spent_s += sum(each.pending for each in self._streams) / link.bandwidth  # they leave first
        left_s = USED * int(gate.words[_LENGTHS + span]) / 1e9 - spent_s
        # The next piece of Algorithm 2, with what is left of the span as its only one.
        size = min(nbytes, largest)
        pieces = schedule((left_s,), size, 2, 1, largest, link.bandwidth, link.alpha, 1.0, open_end=False)
        room = pieces[0].size if pieces else 0
        return room if room >= min(size, LEAST_SLICE) else 0
