"""Overload: how long a live process of a host may be silent because others have its CPUs. Pure.

A fixed bound on silence is either too short for a host with many runnable processes or too long for a quiet one.
So each host measures by how much its own timers are late, how many processes wait for its CPUs, and how much of
them a hypervisor gives to others. The result is added to the silence that is accepted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
