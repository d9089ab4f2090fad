"""Host load: what /proc says of this host's CPUs, and of a process on it. A few small files, read now and then.

Beats: signs of life between the neighbours of one ring, and who is to blame if there are none, or no progress.

Each member says every ``beat_s`` how many all-reduces it has entered. Whoever says nothing is held to be lost (phi
accrual); on an overloaded host that takes longer, unless its process is seen to be stopped. Whoever beats, but for
``timeout_s`` does not enter the all-reduce that its right neighbour waits in, is stuck. A neighbour that waits
itself is not blamed: the cause lies further left, and is seen there.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

from ft_hsdp import protocol
from ft_hsdp.core.failure_detector import HostLoad, PhiAccrual, Stalls
from ft_hsdp.errors import FTARError, PeerDead, PeerTimeout
from ft_hsdp.ftar.allreduce import Ring
from ft_hsdp.ftar.peer import Peer
from ft_hsdp.ftar.rendezvous import Rendezvous
from ft_hsdp.ftar.settings import Settings
from ft_hsdp.protocol import RingBeat

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


LATE_BEATS = 2  # from when on this process, not its neighbours, was silent
LOAD_S = 0.5  # between two looks at the host's load


class HostSentinel:
    """How long an overloaded host may keep a live process of it from beating; outlives the rings of a process."""

    def __init__(self) -> None:
        self._stalls = Stalls()
        self._reader = HostLoadReader()
        self._looked = 0.0

    def tick(self, late_s: float, now: float) -> None:
        """A timer of this process fired ``late_s`` late, at ``now`` (monotonic seconds)."""
        self._stalls.late(late_s, now)
        if now - self._looked >= LOAD_S:
            first, self._looked = self._looked == 0.0, now
            load = self._reader.read(now)
            if not first:
                self._stalls.load(load, now)

    def stall_s(self, now: float) -> float:
        """Seconds to be patient for longer than on a quiet host."""
        return self._stalls.expected_s(now)


class Heartbeat:
    """The beats of one member in the ring of ``formation``, on the control loop, from now until `stop`.

    ``formation`` has the edges that there are by now; ``broken`` is told why the ring is of no more use.

    Silence is counted only while this process runs: a stop, a starved core or a held GIL here explains the silence
    of others.
    """

    def __init__(
        self,
        settings: Settings,
        rendezvous: Rendezvous,
        sentinel: HostSentinel,
        broken: Callable[[FTARError], None],
    ) -> None:
        self._epoch = rendezvous.grant.epoch
        self._settings = settings
        self._rendezvous = rendezvous
        self._sentinel = sentinel
        self._broken = broken
        self._loop = asyncio.get_running_loop()
        self._ring: Ring | None = None
        self._detectors: dict[Peer, PhiAccrual] = {}
        self._before = time.monotonic()
        self._stood_still = 0.0
        self._progress = (0, 0)
        self._moved = self._before
        self._timer = self._loop.call_soon(self._tick)

    def ring_formed(self, ring: Ring) -> None:
        """The ring is formed: both neighbours lived a moment ago."""
        self._ring = ring
        for peer in self._rendezvous.edges:
            self._detector(peer)

    def stop(self) -> None:
        """Say and expect nothing more."""
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
        self._say()
        error = self._lost(now) or self._stuck(now)
        if error is not None:
            self._broken(error)

    def _say(self) -> None:
        """One frame for both neighbours."""
        ring = self._ring
        entered, sent = (ring.entered, ring.sent) if ring is not None else (0, 0)
        stall_ms = round(1000 * self._sentinel.stall_s(time.monotonic()))
        frame = protocol.frame(RingBeat(self._epoch, entered, sent, stall_ms, os.getpid()))
        for peer in self._rendezvous.edges:
            peer.send_heartbeat(frame)

    def _detector(self, peer: Peer) -> PhiAccrual:
        if peer not in self._detectors:
            now = time.monotonic() - self._stood_still
            self._detectors[peer] = PhiAccrual(self._settings.beat_s, self._settings.silence_s, now)
        return self._detectors[peer]

    def _lost(self, now: float) -> PeerDead | None:
        """A neighbour that was heard in this ring, and is not any more. Any bytes are a sign of life."""
        for peer in self._rendezvous.edges:
            if peer not in self._detectors and peer.newest.epoch != self._epoch:
                continue
            detector = self._detector(peer)
            heard_at = peer.heard_at - self._stood_still
            if heard_at > detector.heard_at:
                detector.heard(heard_at)
            if detector.lost(now) and self._believed(peer, detector, now):
                who = peer.member.replica if peer.member is not None else None
                return PeerDead(f"replica {who}: no sign of life for {detector.silence(now):.2f} s", suspect=who)
        return None

    def _believed(self, peer: Peer, detector: PhiAccrual, now: float) -> bool:
        """Whether a silence that is too long for a quiet host is too long for these two hosts."""
        said = peer.newest
        if peer.same_host and said.pid not in (0, os.getpid()) and is_stopped(said.pid):
            return True  # no load explains that
        here_s = self._sentinel.stall_s(time.monotonic())
        return detector.lost(now, max(here_s, said.stall_ms / 1000))

    def _stuck(self, now: float) -> FTARError | None:
        """The left neighbour, if it lives but nothing comes from it, and not because it waits itself."""
        ring, left = self._ring, self._rendezvous.left
        if ring is None or left is None or left.member is None:
            return None
        progress = ring.entered, ring.received
        if not ring.busy or progress != self._progress:
            self._progress, self._moved = progress, now
        waited_s = now - self._moved
        if waited_s < self._settings.timeout_s:
            return None
        who, newest = left.member.replica, left.newest
        if newest.epoch != self._epoch or newest.entered < ring.entered:
            why = f"replica {who} lives, but has not entered an all-reduce for {waited_s:.1f} s"
            return PeerTimeout(why, suspect=who)
        if newest.sent > ring.received:
            why = f"{newest.sent - ring.received} chunks of replica {who} have not come for {waited_s:.1f} s"
            return PeerDead(why, suspect=who)
        return None
