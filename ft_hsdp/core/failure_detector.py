"""Phi: how sure one can be that a neighbour is gone, from the times at which it was heard. Pure.

The phi accrual detector of Hayashibara et al. with Akka's logistic approximation of the normal distribution: phi
is -log10 of the probability that a sign of life comes later than now, given the intervals so far.

Overload: how long a live process of a host may be silent because others have its CPUs. Pure.

A fixed bound on silence is either too short for a host with many runnable processes or too long for a quiet one.
So each host measures by how much its own timers are late, how many processes wait for its CPUs, and how much of
them a hypervisor gives to others. The result is added to the silence that is accepted.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

THRESHOLD = 8.0
WINDOW = 200
_MOST = 300.0  # more than enough to be sure, and far from what a float cannot hold


def phi(silence_s: float, mean_s: float, deviation_s: float) -> float:
    """-log10 P(an interval is longer than ``silence_s``); from 0 to 300, never less for a longer silence.

    mean_s and deviation_s are of the intervals; deviation_s > 0.
    """
    y = (silence_s - mean_s) / deviation_s
    exponent = y * (1.5976 + 0.070566 * y * y)  # P = 1 / (1 + e^exponent)
    if exponent > math.log(10) * _MOST:
        return _MOST
    return math.log1p(math.exp(exponent)) / math.log(10)


class PhiAccrual:
    """The signs of life of one neighbour.

    beat_s: when the next one is due; pause_s: the silence that is always accepted on top of that. Times are
    seconds of any clock that does not jump ahead while its owner stands still. An interval longer than the pause
    counts as the pause, so that one long stop does not make the next one invisible.
    """

    def __init__(self, beat_s: float, pause_s: float, now: float) -> None:
        self._pause_s = pause_s
        self._least_s = beat_s / 2
        self._intervals: deque[float] = deque([beat_s], WINDOW)
        self.heard_at = now

    def heard(self, now: float) -> None:
        """A sign of life came."""
        self._intervals.append(min(max(0.0, now - self.heard_at), self._pause_s))
        self.heard_at = now

    def silence(self, now: float) -> float:
        """Seconds since the last sign of life."""
        return max(0.0, now - self.heard_at)

    def phi(self, now: float, stall_s: float = 0.0) -> float:
        """How unlikely it is that the next sign of life is still to come, if it may be ``stall_s`` late."""
        mean_s = statistics.fmean(self._intervals)
        deviation_s = max(self._least_s, math.sqrt(statistics.fmean((i - mean_s) ** 2 for i in self._intervals)))
        return phi(self.silence(now), mean_s + self._pause_s + stall_s, deviation_s)

    def lost(self, now: float, stall_s: float = 0.0) -> bool:
        """Whether the silence is longer than the pause, and longer than its noise explains.

        Args:
            now: seconds of the owner's clock.
            stall_s: seconds for which an overloaded host may keep a live neighbour from saying anything.
        """
        return self.silence(now) >= self._pause_s + stall_s and self.phi(now, stall_s) >= THRESHOLD


HALF_LIFE_S = 10.0  # after which half of a stall that was seen still counts
MOST_S = 5.0  # more is never added: then a dead process looks alive for too long
LATE_FACTOR = 2.0  # the next stall may be so much longer than the longest of late
CROWD = 2.0  # runnable processes per core from which on a fair scheduler starves somebody now and then
PER_CROWDED_S = 0.25  # for each one more
PER_STOLEN_S = 5.0  # for a host all of whose CPU time is stolen


@dataclass(frozen=True, slots=True)
class HostLoad:
    """What a host says of its CPUs.

    Attributes:
        pressure: share of the time, 0 to 1, in which somebody waited for a CPU (PSI, "some").
        runnable: processes that run or could run, for each core.
        stolen: share of CPU time, 0 to 1, that the hypervisor gave to others.
    """

    pressure: float
    runnable: float
    stolen: float

    @property
    def stall_s(self) -> float:
        """Seconds that a live process may have to wait; 0 on a quiet host."""
        crowd = max(0.0, self.runnable - CROWD) * self.pressure
        return crowd * PER_CROWDED_S + self.stolen * PER_STOLEN_S


class Stalls:
    """The longest stall that is to be expected: the longest of late, and less with every second since."""

    def __init__(self) -> None:
        self._peak_s = 0.0
        self._at = 0.0

    def late(self, late_s: float, now: float) -> None:
        """A timer of this process fired ``late_s`` seconds late."""
        self._seen(LATE_FACTOR * late_s, now)

    def load(self, load: HostLoad, now: float) -> None:
        """The host said this of its CPUs."""
        self._seen(load.stall_s, now)

    def expected_s(self, now: float) -> float:
        """Seconds, 0 to `MOST_S`; ``now`` is of any monotonic clock, the same in all calls."""
        return self._peak_s * math.exp2(-max(0.0, now - self._at) / HALF_LIFE_S)

    def _seen(self, stall_s: float, now: float) -> None:
        stall_s = min(MOST_S, stall_s)
        if stall_s >= self.expected_s(now):
            self._peak_s, self._at = stall_s, now
