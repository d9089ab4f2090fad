"""Phi: how sure one can be that a neighbour is gone, from the times at which it was heard. Pure.

The phi accrual detector of Hayashibara et al. with Akka's logistic approximation of the normal distribution: phi
is -log10 of the probability that a sign of life comes later than now, given the intervals so far.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

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


class Pulse:
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
