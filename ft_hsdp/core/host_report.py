"""What the agent of a host reports, and what it is to run.

These dataclasses travel (`ft_hsdp.protocol`), and some are stored: their field names are part of the wire format.
There are no orders: each report is complete, and so is each answer. So an exit, a restart of either side, a lost
or a doubled message need no repair.
"""

from __future__ import annotations

from dataclasses import dataclass

from ft_hsdp.core.ledger import Run


@dataclass(frozen=True, slots=True)
class EndedRank:
    """A rank that has ended on a host."""

    rank: int
    code: int  # negative: the signal
    killed: bool = False  # by the agent, because it was assigned no more: its end shows no cause
    cause: str = ""  # a `restart.Cause`; "": it has said nothing
    why: str = ""  # one line, for people


@dataclass(frozen=True, slots=True)
class HostRanks:
    """What a host has of an incarnation that is assigned to it, or still runs there."""

    incarnation: str
    living: tuple[int, ...] = ()  # ranks that run, or are being started
    ended: tuple[EndedRank, ...] = ()
    failed: str = ""  # why a rank could not be started, in one line
    done: bool = False  # its script has ended its part of the job (final.json, on the host of rank 0)
    # On the host of rank 0, once its ranks there have ended:
    fed: Run | None = None  # the units that were in flight
    usable: bool = False  # its gradients have changed the weights
    how: str = ""  # they were started: cold, or from a spare; "": not all of them are
    pids: tuple[int, ...] = ()  # of its ranks on this host, then


@dataclass(frozen=True, slots=True)
class HostReport:
    """All that the agent of a host says of it."""

    path: str  # "zone/rack/host"; the name of the host is unique in the job
    life: str  # of the agent: another one after each start, of hexadecimal digits
    # In which pids mean the same processes. There is one agent of a host in it, and its ranks end with it.
    space: str
    number: int  # of this report: the agent counts them, and an older one that comes late says nothing
    address: str  # "host:port", where rank 0 of an incarnation would listen
    ranks: tuple[HostRanks, ...] = ()
    leaving: bool = False  # its agent was told to end: it gets no ranks, and those that it has leave
    # The digest of the newest assignment that it knows: the answer waits a while for another one. "": it has none.
    seen: str = ""
    replica: int | None = None  # it takes ranks of this replica alone; None: of each
    home: tuple[int, int] | None = None  # the replica, and the place in it, that has it first; None: it is spare
    # Replicas whose ranks it may have; its launcher gives another host for one that is cordoned. (): each.
    only: tuple[int, ...] = ()
    warm: bool = False  # all ranks of a replica wait there, to be assigned

    def serves(self, replica: int) -> bool:
        """Return whether it takes ranks of a replica."""
        return self.replica in (None, replica) and (not self.only or replica in self.only)


@dataclass(frozen=True, slots=True)
class MachineRanks:
    """The ranks of an incarnation on one machine, where no agent sees them end (`control.exit_watch`)."""

    incarnation: str
    machine: str  # its host's name
    machines: int  # on how many machines the incarnation has ranks
    gone: bool  # all its ranks on this machine have ended
    done: bool = False  # so has its part of the job, by its script

    @property
    def who(self) -> tuple[int, str]:
        """The replica and the incarnation; of a name that was checked."""
        return int(self.incarnation.partition("-")[0]), self.incarnation


@dataclass(frozen=True, slots=True)
class AssignedRanks:
    """Ranks of an incarnation that a host is to run. Numbers and addresses alone: the host knows what runs."""

    incarnation: str
    ranks: tuple[int, ...]  # on this host
    hosts: tuple[str, ...]  # the name of each rank's host
    master: str  # "host:port", where rank 0 listens
    leaves: bool = False  # it is to leave the job (SIGTERM): it is not wanted, or goes on elsewhere
    fatal: tuple[Run, ...] = ()  # units that have ended the processes which trained them
    trains: bool = False  # it has contributed to a step: what takes CPU time may begin
