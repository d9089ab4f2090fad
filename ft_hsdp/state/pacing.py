"""When copies travel: in the spans in which a host's ranks use the network for nothing else (GEMINI §5).

Copies for other hosts share links with FSDP's collectives and FTAR's ring. Each rank of a host that sends copies
tells the host's state agent when it communicates, in a small page of memory that both map: the *gate*. Neither end
waits for the other, and a read that falls into the middle of a write delays one slice at most.

- `SpanMeter` is the rank's end. It counts the communications that are under way, measures the idle spans between
  them, and puts the profile of `PROFILED` steps into the page if it is steady.
- `Pacer` is the agent's end. Its state server asks it before each slice for a copy reader, on the reader's thread.

A slice goes only while no rank of the host communicates. While the profile is steady, it goes only if Algorithm 2
(`memory.schedule`) still fits it into the span under way. The last span of a step has an open end: there the
votes wait for what is missing. Without a steady profile, or without a bandwidth, that nobody communicates is
enough: then a slice may reach into the next communication, for its own length at most.

Only copies wait here. Fetches of replicas that are behind never do.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

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

# Words of a page, each an int64.
_BUSY, _SPAN, _STEP, _SINCE, _COUNT, _SENT, _IDLE, _LENGTHS = range(8)
MAX_SPANS = PAGE_BYTES // 8 - _LENGTHS

Words = npt.NDArray[np.int64]


def lower_priority() -> None:
    """Let this thread, and those that it starts, give way to training. It cannot be undone."""
    os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))  # 0: the calling thread


def words(page: Bytes) -> Words:
    """Return a page of `PAGE_BYTES` bytes as its words."""
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

    @property
    def attached(self) -> bool:
        """Whether there is a page."""
        return self._words is not None

    def attach(self, page: Bytes) -> None:
        """Write into ``page``, uint8 [PAGE_BYTES], from now on."""
        with self._lock:
            self._words = words(page)
            self._since, self._spans, self._steps, self._whole = time.monotonic_ns(), [], [], False
            self._words[_COUNT], self._words[_SPAN], self._words[_SINCE] = 0, 0, self._since
            self._words[_BUSY] = self._busy

    def detach(self) -> None:
        """Write nothing any more."""
        with self._lock:
            if self._words is not None:
                self._words[_BUSY] = self._words[_COUNT] = 0
            self._words = None

    def sent(self) -> tuple[int, int]:
        """Return the bytes of copies that have left, and how many of them while no rank communicated."""
        with self._lock:
            return (0, 0) if self._words is None else (int(self._words[_SENT]), int(self._words[_IDLE]))

    def begin(self) -> None:
        """Note that a communication begins."""
        with self._lock:
            self._busy += 1
            if self._words is None:
                return
            self._words[_BUSY] = self._busy
            if self._busy == 1:
                self._spans.append((time.monotonic_ns() - self._since) / 1e9)

    def end(self) -> None:
        """Note that a communication has ended."""
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
    """How fast the copies of one rank's shard leave, from bursts: slices without a wait between them."""

    bursts: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=BURSTS))  # bytes, seconds
    size: int = 0  # of the burst under way
    seconds: float = 0.0
    alpha: float = 0.0  # seconds
    bandwidth: float = 0.0  # bytes per second; 0: not known

    def end(self) -> None:
        """End the burst under way."""
        if self.size:
            self.bursts.append((self.size, self.seconds))
            self.size, self.seconds = 0, 0.0
            try:
                alpha, self.bandwidth = fit(self.bursts)
                self.alpha = min(alpha, SLICE_S)
            except ValueError:  # bursts of one size, or too short for the link to count
                took = sum(seconds for _, seconds in self.bursts)
                self.alpha, self.bandwidth = 0.0, sum(size for size, _ in self.bursts) / took if took else 0.0


class Pacer:
    """The agent's end of the gates of its host's ranks. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gates: dict[int, _Gate] = {}
        self._links: dict[int, _Link] = {}
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
            self._links.pop(rank, None)
        if gate is not None:
            os.close(gate.fd)

    def admit(self, rank: int, nbytes: int) -> int:
        """Wait until a slice of a copy may go, and return how large it may be.

        Blocks for `PATIENCE_S` at most. Without a gate it does not block.

        Args:
            rank: Whose shard is sent.
            nbytes: What is left to send, above 0.

        Returns:
            1 to ``nbytes``.
        """
        until = 0.0
        while True:
            with self._lock:
                if not self._gates:
                    return min(nbytes, MOST_SLICE)
                link = self._links.setdefault(rank, _Link())
                room = self._room(rank, link, nbytes)
                now = time.monotonic()
                if not room and until and now > until:
                    self.late += 1
                    room = min(nbytes, LEAST_SLICE)
                if room:
                    self.slices += 1
                    return room
                link.end()
            until = until or now + PATIENCE_S
            time.sleep(TICK_S)

    def sent(self, rank: int, nbytes: int, seconds: float) -> None:
        """Note that a slice has been sent, and how long it has taken."""
        with self._lock:
            if (link := self._links.get(rank)) is not None:
                link.size += nbytes
                link.seconds += seconds
            if (gate := self._gates.get(rank)) is not None:
                gate.words[_SENT] += nbytes
                if not self._busy:
                    gate.words[_IDLE] += nbytes

    @property
    def _busy(self) -> bool:
        """Whether a rank of the host communicates."""
        return any(bool(gate.words[_BUSY]) for gate in self._gates.values())

    def _room(self, rank: int, link: _Link, nbytes: int) -> int:
        """Return how many bytes may go now."""
        if self._busy:
            return 0
        largest = MOST_SLICE
        if link.bandwidth:
            largest = min(max(LEAST_SLICE, round(SLICE_S * link.bandwidth)), MOST_SLICE)
        gate = self._gates.get(rank)
        count = int(gate.words[_COUNT]) if gate is not None else 0
        if gate is None or not 0 < count <= MAX_SPANS or not link.bandwidth:
            return min(nbytes, largest)
        span = int(gate.words[_SPAN])
        if span >= count - 1:
            return min(nbytes, largest)
        spent_s = max(0, time.monotonic_ns() - int(gate.words[_SINCE])) / 1e9
        left_s = USED * int(gate.words[_LENGTHS + span]) / 1e9 - spent_s
        # The next piece of Algorithm 2, with what is left of the span as its only one.
        size = min(nbytes, largest)
        pieces = schedule((left_s,), size, 2, 1, largest, link.bandwidth, link.alpha, 1.0, open_end=False)
        room = pieces[0].size if pieces else 0
        return room if room >= min(size, LEAST_SLICE) else 0
