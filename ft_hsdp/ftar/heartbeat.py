"""Heartbeats between the neighbours of a ring: finds members that are dead and members that are stuck.

Each member tells its neighbours every `beat_s` how many all-reduces it has entered. A member that sends nothing is
presumed dead (phi accrual). On an overloaded host that takes longer, unless its process is seen to be stopped. A
member that sends heartbeats but does not enter, within `timeout_s`, the all-reduce in which its right neighbour
waits, is stuck. A neighbour that itself waits is not blamed: the cause lies further left and is found there. Nor
is one whose training loop has announced a pause, as long as that may last: its heartbeats say so.

The load of the host comes from a few small files in /proc, which are read every `LOAD_S`.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from ft_hsdp import protocol
from ft_hsdp.core.failure_detector import HostLoad, PhiAccrual, Stalls
from ft_hsdp.errors import FTARError, PeerDead, PeerTimeout
from ft_hsdp.ftar.allreduce import Ring
from ft_hsdp.ftar.connections import Peer
from ft_hsdp.ftar.rendezvous import Rendezvous
from ft_hsdp.ftar.settings import Settings
from ft_hsdp.lifetime import process_stat

PROC = Path("/proc")
STOPPED = frozenset((b"T", b"t"))
LINE = 256  # bytes of a file in /proc that are read


class HostLoadReader:
    """Reads how loaded this host is. Blocks only as long as it takes to read a few files in /proc.

    Args:
        proc: where /proc is. A file that is missing there (an old kernel, another system) counts as a quiet host.
        cores: number of CPUs that this process may use; None: ask the system.
    """

    def __init__(self, proc: Path = PROC, cores: int | None = None) -> None:
        self._proc = proc
        self._cores = cores or len(os.sched_getaffinity(0))
        self._waited_us: int | None = None
        self._jiffies: tuple[int, int] | None = None  # all, stolen
        self._at = 0.0

    def read(self, now: float) -> HostLoad:
        """Return the load since the last call; the first call returns a quiet host.

        Args:
            now: monotonic time in seconds.
        """
        span_us = (now - self._at) * 1e6
        waited_us, jiffies = self._pressure(), self._cpu_times()
        pressure = stolen = 0.0
        if self._waited_us is not None and waited_us is not None and span_us > 0:
            pressure = min(1.0, max(0.0, (waited_us - self._waited_us) / span_us))
        if self._jiffies is not None and jiffies is not None and jiffies[0] > self._jiffies[0]:
            stolen = max(0.0, (jiffies[1] - self._jiffies[1]) / (jiffies[0] - self._jiffies[0]))
        self._waited_us, self._jiffies, self._at = waited_us, jiffies, now
        return HostLoad(pressure, self._runnable() / self._cores, stolen)

    def _line(self, name: str) -> str:
        try:
            fd = os.open(f"{self._proc}/{name}", os.O_RDONLY)
        except OSError:
            return ""
        try:
            return os.read(fd, LINE).partition(b"\n")[0].decode(errors="replace")
        except OSError:
            return ""
        finally:
            os.close(fd)

    def _pressure(self) -> int | None:
        """Return for how many microseconds since boot at least one thread waited for a CPU; None if unknown."""
        some = self._line("pressure/cpu")
        total = some.rpartition("total=")[2]
        return int(total) if some.startswith("some") and total.isdecimal() else None

    def _cpu_times(self) -> tuple[int, int] | None:
        """Return the jiffies of all CPUs, and how many of them were stolen; None if unknown.

        The fields of /proc/stat are user nice system idle iowait irq softirq steal.
        """
        fields = self._line("stat").split()[1:9]
        if len(fields) < 8 or not all(f.isdecimal() for f in fields):
            return None
        numbers = [int(f) for f in fields]
        return sum(numbers), numbers[7]

    def _runnable(self) -> int:
        """Return how many threads run or could run on the whole host."""
        fields = self._line("loadavg").split()
        running = fields[3].partition("/")[0] if len(fields) > 3 else ""
        return int(running) if running.isdecimal() else 0


def is_stopped(pid: int) -> bool:
    """Return whether process `pid` is stopped (SIGSTOP, a debugger); False if that cannot be known."""
    try:
        return process_stat(pid)[0] in STOPPED
    except OSError:
        return False


LATE_BEATS = 1  # a timer that is this many beats late means that this process stood still
LOAD_S = 0.5  # between two readings of the host's load


class HostSentinel:
    """Estimates how long this host, when overloaded, may keep a live process from sending heartbeats.

    One sentinel serves all rings of a process, so that it remembers earlier stalls.
    """

    def __init__(self) -> None:
        self._stalls = Stalls()
        self._reader = HostLoadReader()
        self._looked = 0.0

    def tick(self, late_s: float, now: float) -> None:
        """Record that a timer of this process fired `late_s` seconds late at `now` (monotonic seconds)."""
        self._stalls.late(late_s, now)
        if now - self._looked >= LOAD_S:
            first, self._looked = self._looked == 0.0, now
            load = self._reader.read(now)
            if not first:
                self._stalls.load(load, now)

    def stall_s(self, now: float) -> float:
        """Return for how many seconds longer than on a quiet host a silence is tolerated."""
        return self._stalls.expected_s(now)


class Heartbeat:
    """The heartbeats of one member in one ring, on the control loop, from construction until `stop`.

    Silence of a peer is counted only while this process runs: a SIGSTOP, a starved core or a held GIL here would
    otherwise look like the silence of others.

    Args:
        settings: `beat_s`, `silence_s` and `timeout_s`.
        rendezvous: has the edges; those that are made later are watched from then on.
        sentinel: how long this host may stall.
        broken: called with the error when a neighbour is dead or stuck.
        pause_s: returns for how many seconds a training loop of this replica may pause from now; 0: none does.
    """

    def __init__(
        self,
        settings: Settings,
        rendezvous: Rendezvous,
        sentinel: HostSentinel,
        broken: Callable[[FTARError], None],
        pause_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._epoch = rendezvous.grant.epoch
        self._settings = settings
        self._rendezvous = rendezvous
        self._sentinel = sentinel
        self._broken = broken
        self._pause_s = pause_s
        self._loop = asyncio.get_running_loop()
        self._ring: Ring | None = None
        self._detectors: dict[Peer, PhiAccrual] = {}
        self._before = time.monotonic()  # of the last tick
        self._stood_still = 0.0  # seconds in which this process did not run
        self._progress = (0, 0)  # all-reduces entered, chunks received
        self._moved = self._before  # when the progress last changed
        self._timer = self._loop.call_soon(self._tick)

    def ring_formed(self, ring: Ring) -> None:
        """Watch the progress of `ring`.

        Both neighbours took part in the barrier, so both were alive a moment ago.
        """
        self._ring = ring
        for peer in self._rendezvous.edges:
            self._detector(peer)

    def stop(self) -> None:
        """Send no more heartbeats and expect none."""
        self._timer.cancel()

    def _tick(self) -> None:
        began = time.monotonic()
        late_s = began - self._before - self._settings.beat_s
        if late_s >= LATE_BEATS * self._settings.beat_s:
            self._stood_still += late_s
        self._before = began
        self._sentinel.tick(max(0.0, late_s), began)
        self._timer = self._loop.call_later(self._settings.beat_s, self._tick)
        now = began - self._stood_still
        self._send()
        error = self._lost(now) or self._stuck(now)
        if error is not None:
            self._broken(error)

    def _send(self) -> None:
        ring = self._ring
        entered, sent = (ring.entered, ring.sent) if ring is not None else (0, 0)
        stall_ms = math.ceil(1000 * self._sentinel.stall_s(time.monotonic()))
        pause_ms = math.ceil(1000 * self._pause_s())
        frame = protocol.beat_frame(self._epoch, entered, sent, stall_ms, os.getpid(), pause_ms)
        for peer in self._rendezvous.edges:
            peer.send_heartbeat(frame)

    def _detector(self, peer: Peer) -> PhiAccrual:
        if peer not in self._detectors:
            now = time.monotonic() - self._stood_still
            self._detectors[peer] = PhiAccrual(self._settings.beat_s, self._settings.silence_s, now)
        return self._detectors[peer]

    def _lost(self, now: float) -> PeerDead | None:
        """Return the error for a neighbour of this ring that has become silent. Any bytes are a sign of life."""
        for peer in self._rendezvous.edges:
            if peer not in self._detectors and peer.newest.epoch != self._epoch:
                continue
            detector = self._detector(peer)
            heard_at = peer.heard_at - self._stood_still
            if heard_at > detector.heard_at:
                detector.heard(heard_at)
            if detector.lost(now) and self._confirmed(peer, detector, now):
                who = peer.member.replica if peer.member is not None else None
                return PeerDead(f"replica {who}: no sign of life for {detector.silence(now):.2f} s", suspect=who)
        return None

    def _confirmed(self, peer: Peer, detector: PhiAccrual, now: float) -> bool:
        """Return whether a silence that is too long on a quiet host is too long on these two hosts as well.

        A stopped process is lost whatever the load; otherwise the larger stall of both hosts is added.
        """
        newest = peer.newest
        if peer.same_host and newest.pid not in (0, os.getpid()) and is_stopped(newest.pid):
            return True  # no load explains a stopped process
        here_s = self._sentinel.stall_s(time.monotonic())
        return detector.lost(now, max(here_s, newest.stall_ms / 1000))

    def _stuck(self, now: float) -> FTARError | None:
        """Return the error for a left neighbour that lives, sends no chunk, and does not wait itself."""
        ring, left = self._ring, self._rendezvous.left
        if ring is None or left is None or left.member is None:
            return None
        progress, newest = (ring.entered, ring.received), left.newest
        pauses = newest.epoch == self._epoch and newest.pause_ms > 0
        if not ring.busy or pauses or progress != self._progress:
            self._progress, self._moved = progress, now
        waited_s = now - self._moved
        if waited_s < self._settings.timeout_s:
            return None
        who = left.member.replica
        if newest.epoch != self._epoch or newest.entered < ring.entered:
            why = f"replica {who} lives, but has not entered an all-reduce for {waited_s:.1f} s"
            return PeerTimeout(why, suspect=who)
        if newest.sent > ring.received:
            why = f"{newest.sent - ring.received} chunks of replica {who} have not come for {waited_s:.1f} s"
            return PeerDead(why, suspect=who)
        return None
