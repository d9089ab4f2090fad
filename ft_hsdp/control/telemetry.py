"""What the lighthouse is told for display: a replica's decisions, its commits, and signs of life.

`Decisions` writes what the core has decided into the journal, in words. `Reporter` sends the journal's rows to the
lighthouse. Rows come from any thread and cost it one JSON document; a task on the control loop sends them. A
lighthouse that is away, slow or refuses them costs rows once their buffer is full, the oldest first, and never a
step.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ft_hsdp.control.lighthouse_client import NotTaken
from ft_hsdp.core import effects, events, state_id
from ft_hsdp.core.commit import AttemptId
from ft_hsdp.core.replica_state import Phase, Replica
from ft_hsdp.errors import LighthouseUnreachable
from ft_hsdp.jsonl import Journal
from ft_hsdp.protocol import RankBeat, Telemetry


class Decisions:
    """Writes the decisions of one replica into its journal.

    `torn` is the newest epoch whose ring failed, that is, was not left for a newer one; the leader sets it.
    """

    def __init__(self, journal: Journal) -> None:
        self.torn = 0
        self._journal = journal
        self._away = False  # whether the replica was left behind, and has not contributed since

    def note(self, before: Replica, event: events.Event, after: Replica, due: tuple[effects.Effect, ...]) -> None:
        wrong = after.minority or after.diverged
        if wrong and wrong != (before.minority or before.diverged):
            step = after.ring_state.step
            facts = {"replicas": list(wrong), "step": step, "slice": state_id.slice_number(step)}
            self._journal.event("StateDiverged", _differing(event, after), majority=bool(after.minority), **facts)
        lost = sorted(r for r, _ in set(before.writers) - set(after.writers))
        if lost and (before.grant != after.grant or isinstance(event, events.RingBroken)):
            self._journal.event("CheckpointFailed", _instead(lost, after), replicas=lost)
        for effect in due:
            match effect:
                case effects.Configure(grant):
                    facts = {"epoch": grant.epoch, "step": after.fence.step, "members": list(grant.ring)}
                    self._journal.event("GrantAdopted", grant.reason, role=after.role, **facts)
                case effects.Commit(record) if self._away and after.me in record.contributors:
                    self._away = False
                    self._journal.event("Rejoined", "contributes again", **_fence(record.fence))
                case effects.DropGradient(reason):
                    self._away = True
                    self._journal.event("LeftBehind", reason, step=before.fence.step)
                case effects.Reduce(fence) if _again(before, fence, self.torn):
                    reason = "the same gradient is reduced again on another ring"
                    if before.record is not None and after.excluded != before.excluded:
                        reason = f"{before.record.fault}: the step is reduced again without them"
                    self._journal.event("StepRetried", reason, **_fence(fence))
                case effects.Commit(record) if not record.updates:
                    why = record.fault if record.skipped else "none of its tokens counts"
                    facts = {"replicas": list(record.poisoned), **_fence(record.fence)}
                    self._journal.event("StepSkipped", f"{why}: no weight changes", **facts)
                case effects.WriteCheckpoint(state):
                    reason = "this replica writes it for all"
                    self._journal.event("CheckpointStarted", reason, step=state.step)
                case effects.Commit(record) if isinstance(event, events.Answered | events.GrantShown):
                    reason = "the lighthouse lets all replicas build on the record that was in doubt"
                    self._journal.event("DoubtResolved", reason, **_fence(record.fence))
                case effects.StopRing(epoch, reason) if epoch > _epoch(before):  # of a grant that it did not adopt
                    self._journal.event("GrantRefused", reason, state=str(before.state))
                case effects.Exit(code, reason):
                    final = code == 0 and after.state.step >= after.steps
                    self._journal.event("Ended", reason, code=code, final=final)


def _again(before: Replica, fence: AttemptId, torn: int) -> bool:
    """Return whether a reduction repeats a step that had begun, or whose ring, of epoch `torn`, had failed."""
    begun = before.phase is not Phase.ASKING or before.void is not None or before.forwarded
    failed = not before.intact and before.fence.epoch == torn
    again = before.grant is not None and before.fence.step == fence.step and before.fence != fence
    return again and (begun or failed)


def _instead(lost: list[int], after: Replica) -> str:
    """Return what follows from the loss of the writers of checkpoints, in words."""
    who = f"replicas {lost} were lost while they wrote a checkpoint"
    if after.writers:
        return f"{who}: replicas {[r for r, _ in after.writers]} write a newer one"
    if after.requested_checkpoint > after.saved:
        return f"{who}: the state of the next step is written instead"
    return f"{who}, and so often before: the next one that is due counts"


def _differing(event: events.Event, after: Replica) -> str:
    token = event.token if isinstance(event, events.TokenArrived) else None
    return state_id.describe(token.digests, after.ring_state) if token is not None else ""


def _epoch(replica: Replica) -> int:
    return replica.grant.epoch if replica.grant is not None else 0


def _fence(fence: AttemptId) -> dict[str, int]:
    return {"epoch": fence.epoch, "step": fence.step, "attempt": fence.attempt}


PERIOD_S = 1.0  # between two messages when there are no events
GATHER_S = 0.05  # events of one moment go together
TELL_S = 2.0  # longest wait for one answer
BACKOFF_S = 0.25  # after a first failure; doubles with each
BACKOFF_MAX_S = 2.0
CLOSE_S = 1.0  # how long the last rows may take
HEARD_S = 1.5  # the sign of life of another rank is not passed on for longer than that
PLACE = 2 << 20  # bytes of rows that wait, events and commits each
MAX_ROW = 32 << 10  # bytes of one row
MAX_BYTES = 96 << 10  # of rows in one message; a lighthouse accepts more
MAX_ROWS = 256
MAX_TRACES = 80 << 10  # bytes of traces in one message, about

Beat = Callable[[], RankBeat]
Tell = Callable[[Telemetry], Awaitable[None]]
"""Delivers a message. Raises LighthouseUnreachable; NotTaken if it must not be sent again as it is."""

_log = logging.getLogger(__name__)


class Rows:
    """A buffer of rows as JSON, bounded in bytes: the oldest make room. Thread-safe."""

    def __init__(self, place: int = PLACE) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._rows: deque[str] = deque()
        self._bytes = 0
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, row: Mapping[str, object]) -> None:
        """Add a row as it is now. A row above `MAX_ROW` bytes is dropped."""
        text = json.dumps(row, separators=(",", ":"), default=str)
        with self._lock:
            if len(text) > MAX_ROW:
                self.dropped += 1
                return
            self._rows.append(text)
            self._bytes += len(text)
            self._make_room()

    def take(self, rows: int, nbytes: int) -> list[str]:
        """Remove and return the oldest rows.

        Args:
            nbytes: with at most so many bytes in all.

        Returns:
            JSON documents, oldest first.
        """
        taken: list[str] = []
        with self._lock:
            while self._rows and len(taken) < rows and len(self._rows[0]) <= nbytes:
                taken.append(self._rows.popleft())
                nbytes -= len(taken[-1])
                self._bytes -= len(taken[-1])
        return taken

    def give_back(self, rows: Iterable[str]) -> None:
        """Put rows that were not delivered back in front."""
        with self._lock:
            for text in reversed(list(rows)):
                self._rows.appendleft(text)
                self._bytes += len(text)
            self._make_room()

    def _make_room(self) -> None:
        while self._bytes > self._place:
            self._bytes -= len(self._rows.popleft())
            self.dropped += 1


class Reporter:
    """Sends the rows of one process to the lighthouse.

    `tell` runs on the loop on which `start` was called. `event` and `commit` may be called from any thread, and
    do not block.

    Args:
        source: the incarnation, or "supervisor".
        beat: returns this rank's sign of life; None: it gives none.
        unix: the time of day, by which the lighthouse knows whether this host's clock is right.
    """

    def __init__(
        self, source: str, tell: Tell, beat: Beat | None = None, unix: Callable[[], float] = time.time
    ) -> None:
        self._source = source
        self._tell = tell
        self._beat = beat
        self._unix = unix
        self._events = Rows()
        self._commits = Rows()
        self._logged = Rows()
        self._rows = self._events, self._commits, self._logged
        self._refused = 0
        self._most = MAX_ROWS
        # By rank of this replica: when it spoke, its sign of life, how many rows it dropped.
        self._others: dict[int, tuple[float, RankBeat, int]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._called = False
        self._messages = 0  # that were made
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def dropped(self) -> int:
        """Rows that were given up since the start, those of other ranks included."""
        others = sum(dropped for _, _, dropped in self._others.values())
        here = sum(rows.dropped for rows in self._rows)
        return here + self._refused + others

    def event(self, row: Mapping[str, object]) -> None:
        """Add an event; it is sent after `GATHER_S` seconds, together with others of that time."""
        self._events.put(row)
        if self._loop is not None and not self._called:
            self._called = True
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._wake.set)

    def commit(self, row: Mapping[str, object]) -> None:
        """Add a committed step; it is sent with the next sign of life."""
        self._commits.put(row)

    def log(self, row: Mapping[str, object]) -> None:
        """Add values that the training loop logs; they are sent with the next sign of life."""
        self._logged.put(row)

    def relay(self, telemetry: Telemetry) -> None:
        """Add the rows and the sign of life of another rank of this replica. On the loop."""
        for row in telemetry.events:
            self.event(row)
        now = asyncio.get_running_loop().time()
        for beat in telemetry.ranks:
            self._others[beat.rank] = (now, beat, telemetry.dropped)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run(), name="reporter")

    async def close(self) -> None:
        """Send what waits, for at most `CLOSE_S` seconds, and stop."""
        self._closing.set()
        self._wake.set()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=CLOSE_S)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        backoff = BACKOFF_S
        while not self._closing.is_set() or any(self._rows):
            if not await self._send():
                await _wait(self._closing, backoff)
                await asyncio.sleep(GATHER_S)
                backoff = min(2 * backoff, BACKOFF_MAX_S)
                continue
            backoff = BACKOFF_S
            if not (any(self._rows) or self._closing.is_set()):
                await _wait(self._wake, PERIOD_S)
                await _wait(self._closing, GATHER_S)

    async def _send(self) -> bool:
        """Send one message, and return whether to go on at once.

        Rows that were not delivered wait for the next one.
        """
        self._called = False  # before rows are taken: a later one wakes this task again
        self._wake.clear()
        rows, room, size = [], self._most, MAX_BYTES
        for waiting in self._rows:
            rows.append(waiting.take(room, size))
            room, size = room - len(rows[-1]), size - sum(map(len, rows[-1]))
        count = self._most - room
        if self._beat is None and not count:
            return True
        try:
            async with asyncio.timeout(TELL_S):
                await self._tell(self._message(*rows))
        except NotTaken as error:
            if count == 1:
                self._refused += 1
                _log.warning("the lighthouse refuses a row: %s", error)
                return False
            self._most = max(1, count // 2)
            self._return(rows)
            return bool(count)
        except Exception as error:  # no error of telemetry may end the rank
            if not isinstance(error, LighthouseUnreachable | TimeoutError):
                _log.warning("telemetry is not sent: %s: %s", type(error).__name__, error)
            self._return(rows)
            return False
        self._most = min(2 * self._most, MAX_ROWS)
        return True

    def _return(self, rows: list[list[str]]) -> None:
        for waiting, taken in zip(self._rows, rows, strict=True):
            waiting.give_back(taken)

    def _message(self, events: list[str], commits: list[str], logged: list[str]) -> Telemetry:
        now = asyncio.get_running_loop().time()
        own = () if self._beat is None else (replace(self._beat(), t=self._unix()),)
        known = [(now - heard, beat) for heard, beat, _ in self._others.values() if now - heard < HEARD_S]
        others = [replace(beat, t=beat.t and beat.t + age) for age, beat in known]
        self._messages += 1
        ranks = _fitting((*own, *others), self._messages)
        return Telemetry(self._source, _rows(events), _rows(commits), ranks, self.dropped, _rows(logged))


def _fitting(beats: Sequence[RankBeat], first: int) -> tuple[RankBeat, ...]:
    """Return the beats with as many traces as have room in a message, beginning with that of the `first` one."""
    room, found = MAX_TRACES, list(beats)
    for number in range(len(beats)):
        place = (first + number) % len(beats)
        room -= 0 if found[place].trace is None else len(repr(found[place].trace))
        if room < 0:
            found[place] = replace(found[place], trace=None)
    return tuple(found)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def _rows(texts: list[str]) -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(text) for text in texts)
