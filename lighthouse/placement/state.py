"""What the lighthouse knows of hosts, and of the replicas that it places on them.

`Placement` is durable, `Presence` is not: hosts repeat what is in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from ft_hsdp.core.host_report import EndedRank, HostRanks, HostReport
from ft_hsdp.core.ledger import Run
from ft_hsdp.core.restart import FatalUnits, NarrowEnds, RestartPolicy, RestartState
from ft_hsdp.memory.hosts import Host, Level

FORMER = 8  # lives of a host's agent that are remembered: a report of one of them comes from a second agent


@dataclass(frozen=True, slots=True)
class PlacementPolicy:
    """What the operator chose, from the configuration of the job."""

    hosts: int  # of each replica
    ranks: int  # of each replica; `hosts` divides it
    restart: RestartPolicy
    apart: Level = "host"  # what two copies of a shard do not share
    place_s: float = 60.0  # how long a replica waits for hosts before the others go on without it
    together_s: float = 10.0  # how long the other ranks may go on after one has ended with 0
    start_s: float = 600.0  # how long an incarnation may take until it asks for a step
    lease_s: float = 600.0  # how long a grant holds without a lighthouse
    shrink_to: int | None = None  # fewest ranks with which a replica goes on; None: it waits for hosts

    @property
    def each(self) -> int:
        """Ranks of a replica on one host."""
        return self.ranks // self.hosts

    def ranks_at(self, position: int) -> list[int]:
        """Return the ranks on the host in a position."""
        return list(range(position * self.each, (position + 1) * self.each))


NEW, NEVER_NARROW, NO_FATAL_UNITS = RestartState(), NarrowEnds(), FatalUnits()


NO_HOST = Host("", "", "")


class ReplicaPhase(StrEnum):
    """Whether a replica has processes."""

    RESTS = "rests"  # it has none
    RUNS = "runs"  # its newest incarnation is assigned to its hosts
    ENDS = "ends"  # that is assigned no more, and its last processes are not known to be gone


@dataclass(frozen=True, slots=True)
class PlacedReplica:
    """One replica: where it is, how its newest incarnation fares, and what it may still do."""

    # Paths of its hosts, by position, "" where it has none; (): it never had any, or gave them back. No other
    # replica has a place on one of them.
    places: tuple[str, ...] = ()
    phase: ReplicaPhase = ReplicaPhase.RESTS
    incarnation: str = ""  # its newest one
    used: tuple[str, ...] = ()  # names of the hosts on which that is: fewer than `places` if it has fewer ranks
    lives: tuple[tuple[str, str], ...] = ()  # of the agents there, which start it, each with its space
    run: str = ""  # of its incarnations: another one if one was replaced and is not known to have exited
    first: int = 0  # restarts before that run
    start: int = 0  # the number of its start, over all replicas
    master: str = ""  # "host:port" of its rank 0
    base: int = 0  # step of the head when it was started; then the newest step less those it has contributed to
    contributed: bool = False  # it held the base, as a contributor or on standby, when a step was committed
    until: int = 0  # the last step to which it has contributed, if others have committed since; 0: they have not
    done: bool = False  # its script has ended its part of the job
    ended: tuple[tuple[str, EndedRank], ...] = ()  # ranks that ended by themselves, with the names of their hosts
    buried: tuple[str, ...] = ()  # its hosts of which an operator says that they are gone
    failed: str = ""  # why a rank could not be started
    prevented: str = ""  # what prevents a start: a `restart.Cause`
    why: str = ""  # it has to end, or is to start now
    reason: str = ""  # it was started
    how: str = ""  # its ranks were started; "": not all of them are
    restart: RestartState = NEW
    narrow: NarrowEnds = NEVER_NARROW
    failed_on: tuple[tuple[str, int], ...] = ()  # failures on each host since the replica was healthy
    fatal: tuple[int, int] = (0, 0)  # step that ended it last, and how often
    fed: Run | None = None  # units in flight at its end
    usable: bool = False  # its gradients have changed the weights
    blamed: int = 0  # of the units that are blamed for ends of processes, its ranks know so many
    given_up: str = ""  # why it is never started again; "": it may be
    # In seconds of the lighthouse's clock, which is another one after a restart.
    due: float = 0.0  # not started before; of one that runs: when it was started
    since: float | None = None  # it waits for hosts, or for the ranks of an incarnation to end together

    @property
    def hosts(self) -> tuple[Host, ...]:
        return tuple(Host.parse(path) if path else NO_HOST for path in self.places)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(host.name for host in self.hosts)


@dataclass(frozen=True, slots=True)
class Placement:
    """All replicas that were ever placed, and what is known of hosts for good."""

    replicas: tuple[PlacedReplica, ...] = ()  # by id
    starts: int = 0  # incarnations that were started
    shadows: tuple[tuple[int, PlacedReplica], ...] = ()  # incarnations that were replaced before they have exited
    cordoned: tuple[tuple[str, str], ...] = ()  # hosts that get no ranks any more, and why
    lives: tuple[tuple[str, tuple[str, ...]], ...] = ()  # by name of the host: of its agents, the newest last
    trained: bool = False  # an incarnation has contributed
    fatal: FatalUnits = NO_FATAL_UNITS
    wrong: bool = False  # the configuration or the script is to blame for the end of the job


RETURN_S = 0.25  # in which a living agent reports again, when its report is lost in the first moments of a term


@dataclass(frozen=True, slots=True)
class PresentHost:
    """A host whose agent was heard in this term."""

    report: HostReport
    heard: float
    closed: float | None = None  # when its open request was lost, if none has come since

    @property
    def host(self) -> Host:
        return Host.parse(self.report.path)

    def ranks(self, incarnation: str) -> HostRanks | None:
        """What it has of an incarnation; None: nothing, or it does not know of it yet."""
        return next((each for each in self.report.ranks if each.incarnation == incarnation), None)

    def silent(self, now: float, since: float, evict_s: float) -> bool:
        """Return whether its agent is gone, or cut off.

        Args:
            now: Seconds of the lighthouse's clock.
            since: When this term heard the first host. Until `evict_s` after that all agents come back at once,
                and the lighthouse is busy: one whose report is lost has `RETURN_S` to send another one.
            evict_s: After how long without a report a host is silent.
        """
        back_s = RETURN_S if self.heard < since + evict_s else 0.0
        return (self.closed is not None and now >= self.closed + back_s) or now >= self.heard + evict_s


@dataclass(frozen=True, slots=True)
class Presence:
    """What was heard in this term."""

    since: float | None = None  # when the first host was heard, or a replica was first looked after
    alone: float | None = None  # when a host was heard before which this lighthouse was cut off
    hosts: Mapping[str, PresentHost] = field(default_factory=dict, hash=False)  # by name
    # By replica: its incarnation, when that asked last, and how long before that it had asked.
    asked: Mapping[int, tuple[str, float, float]] = field(default_factory=dict, hash=False)

    def host(self, name: str) -> PresentHost | None:
        return self.hosts.get(name)


def tried_again(me: PlacedReplica) -> PlacedReplica:
    """Return a record without failures."""
    return replace(me, restart=RestartState(me.restart.restarts + 1), failed_on=(), fatal=(0, 0), given_up="")


def at_rest(me: PlacedReplica, hosts: int) -> PlacedReplica:
    """Return a record that rests; without its hosts if a replica has another number of ``hosts`` now."""
    me = replace(me, phase=ReplicaPhase.RESTS)
    return replace(me, places=(), used=(), lives=()) if len(me.places) not in (0, hosts) else me


def remembered(placement: Placement, policy: PlacementPolicy | None, halted: bool = False) -> Placement:
    """Return a placement as it counts after a restart of the lighthouse, whose clock is another one.

    Args:
        placement: Of the former life.
        policy: Of this life.
        halted: The job was halted, and is tried once more: no failure counts any more.
    """

    def anew(me: PlacedReplica) -> PlacedReplica:
        me = replace(me, due=0.0, since=None, restart=replace(me.restart, prevented=0, prevented_at=0.0))
        me = at_rest(me, policy.hosts) if policy is not None and me.phase is ReplicaPhase.RESTS else me
        return tried_again(me) if halted else me

    shadows = tuple((replica, anew(me)) for replica, me in placement.shadows)
    replicas = tuple(map(anew, placement.replicas))
    return replace(placement, replicas=replicas, shadows=shadows, wrong=placement.wrong and not halted)


NOTHING_PLACED, NOBODY_HEARD = Placement(), Presence()
