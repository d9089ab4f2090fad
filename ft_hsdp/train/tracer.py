"""What this rank tells of its collectives (`core.traces`), looked at with each of its signs of life.

A rank that gets on tells it now and then, one on which nothing moves each time, with the place in the program
where its main thread is. `TorchGroups` asks torch's flight recorder for the process groups inside the replica;
FTAR's rings tell of themselves, and the runtime says which steps were voted on and committed.

The recorder's functions are private to torch. Where they are missing, or answer otherwise, these groups are left
out.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch

from ft_hsdp.core.traces import COMMIT, MARKED, GroupTrace, Mark, RankTrace
from ft_hsdp.ftar.allreduce import MARKS

STILL_S = 0.9  # without any movement; beats are about a second apart
EVERY_S = 10.0  # between two traces of a rank that gets on; on all hosts at the same times, so that they compare
REPEAT_S = 1.5  # for so long the same one is told: rank 0 passes on only the newest beat of another rank
SHARE = 1e-3  # of a processor's time they may cost
GROUPS = 32  # in a trace
FRAMES, LINE = 12, 160  # of the stack: functions, characters of each
RECORDED = 128  # collectives that torch keeps; its own 2,000 take 50 ms to read

_SIZE = "TORCH_FR_BUFFER_SIZE"
_OLD_SIZE = "TORCH_NCCL_TRACE_BUFFER_SIZE"
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # of gloo, of NCCL
_log = logging.getLogger(__name__)


def limit_flight_recorder() -> None:
    """Have torch keep `RECORDED` collectives, unless the user says how many; before the first process group."""
    if _OLD_SIZE not in os.environ:
        os.environ.setdefault(_SIZE, str(RECORDED))


class TorchGroups:
    """How far the process groups of torch are in this process, from its flight recorder."""

    def __init__(self, replica: int) -> None:
        module = getattr(torch._C, "_distributed_c10d", None)
        self._replica = replica
        self._dumps: list[Callable[[bool, bool], bytes]] = [
            getattr(module, name) for name in _DUMPS if hasattr(module, name)
        ]
        if not self._dumps:
            self._missing("it has no flight recorder")
        self._known: dict[tuple[int, str], tuple[str, str]] = {}  # (dump, group): its name, its newest operation
        self._status: list[Any] = []  # when `_traces` was made
        self._traces: list[GroupTrace] = []

    def _missing(self, why: object) -> None:
        _log.warning("torch %s tells nothing of its process groups: %r", torch.__version__, why)
        self._dumps = []

    def look(self) -> list[Any]:
        """Return something that changes when a collective begins or ends; at little cost."""
        try:
            return [json.loads(dump(False, False))["pg_status"] for dump in self._dumps]
        except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
            self._missing(error)
            return []

    def traces(self, status: list[Any]) -> list[GroupTrace]:
        """Return how far each group is; those that wait first. Costs milliseconds if `status` is a new one."""
        if status != self._status:
            try:
                found = [t for number in range(len(self._dumps)) for t in self._read(number)]
            except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
                self._missing(error)
                found = []
            self._status, self._traces = status, sorted(found, key=lambda t: t.joined == t.done)
        return self._traces

    def _read(self, number: int) -> list[GroupTrace]:
        document = json.loads(self._dumps[number](True, False))
        oldest: dict[str, int] = {}  # by group: the first collective that has not ended
        begun: defaultdict[tuple[str, int], list[float]] = defaultdict(list)  # by group and last number of a mark
        for entry in document.get("entries", ()):
            if entry["is_p2p"] or not entry["process_group"][0]:  # one without a name is FTAR's
                continue
            group, nth = str(entry["pg_id"]), entry["collective_seq_id"]
            backend, _, operation = entry["profiling_name"].partition(":")
            self._known[number, group] = f"{self._replica}:{entry['process_group'][0]} {backend}", operation
            if not entry["retired"]:
                oldest.setdefault(group, nth)
            begun[group, -(-nth // MARKED) * MARKED].append(entry["time_created_ns"] / 1e9)
        marks: defaultdict[str, list[Mark]] = defaultdict(list)
        for (group, last), times in begun.items():
            if len(times) == MARKED:
                marks[group].append(Mark(last, fmean(times)))
        return [
            self._trace(number, group, status, oldest.get(group), marks[group])
            for group, status in document["pg_status"].items()
            if (number, group) in self._known
        ]

    def _trace(
        self, number: int, group: str, status: Mapping[str, str], oldest: int | None, marks: list[Mark]
    ) -> GroupTrace:
        # Not "last_completed_collective": with gloo that is the one of the thread that came to write it down last.
        joined = max(0, int(status["last_enqueued_collective"]))
        done = joined if oldest is None else min(joined, oldest - 1)
        name, operation = self._known[number, group]
        return GroupTrace(name[:64], joined, done, operation[:64], marks=tuple(marks[-MARKS:]))


class Tracer:
    """Makes the traces of one rank. Used on the control loop; `voted` from any thread.

    Args:
        clock: Monotonic seconds.
        unix: Unix seconds.
    """

    def __init__(
        self, replica: int, clock: Callable[[], float] = time.monotonic, unix: Callable[[], float] = time.time
    ) -> None:
        self._clock, self._unix = clock, unix
        self._torch = TorchGroups(replica)
        self._voted = 0, 0  # epoch and step of the newest vote: one of an epoch that is over does not count
        self._committed = 0  # the newest step
        self._seen: object = None  # by the last look
        self._moved = clock()
        self.still_s = 0.0  # by the last look; as in `core.traces.Heard`
        self._due = 0.0  # the next trace of a rank that gets on
        self._spent: dict[str, tuple[float, float]] = {}  # by ring: its seconds at the trace before the newest one
        self._spent_next: dict[str, tuple[float, float]] = {}  # ... and at the newest one
        self._newest: RankTrace | None = None  # of these
        self._made = 0.0  # when that was made

    def voted(self, epoch: int, step: int) -> None:
        """Note that this rank's vote on ``step`` was sent."""
        self._voted = epoch, step

    def committed(self, step: int) -> None:
        """Note that ``step`` is known to be committed."""
        self._committed = max(self._committed, step)

    def _lately(self, ring: GroupTrace) -> GroupTrace:
        """Return a ring with the seconds since the trace before the newest one, instead of all."""
        in_s, blocked_s = self._spent.get(ring.name, (0.0, 0.0))
        # A look may miss what an earlier one had (`WaitClock`); the lighthouse refuses a negative number.
        return replace(ring, in_s=max(0.0, ring.in_s - in_s), blocked_s=max(0.0, ring.blocked_s - blocked_s))

    def trace(
        self, epoch: int, rings: tuple[GroupTrace, ...], progress: int, doing: str, paused: bool
    ) -> RankTrace | None:
        """Return what is to be told now; None: nothing.

        Args:
            epoch: Of the newest membership: its members alone have to vote.
            rings: How far the rank is in FTAR's rings.
            progress: What the main thread has got done.
            doing: What it does, in a few words.
            paused: Whether it does something else on purpose: then it counts as moving.
        """
        now, status = self._clock(), self._torch.look()
        voted = self._voted[1] if self._voted[0] == epoch else 0
        commit = GroupTrace(f"{COMMIT} of epoch {epoch}", max(voted, self._committed), self._committed)
        seen = progress, commit, status, [(r.name, r.joined, r.done, r.received, r.sent) for r in rings]
        if paused or seen != self._seen:
            self._seen, self._moved = seen, now
        still = now - self._moved >= STILL_S
        self.still_s = now - self._moved if still else 0.0
        if not still and now < self._due:
            return self._newest if now - self._made < REPEAT_S else None
        began = time.thread_time()
        if not still:
            self._spent, self._spent_next = self._spent_next, {ring.name: _spent(ring) for ring in rings}
        groups = (commit, *map(self._lately, rings), *self._torch.traces(status))[:GROUPS]
        told = RankTrace(groups, doing, _main_stack() if still else ())
        if not still:
            self._newest, self._made = told, now
            pause_s = EVERY_S * max(1.0, (time.thread_time() - began) / SHARE // EVERY_S)
            self._due = now + pause_s - self._unix() % EVERY_S
        return told


def _spent(ring: GroupTrace) -> tuple[float, float]:
    return ring.in_s, ring.blocked_s


def _main_stack() -> tuple[str, ...]:
    """Return where the main thread is, innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    lines: list[str] = []
    while frame is not None and len(lines) < FRAMES:
        place = "/".join(frame.f_code.co_filename.split("/")[-2:])
        lines.append(f"{place}:{frame.f_lineno} {frame.f_code.co_name}"[-LINE:])
        frame = frame.f_back
    return tuple(lines)
