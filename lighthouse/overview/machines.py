"""What ranks measure of themselves and of their machines, by name; and machines whose clocks are wrong. Pure.

A rank's sign of life says what its host's clock showed when it was made. The lighthouse hears of it somewhat later
by its own: of many, the one with the least delay tells how far the clock is off. No decision depends on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ft_hsdp.protocol import RankBeat

MEASURES = {  # those that begin with "host" are of the whole host; another name is dropped
    "rank_cpu_ratio": "Processors that the rank's process keeps busy",
    "rank_resident_bytes": "Memory of the rank's process",
    "gpu_memory_used_bytes": "Memory of the rank's GPU that is in use",
    "gpu_memory_bytes": "All memory of the rank's GPU",
    "gpu_power_watts": "Power that the rank's GPU draws",
    "gpu_temperature_celsius": "Temperature of the rank's GPU",
    "gpu_utilization_ratio": "Share of the time in which a kernel ran on the rank's GPU",
    "gpu_xid": "Newest Xid error of the rank's GPU since the rank was started; 0 if there was none",
    "host_memory_bytes": "All memory of the host",
    "host_memory_available_bytes": "Memory of the host that processes may still take",
    "host_run_free_bytes": "Free room in the file system of the run's folder",
    "host_checkpoint_free_bytes": "Free room in the file system of checkpoint.dir",
    "host_received_bytes_per_second": "Bytes that came over the host's network interfaces",
    "host_sent_bytes_per_second": "Bytes that left over the host's network interfaces",
}
HOST, CLOCK = "host_", "host_clock_ahead_seconds"
OFF_S, RIGHT_S = 2.0, 1.0  # a clock is wrong from the first on, and right again below the second
WINDOW_S, LEAST = 15.0, 5  # signs of life of so long, and so many, are judged together
SILENT_S = 60.0  # a host that is not heard for so long is forgotten


def split(load: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Return what a rank has measured of itself, and of its host."""
    own = {name: value for name, value in load.items() if not name.startswith(HOST)}
    return own, {name: value for name, value in load.items() if name not in own}


class OddClock(NamedTuple):
    host: str
    over: bool  # it is right again
    ahead_s: float  # of the lighthouse's clock
    reason: str


@dataclass(slots=True)
class _Host:
    began: float  # the window
    heard: float
    count: int = 0
    least_s: float = 0.0  # delay
    ahead_s: float | None = None  # by the last window
    off: bool = False


class Clocks:
    """The clocks of the hosts of a job, beside that of the lighthouse. ``now`` is in monotonic seconds."""

    def __init__(self) -> None:
        self._hosts: dict[str, _Host] = {}

    def ahead(self) -> dict[str, float]:
        """Return by how many seconds the clock of each host is ahead of the lighthouse's."""
        return {name: host.ahead_s for name, host in self._hosts.items() if host.ahead_s is not None}

    def hear(self, beats: Iterable[RankBeat], unix: float, now: float) -> list[OddClock]:
        """Take signs of life that have come at ``unix`` by the lighthouse's clock; return what changes."""
        found = []
        for beat in (beat for beat in beats if beat.t):
            one = self._hosts.setdefault(beat.host, _Host(now, now))
            one.least_s = min(one.least_s, unix - beat.t) if one.count else unix - beat.t
            one.count, one.heard = one.count + 1, now
            if now - one.began >= WINDOW_S and one.count >= LEAST:
                one.ahead_s, one.began, one.count = -one.least_s, now, 0
                off = abs(one.ahead_s) > (RIGHT_S if one.off else OFF_S)
                if off != one.off:
                    why = f"{abs(one.ahead_s):.1f} s {'ahead of' if one.ahead_s > 0 else 'behind'} the lighthouse"
                    found.append(OddClock(beat.host, not off, one.ahead_s, why))
                one.off = off
        for name in [name for name, host in self._hosts.items() if now - host.heard >= SILENT_S]:
            if self._hosts.pop(name).off:
                found.append(OddClock(name, True, 0.0, "nothing is heard of the host any more"))
        return found
