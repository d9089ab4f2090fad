"""Lanes: which state each replica was in when, from events and commits that may come a second late. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ft_hsdp.core.grant import ranks_of
from ft_hsdp.event_table import EVENTS, is_over

MAX_SEGMENTS = 4096  # of one lane; the oldest are dropped, their events stay in the database
STATES = (  # of a replica, the worst one last
    *("training", "standby", "retrying", "warming", "final", "booting"),
    *("fetching", "behind", "stalled", "drained", "down", "dead"),
)
# States of a replica that has a place in a ring.
RUN = frozenset({"training", "standby", "retrying", "behind", "fetching", "stalled"})

Segment = tuple[float, float | None, str]
"""From, to (None: still) in Unix seconds, and the state."""

RUNGS = frozenset({"agent", "copy", "replica", "checkpoint", "initial"})
MAX_WIDTHS = 256  # changes of the number of ranks that a lane keeps
MAX_HOSTS = 64  # that a recovery or a plan of copies names
_ENDS = {"ProcessExited": "down", "ReplicaExited": "down", "ExitReported": "down"}
_RANKS = frozenset({"FetchCompleted"})  # counts once each rank of the replica has sent it


class Lane:
    """The states of one replica. Times are in Unix seconds, by the clocks of the hosts that wrote the rows."""

    def __init__(self, replica: int, ranks: int) -> None:
        self.replica = replica
        self.state = "down"
        self.since: float | None = None  # None: nothing is known of it
        self.reason = "no process has reported it yet"
        self.step = 0
        self.incarnation: str | None = None
        self.incarnations = 0
        self.drained = False
        self.beyond = False  # the job was scaled down and does not want this replica
        self.straggler = False
        self.standby = False  # by its newest grant it stands by
        self.hosts: list[dict[str, Any]] = []  # where its ranks run, by its newest grant that said it
        self.restored: dict[str, Any] | None = None  # its newest recovery
        self.copies: list[dict[str, str]] = []  # which hosts keep copies of which of its shards
        self.copy_hosts = 0  # how many hosts these are, with those that are not named
        self.segments: list[Segment] = []
        self.width = ranks  # ranks that it has, or goes on with
        self.widths: list[tuple[float, int]] = []  # when it went on with another number of ranks
        self._done: set[int] = set()  # ranks that have fetched
        self._gone: list[str] = []  # incarnations that are over
        self._placed = False  # `ReplicaStarted` names its incarnations; it never comes under torchrun
        self._proof = 0.0  # when it contributed last

    def event(self, name: str, row: Mapping[str, Any]) -> None:
        t, incarnation = row["t"], row.get("incarnation")
        reason = row.get("reason") or ""
        if name in ("Shrunk", "Grown"):
            self._widths(t, row.get("to"))
        if name == "StateRestored" and incarnation not in self._gone:
            self.restored = _recovery(row)
        if name == "CopiesPlanned" and incarnation not in self._gone:
            self._copies(row.get("keeps"), row.get("hosts"))
        if name == "ReplicaStarted" or (name == "ReplicaBooted" and not self._placed):
            self._placed = name == "ReplicaStarted"
            self._started(t, incarnation, reason)
        elif name == "OperatorOrdered" and row.get("order") in ("drain", "undrain"):
            self.ordered(self.beyond, row["order"] == "drain", t, reason)
        elif incarnation in self._gone and name not in _ENDS:
            return
        elif name in _ENDS:
            self._ended(name, t, row, reason)
        elif name in EVENTS and EVENTS[name].lane and t > self._proof and self.state not in ("dead", "final"):
            self._claims(name, t, row, reason)
        elif name == "GrantAdopted" and t > self._proof:
            self._adopted(t, row.get("role"), reason)
        elif name == "ReplicaLost":
            self._enter("dead", t, reason)
        elif name == "Ended" and row.get("final"):
            self._enter("final", t, reason)
        elif name == "FailureInjected" and row.get("kind") == "SIGSTOP" and self.state in RUN:
            self._enter("stalled", t, f"{reason}: SIGSTOP")
        elif name == "StragglerSeen":
            self.straggler = not is_over(row)

    def ordered(self, beyond: bool, drained: bool, t: float, reason: str) -> None:
        """Take whether operators do not want this replica: the job was scaled down, or it is ``drained``."""
        if (beyond, drained) != (self.beyond, self.drained):
            self.beyond, self.drained = beyond, drained
            if self.since is not None or drained:
                self._rest(t, reason)

    def contributed(self, t: float, step: int) -> None:
        if t > self._proof:
            self._proof = t
        self.step = step
        if self.state != "training" and self.state != "final" and t >= (self.since or 0.0):
            self._enter("training", t, "it contributes")

    def cut(self, start: float, end: float, width: float) -> list[Segment]:
        """Return the segments between two times.

        Segments shorter than ``width`` seconds are joined: a longer neighbour absorbs them, a run of short ones
        shows its worst state.
        """
        if self.since is None:
            return []
        found = [s for s in self.segments if (s[1] or end) > start and s[0] < end]
        return _joined([*found, (self.since, None, self.state)] if self.since <= end else found, width)

    def _started(self, t: float, incarnation: str | None, reason: str) -> None:
        if incarnation in self._gone or incarnation == self.incarnation:
            return
        if self.incarnation is not None:
            self._gone = [*self._gone[-7:], self.incarnation]
        self.incarnation = incarnation
        self.incarnations += 1
        self.straggler = False
        self.standby = False
        self._done = set()
        self._proof = 0.0
        self._copies({}, 0)
        self._enter("booting", t, reason)

    def _ended(self, name: str, t: float, row: Mapping[str, Any], reason: str) -> None:
        incarnation = row.get("incarnation")
        if self.incarnation not in (incarnation, None) or self.state in ("dead", "final"):
            return
        if row.get("kind") in ("done", "exit 0"):
            if name == "ReplicaExited":
                self._enter("final", t, reason)
            return
        if incarnation is not None and incarnation not in self._gone:
            self._gone = [*self._gone[-7:], incarnation]
        self.straggler = False
        self._copies({}, 0)
        self._enter(self._absent, t, reason)

    @property
    def _absent(self) -> str:
        return "drained" if self.drained or self.beyond else "down"

    def _copies(self, keeps: object, hosts: object) -> None:
        told = list(keeps.items())[:MAX_HOSTS] if isinstance(keeps, Mapping) else []
        self.copies = [{"host": str(host), "shards": str(ranks)} for host, ranks in told]
        self.copy_hosts = max(len(told), hosts) if isinstance(hosts, int) else len(told)

    def _widths(self, t: float, ranks: object) -> None:
        """Take another number of ranks; rows may come late."""
        if isinstance(ranks, int) and ranks > 0:
            self.widths = sorted({*self.widths, (t, ranks)})[-MAX_WIDTHS:]
            self.width = self.widths[-1][1]

    def _rest(self, t: float, reason: str) -> None:
        if self.state in ("down", "drained"):
            self._enter(self._absent, t, reason)

    def _claims(self, name: str, t: float, row: Mapping[str, Any], reason: str) -> None:
        state, rank = EVENTS[name].lane, row.get("rank") or 0
        if state == "fetching":
            self._done.discard(rank)  # only this one: rows of another rank that is done may have come before
        if name in _RANKS:
            self._done.add(rank)
            if len(self._done) < self.width:
                return
            self._done = set()
        if is_over(row):
            if self.state != state:
                return
            state = "training"
        if state == "stalled" and self.state not in RUN:
            return
        if state == "retrying" and self.state in ("standby", "behind", "fetching"):
            return  # it only relays in the ring, and goes on with its fetch
        self._enter("standby" if state == "training" and self.standby else state, t, reason)

    def _adopted(self, t: float, role: object, reason: str) -> None:
        self.standby = role == "standby"
        if self.standby:
            self._enter("standby", t, reason)
        elif role == "behind":
            if self.state != "fetching":
                self._enter("behind", t, reason)
        elif self.state in ("booting", "warming", "standby"):
            self._enter("training", t, reason)

    def _enter(self, state: str, t: float, reason: str) -> None:
        """Put the replica into ``state`` from ``t`` on; a late row counts from the newest change."""
        self.reason = reason
        if self.since is None:
            self.state, self.since = state, t
            return
        if state == self.state:
            return
        if t > self.since:
            self.segments.append((self.since, t, self.state))
            self.since = t
        self.state = state
        if self.segments and self.segments[-1][1] == self.since and self.segments[-1][2] == state:
            self.since = self.segments.pop()[0]
        if len(self.segments) > MAX_SEGMENTS:
            del self.segments[: MAX_SEGMENTS // 4]


class Lanes:
    """The lanes of all replicas that a job can have; ``target`` of them are wanted."""

    def __init__(self, slots: int, ranks: int, target: int) -> None:
        self.all = [Lane(replica, ranks) for replica in range(slots)]
        self.target = slots
        self.scale(target, 0.0, "")
        self._others = set(range(slots))  # replicas that were not training after their newest row
        self._contributors: Collection[int] = ()
        self.step = 0
        self._t = 0.0

    def event(self, name: str, row: Mapping[str, Any]) -> None:
        replica = row.get("replica")
        if name == "EpochGranted":
            self._hosts(row.get("hosts"))
        if replica is None:
            return  # it is about the whole job
        lane = self.all[replica]
        if replica not in self._others:
            self._settle(lane)
        lane.event(name, row)
        self._others.add(replica)

    def _hosts(self, told: object) -> None:
        """Take the hosts of the replicas whose hosts are new or have changed."""
        for replica, hosts in told.items() if isinstance(told, Mapping) else ():
            lane = self.all[int(replica)]
            lane.hosts = [{"host": str(path), "ranks": len(ranks)} for path, ranks in ranks_of(hosts)]

    def commit(self, t: float, step: int, contributors: Collection[int]) -> None:
        """Take a canonical commit; its cost does not depend on the number of replicas that go on training."""
        if contributors != self._contributors:
            for replica in set(self._contributors) - self._others:
                self._settle(self.all[replica])
            self._contributors = contributors
            self._others |= set(contributors)
        self._t, self.step = t, step
        if self._others:
            for replica in self._others & set(contributors):
                lane = self.all[replica]
                lane.contributed(t, step)
                if lane.state == "training":
                    self._others.discard(replica)

    def scale(self, target: int, t: float, reason: str, drained: Collection[int] | None = None) -> None:
        """Take how many replicas are wanted, and which are ``drained``; None: as before."""
        self.target = target
        for lane in self.all:
            away = lane.drained if drained is None else lane.replica in drained
            lane.ordered(lane.replica >= target, away, t, reason)

    def shown(self) -> list[Lane]:
        return [lane for lane in self.settle() if lane.since is not None or not lane.beyond]

    def settle(self) -> list[Lane]:
        for replica in set(self._contributors) - self._others:
            self._settle(self.all[replica])
        return self.all

    def _settle(self, lane: Lane) -> None:
        if lane.replica in self._contributors:
            lane.contributed(self._t, self.step)


def _recovery(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the newest recovery as the page shows it; None: the row does not say from where the state came."""
    if row.get("rung") not in RUNGS:
        return None
    hosts = row.get("from")
    named = sorted({str(each) for each in hosts.values()}) if isinstance(hosts, Mapping) else []
    numbers = {name: row.get(name) for name in ("step", "bytes", "seconds", "lost_steps")}
    known = {name: value if isinstance(value, int | float) else None for name, value in numbers.items()}
    return {"t": row["t"], "rung": row["rung"], "hosts": named[:MAX_HOSTS], **known}


def _joined(segments: list[Segment], width: float) -> list[Segment]:
    """Return segments of which at most one in a row is shorter than ``width``.

    A run of short segments becomes one in its worst state; a short "retrying" disappears in the segment before
    it.
    """
    out: list[Segment] = []
    short = False  # whether the last one of `out` stands for a run of short ones
    for t0, t1, state in segments:
        brief = t1 is not None and t1 - t0 < width
        if out and (out[-1][2] == state or (brief and state == "retrying")):
            out[-1] = (out[-1][0], t1, out[-1][2])
            continue
        if brief and short:
            worst = max(out[-1][2], state, key=STATES.index)
            out[-1] = (out[-1][0], t1, worst)
            short = t1 is not None and t1 - out[-1][0] < width
            continue
        out.append((t0, t1, state))
        short = brief
    return out
