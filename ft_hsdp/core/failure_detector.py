"""How certain it is that a neighbour is gone, and how long a live process of an overloaded host may be silent.

`PhiAccrual` is the detector of Hayashibara et al. with Akka's logistic approximation of the normal distribution:
phi is -log10 of the probability that a sign of life comes later than now, given the intervals so far.

A fixed bound on silence is too short for a host with many runnable processes, or too long for a quiet one. So each
host measures how late its own timers are, how many processes wait for its CPUs, and how much CPU time a hypervisor
takes away (`HostLoad`, `Stalls`). The result is added to the silence that is accepted.
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
    """Return -log10 of the probability that an interval is longer than `silence_s`.

    Args:
        silence_s: seconds since the last sign of life.
        mean_s: mean of the intervals in seconds.
        deviation_s: their standard deviation in seconds, above 0.

    Returns:
        From 0 to 300; never less for a longer silence.
    """
    y = (silence_s - mean_s) / deviation_s
    exponent = y * (1.5976 + 0.070566 * y * y)  # P = 1 / (1 + e^exponent)
    if exponent > math.log(10) * _MOST:
        return _MOST
    return math.log1p(math.exp(exponent)) / math.log(10)


class PhiAccrual:
    """The signs of life of one neighbour.

    An interval longer than the pause counts as the pause, so that one long stop does not hide the next one.

    Args:
        beat_s: seconds between two signs of life.
        pause_s: seconds of silence that are always accepted on top of that.
        now: seconds of any clock that does not jump ahead while its owner stands still.
    """

    def __init__(self, beat_s: float, pause_s: float, now: float) -> None:
        self._pause_s = pause_s
        self._least_s = beat_s / 4
        self._intervals: deque[float] = deque([beat_s], WINDOW)
        self.heard_at = now

    def heard(self, now: float) -> None:
        """Note a sign of life at `now`, in seconds of the owner's clock."""
        self._intervals.append(min(max(0.0, now - self.heard_at), self._pause_s))
        self.heard_at = now

    def silence(self, now: float) -> float:
        """Return the seconds from the last sign of life until `now`, at least 0."""
        return max(0.0, now - self.heard_at)

    def phi(self, now: float, stall_s: float = 0.0) -> float:
        """Return how improbable it is that the next sign of life is still to come: 0 to 300.

        An overloaded host may delay it by `stall_s` seconds; `now` is in seconds of the owner's clock.
        """
        mean_s = statistics.fmean(self._intervals)
        deviation_s = max(self._least_s, math.sqrt(statistics.fmean((i - mean_s) ** 2 for i in self._intervals)))
        return phi(self.silence(now), mean_s + self._pause_s + stall_s, deviation_s)

    def lost(self, now: float, stall_s: float = 0.0) -> bool:
        """Return whether the silence is longer than the pause and than the noise of the intervals explains.

        `now` and `stall_s` are as for `phi`.
        """
        return self.silence(now) >= self._pause_s + stall_s and self.phi(now, stall_s) >= THRESHOLD


HALF_LIFE_S = 10.0  # after which half of a stall that was seen still counts
MOST_S = 5.0  # more is never added: then a dead process looks alive for too long
LATE_FACTOR = 2.0  # the next stall may be so much longer than the longest of late
CROWD = 2.0  # runnable processes per core above which a fair scheduler starves one now and then
PER_CROWDED_S = 0.25  # for each one more
PER_STOLEN_S = 5.0  # for a host all of whose CPU time is stolen


@dataclass(frozen=True, slots=True)
class HostLoad:
    """What a host measures of its CPUs."""

    pressure: float  # share of the time, 0 to 1, in which some process waited for a CPU (PSI, "some")
    runnable: float  # processes that run or could run, per core
    stolen: float  # share of CPU time, 0 to 1, that the hypervisor gave to other machines

    @property
    def stall_s(self) -> float:
        """Seconds that a live process may have to wait; 0 on a quiet host."""
        crowd = max(0.0, self.runnable - CROWD) * self.pressure
        return crowd * PER_CROWDED_S + self.stolen * PER_STOLEN_S


class Stalls:
    """The longest stall to be expected: the longest one of late, which counts less with every second since."""

    def __init__(self) -> None:
        self._peak_s = 0.0
        self._at = 0.0

    def late(self, late_s: float, now: float) -> None:
        """Note that a timer of this process fired `late_s` seconds late; `now` is that of a monotonic clock."""
        self._seen(LATE_FACTOR * late_s, now)

    def load(self, load: HostLoad, now: float) -> None:
        """Note the `load` that the host measured of its CPUs; `now` is in seconds of the same clock."""
        self._seen(load.stall_s, now)

    def expected_s(self, now: float) -> float:
        """Return the longest stall to be expected at `now`, in seconds, from 0 to `MOST_S`."""
        return self._peak_s * math.exp2(-max(0.0, now - self._at) / HALF_LIFE_S)

    def _seen(self, stall_s: float, now: float) -> None:
        stall_s = min(MOST_S, stall_s)
        if stall_s >= self.expected_s(now):
            self._peak_s, self._at = stall_s, now
