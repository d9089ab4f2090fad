"""Host load: what /proc says of this host's CPUs, and of a process on it. A few small files, read now and then."""

from __future__ import annotations

import os
from pathlib import Path

from ft_hsdp.core.failure_detector import HostLoad

PROC = Path("/proc")
STOPPED = frozenset("Tt")


class HostLoadReader:
    """Reads the load of this host since the last reading. Not blocking beyond reading /proc.

    Args:
        proc: where /proc is; a file that is missing there (an old kernel, another system) counts as a quiet host.
        cores: CPUs that this process may use; None asks the system.
    """

    def __init__(self, proc: Path = PROC, cores: int | None = None) -> None:
        self._proc = proc
        self._cores = cores or len(os.sched_getaffinity(0))
        self._waited_us: int | None = None
        self._jiffies: tuple[int, int] | None = None  # all, stolen
        self._at = 0.0

    def read(self, now: float) -> HostLoad:
        """The load since the last call; ``now`` is in monotonic seconds. The first call says: quiet."""
        span_us = (now - self._at) * 1e6
        waited_us, jiffies = self._pressure(), self._cpu_times()
        pressure = stolen = 0.0
        if self._waited_us is not None and waited_us is not None and span_us > 0:
            pressure = min(1.0, max(0.0, (waited_us - self._waited_us) / span_us))
        if self._jiffies is not None and jiffies is not None and jiffies[0] > self._jiffies[0]:
            stolen = max(0.0, (jiffies[1] - self._jiffies[1]) / (jiffies[0] - self._jiffies[0]))
        self._waited_us, self._jiffies, self._at = waited_us, jiffies, now
        return HostLoad(pressure, self._runnable() / self._cores, stolen)

    def _text(self, name: str) -> str:
        try:
            return (self._proc / name).read_text()
        except (OSError, ValueError):
            return ""

    def _pressure(self) -> int | None:
        """Microseconds since boot in which somebody waited for a CPU."""
        some = self._text("pressure/cpu").partition("\n")[0]
        total = some.rpartition("total=")[2]
        return int(total) if some.startswith("some") and total.isdecimal() else None

    def _cpu_times(self) -> tuple[int, int] | None:
        """Jiffies of all CPUs, and those that were stolen: user nice system idle iowait irq softirq steal."""
        fields = self._text("stat").partition("\n")[0].split()[1:9]
        if len(fields) < 8 or not all(f.isdecimal() for f in fields):
            return None
        numbers = [int(f) for f in fields]
        return sum(numbers), numbers[7]

    def _runnable(self) -> int:
        """Threads that run or could run, on the whole host."""
        fields = self._text("loadavg").split()
        running = fields[3].partition("/")[0] if len(fields) > 3 else ""
        return int(running) if running.isdecimal() else 0


def is_stopped(pid: int, proc: Path = PROC) -> bool:
    """Whether the process was stopped (SIGSTOP, a debugger). False if that cannot be known."""
    try:
        text = (proc / str(pid) / "stat").read_text()
    except (OSError, ValueError):
        return False
    return text.rpartition(")")[2].strip()[:1] in STOPPED
