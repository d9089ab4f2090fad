"""Which bytes of a copy travel in which idle span of the network (GEMINI §5, Algorithm 2).

Copies share links with the collectives of FSDP and with FTAR's ring. The spans in which none of them is under way
are measured over some steps, because each step is like the one before. Algorithm 2 then cuts a copy into pieces
that fit into the spans. The algorithm as printed has three errors: it subtracts the time of what remains instead
of the time of the piece (line 18), it sends one copy too many (line 22), and it does not end if a span is shorter
than a piece's fixed cost. They are corrected here.

Times are seconds, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, dist, inf, sqrt
from statistics import fmean, median
from typing import NamedTuple

STEADY = 0.1  # largest deviation of the spans, relative to their mean, for a plan in advance (GEMINI §5.4)
_ROUNDING = 1e-6  # bytes
HELD_UP = 0.02  # part of the time that steps may wait for copies
CREDIT_S = 3.0  # the longest time that steps may wait beyond it: single waits may be the machine's
LATE = 3  # copies in a row that are not complete after a step and its wait, before fewer are made
FITTED = 100  # steps in a row in which twice as many copies would not cost more, before they are made again
SLOWEST = 1024  # times the configured interval, at most


class Piece(NamedTuple):
    span: int  # index of the idle span
    copy: int  # index of the copy: 0 to copies - 2
    offset: int  # in the shard
    size: int


def schedule(
    spans: Sequence[float],
    size: int,
    copies: int,
    parts: int,
    reserve: int,
    bandwidth: float,
    alpha: float,
    mu: float,
    open_end: bool = True,
) -> tuple[Piece, ...]:
    """Cut the copies of a shard into pieces and assign them to idle spans.

    Args:
        spans: lengths of the idle spans of a step, in order.
        size: of the shard.
        copies: of each shard, the owner's own one included: copies - 1 are sent.
        parts: a piece is at most reserve / parts bytes.
        reserve: bytes that may be under way.
        bandwidth: of the link, in bytes per second.
        alpha: fixed cost of a piece in seconds.
        mu: part of each span that may be used, between 0 and 1.
        open_end: whether the last span takes all that remains. Otherwise what does not fit is left out.

    Returns:
        The pieces in the order in which they are sent.

    Raises:
        ValueError: a number is out of range.
    """
    if size < 0 or copies < 1 or parts < 1 or reserve < parts or bandwidth <= 0 or alpha < 0 or not 0 < mu <= 1:
        raise ValueError("size >= 0, copies >= 1, parts >= 1, reserve >= parts, bandwidth > 0, 0 < mu <= 1")
    largest = reserve // parts
    pieces: list[Piece] = []
    copy, offset = 0, 0
    for index, length in enumerate(spans):
        budget = inf if open_end and index == len(spans) - 1 else mu * length
        while copy < copies - 1 and size:
            room = largest if budget == inf else int((budget - alpha) * bandwidth + _ROUNDING)
            piece = min(largest, room, size - offset)
            if piece <= 0:
                break
            pieces.append(Piece(index, copy, offset, piece))
            budget -= alpha + piece / bandwidth
            offset += piece
            if offset == size:
                copy, offset = copy + 1, 0
    return tuple(pieces)


@dataclass(frozen=True, slots=True)
class CopyInterval:
    """Of which states copies are made: every k-th one. k grows while copies hold up steps, and shrinks again.

    It is the configured interval times a power of two, so the states of a longer one are among those of a
    shorter one. All ranks see the same waits, so they come to the same interval.

    Steps have a credit of time that they may wait: each copied state adds `HELD_UP` of the steps of an interval,
    and its wait is taken off. Once it is used up, a copy that costs more than it adds makes the interval longer.
    So the waits of short steps and of long ones come to `HELD_UP` of the time and the first credit. One wait
    takes half of the first credit at most: a single one changes nothing. The credit does not begin anew with
    another interval.
    """

    least: int  # as it is configured
    every: int
    late: int = 0  # copies in a row that were not complete after a step and its wait
    credit_s: float = inf  # how long steps may still wait; below 0: have waited too long; infinite: all of it
    fitted: int = 0  # steps in a row in which the copies of an interval half as long would have cost no more, and
    spare_s: float = 0.0  # what they would have left of their part of the time

    @staticmethod
    def of(every: int) -> CopyInterval:
        return CopyInterval(every, every)

    def due(self, step: int) -> bool:
        """Return whether the state after ``step`` is copied."""
        return step % self.every == 0

    def after(self, waited_s: float, step_s: float, *, late: bool = False) -> CopyInterval:
        """Return the interval after the copies of one state.

        Args:
            waited_s: how long a step was held up for them.
            step_s: how long a step takes.
            late: they were still under way when the wait ran out. Those of the next state end them, so if that
                went on, none would ever be complete, however short the waits are.
        """
        share_s = HELD_UP * self.every * step_s
        limit_s = max(CREDIT_S, 2 * LATE * share_s)
        cost_s = min(waited_s, limit_s / 2)
        credit_s = max(-limit_s, min(limit_s, min(limit_s, self.credit_s) + share_s - cost_s))
        in_a_row = self.late + 1 if late else 0
        slow = (credit_s < 0 and cost_s > share_s) or in_a_row >= LATE
        if slow and self.every < SLOWEST * self.least:
            return CopyInterval(self.least, 2 * self.every, credit_s=credit_s)
        fitted, spare_s = self.fitted + self.every, self.spare_s + share_s / 2 - cost_s
        if late or spare_s < 0:
            fitted, spare_s = 0, 0.0
        if fitted < FITTED or self.every == self.least:
            return CopyInterval(self.least, self.every, in_a_row, credit_s, fitted, spare_s)
        return CopyInterval(self.least, self.every // 2, credit_s=credit_s)


@dataclass(frozen=True, slots=True)
class Profile:
    spans: tuple[float, ...]  # mean length of each
    # Standard deviation of all spans together, relative to their mean; infinite: they do not match.
    deviation: float

    @property
    def steady(self) -> bool:
        """Whether a plan for one step holds for the next."""
        return self.deviation < STEADY


def profile(steps: Sequence[Sequence[float]]) -> Profile:
    """Return what the idle spans of several steps have in common.

    The deviation weighs each span by its length, so that spans of microseconds do not count as unsteady. One
    step in ten is left out: a step with an evaluation or a checkpoint does not make the others unsteady.

    Args:
        steps: the spans of each step. First the steps are left out whose number of spans is not
            the most frequent one, then those whose spans are farthest from the median ones. If more than one in
            ten has another number, the steps are unsteady.
    """
    counts = [len(step) for step in steps]
    if not counts:
        return Profile((), inf)
    usual = max(set(counts), key=lambda count: (counts.count(count), count))
    alike = [step for step in steps if len(step) == usual]
    middle = [median(lengths) for lengths in zip(*alike, strict=True)]
    alike.sort(key=lambda step: sum(abs(a - b) for a, b in zip(step, middle, strict=True)))
    kept = ceil((1 - STEADY) * len(steps))
    spans = tuple(fmean(lengths) for lengths in zip(*alike[:kept], strict=True))
    if len(alike) < kept or not sum(spans):
        return Profile(spans, inf)
    deviations = (
        dist(lengths, [mean] * kept) for lengths, mean in zip(zip(*alike[:kept], strict=True), spans, strict=True)
    )
    return Profile(spans, sum(deviations) / sqrt(kept) / sum(spans))


def fit(pieces: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return the fixed cost of a piece and the bandwidth, by least squares.

    Args:
        pieces: size and time of some pieces, of at least two sizes.

    Returns:
        Seconds, at least 0, and bytes per second.

    Raises:
        ValueError: the pieces do not determine them.
    """
    if len({size for size, _ in pieces}) < 2:
        raise ValueError("pieces of at least two sizes are needed")
    mean_size, mean_time = fmean(size for size, _ in pieces), fmean(time for _, time in pieces)
    slope = sum((size - mean_size) * (time - mean_time) for size, time in pieces) / sum(
        (size - mean_size) ** 2 for size, _ in pieces
    )
    if slope <= 0:
        raise ValueError("larger pieces were not slower")
    return max(0.0, mean_time - slope * mean_size), 1 / slope
