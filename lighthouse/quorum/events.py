"""What the lighthouse is told (events), and what its caller must do then (effects).

`transition` takes a `LighthouseState` and an `Event`, and returns the next state and its effects. The caller makes
the new state durable before it carries out any effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ft_hsdp.core.grant import Answer, Hosts, Report
from ft_hsdp.core.host_report import HostReport, MachineRanks
from lighthouse.quorum.rules import Incarnation

PLACEMENT = "(placement)"  # the owner of what runs on hosts; no message can have this name


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A replica's request for a step that has no answer yet."""

    report: Report
    id: int  # names the connection that the answer goes to
    ring: tuple[str, ...] = ()  # "host:port" of each rank, for the ring
    state: tuple[str, ...] = ()  # "host:port" of each rank, for fetches of its state
    hosts: Hosts = ()  # of its ranks


Action = Literal["evict", "drain", "undrain", "checkpoint", "scale", "host-lost", "drain-host", "undrain-host"]


@dataclass(frozen=True, slots=True)
class Asked:
    """A replica asks for a step."""

    request: OpenRequest
    now: float


@dataclass(frozen=True, slots=True)
class AskWithdrawn:
    """A replica closed the connection that the answer would have gone to."""

    replica: int
    id: int  # of the request


@dataclass(frozen=True, slots=True)
class ProcessesReported:
    """What is known of the processes of replicas."""

    running: Mapping[int, str | None]  # the incarnation that runs, by replica; None: no process runs
    exited: frozenset[Incarnation]
    lost: frozenset[int]  # the replicas that are given up
    now: float
    owner: str = ""  # `PLACEMENT`; "": a rank reports of itself
    ended: frozenset[int] = frozenset()  # the replicas whose scripts have ended their part of the job
    machines: tuple[MachineRanks, ...] = ()
    host: HostReport | None = None  # from the agent of a host, about nothing else; for `placement`


@dataclass(frozen=True, slots=True)
class HostClosed:
    """The open request of a host's agent was lost, and so was its answer; for `placement`."""

    report: HostReport  # what it said
    now: float


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """An incarnation is to be killed, by an order; for `placement`."""

    who: Incarnation
    reason: str
    now: float


@dataclass(frozen=True, slots=True)
class Commanded:
    """An operator's order that `commands.plan` found possible."""

    action: Action
    replica: int  # 0 for orders that concern no single replica
    reason: str
    now: float
    target: int = 0  # how many replicas a "scale" wants
    host: str = ""  # which one a "host-lost" says is gone, or is drained or undrained


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed, and nothing else."""

    now: float


# What `transition` is told.
Event = Asked | AskWithdrawn | ProcessesReported | HostClosed | Withdrawn | Commanded | Ticked


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer the request ``id`` of ``replica``."""

    replica: int
    id: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class Evict:
    """Have the supervisor kill this incarnation with SIGKILL, which ends stopped processes, too."""

    replica: int
    incarnation: str
    reason: str


@dataclass(frozen=True, slots=True)
class Note:
    """An event for the journal."""

    event: str
    reason: str
    facts: Mapping[str, object] = field(default_factory=dict, hash=False, compare=False)


# What the caller must do, in order.
Effect = Reply | Evict | Note
