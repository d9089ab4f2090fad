"""The exact shapes of what the routes answer. Times are Unix seconds, durations seconds.

The field names are keys of the HTTP interface.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from ft_hsdp.memory.hosts import PATHS


class Error(BaseModel):
    """What every route answers with a status of 400 or more."""

    detail: str = Field(description="what is wrong, in one line")
    leader: str | None = Field(None, description="who leads, from a lighthouse that does not")


class HostStatus(BaseModel):
    """A host of a replica, and which of its ranks run there."""

    host: str = Field(description=f"{PATHS}, as far as that is known")
    ranks: list[int]


class ReplicaStatus(BaseModel):
    """The present state of a replica, in a word and with a reason."""

    replica: int
    incarnation: str | None
    state: str
    step: int
    reason: str
    pause: str = ""  # what its training loop does instead of training
    hosts: list[HostStatus] = []  # in rank order; empty: it has not said


class ProtectionView(BaseModel):
    """Whether a lost host can take a shard of the newest state with it."""

    word: str = Field(description="protected, unprotected, or nothing: no replica that is left has said it")
    why: str
    copies: int | None = Field(description="hosts that each shard is on, at least; null: not known")
    apart: str = Field(description="host, rack or zone: what those copies do not share")


class JobStatus(BaseModel):
    """The job, its members, and each replica's state."""

    job: str
    term: int
    epoch: int
    step: int
    finished: bool
    target: int = Field(description="how many replicas are wanted: those with lower ids")
    members: list[int]
    units: int = Field(description="that the members train in each step of the epoch")
    units_wanted: int = Field(description="of a step to which all replicas contribute")
    replicas: list[ReplicaStatus]
    protection: ProtectionView | None = None  # null: this lighthouse has no journal


class JobView(BaseModel):
    """What the job is, and whether it still runs."""

    name: str
    started: float | None
    ended: float | None
    total: int  # replicas that are wanted now
    slots: int  # replicas at most
    ranks: int  # of one replica
    steps: int
    finished: bool
    halted: str
    protection: ProtectionView
    live: bool


class RunView(BaseModel):
    """What is trained, and the keys of the configuration that say how, by dotted name."""

    model: str | None  # its class; None: no replica was warm yet
    parameters: int | None
    config: dict[str, str | int | float | bool | None]


class LighthouseView(BaseModel):
    """Which term leads since when, and when no lighthouse led."""

    term: int
    epoch: int
    since: float | None
    outages: list[tuple[float, float]]


class Head(BaseModel):
    """The newest commit, and how fast commits come."""

    step: int
    epoch: int
    loss: float | None
    lr: float | None
    lr_scale: float | None
    step_s: float | None
    steps_per_s: float
    tokens_per_s: float
    contributors: list[int]
    healthy: int
    units: int | None  # in it; None: the row is of an earlier version
    units_wanted: int | None  # those of a step to which all replicas contribute


class Effective(BaseModel):
    """How much of the time trained the model; see `overview.goodput`. ``lost_s`` adds up to wall_s - useful_s."""

    wall_clock: float
    renewal: float | None
    with_replay: float
    wall_s: float
    useful_s: float
    lost_s: dict[str, float]


class RankView(BaseModel):
    """The newest sign of life of a rank."""

    rank: int
    pid: int
    host: str
    progress: int
    age_s: float


State = Literal[
    "down",
    "booting",
    "warming",
    "fetching",
    "training",
    "behind",
    "standby",
    "stalled",
    "retrying",
    "drained",
    "dead",
    "final",
]


class HostView(BaseModel):
    """A host of a replica."""

    host: str = Field(description=f"{PATHS}, as far as that is known")
    ranks: int


class RecoveryView(BaseModel):
    """From where a replica took its state when it started; null: not known."""

    t: float
    rung: str = Field(description="agent, copy, replica, checkpoint or initial")
    hosts: list[str]  # that gave shards
    step: float | None
    bytes: float | None
    seconds: float | None
    lost_steps: float | None


class CopyView(BaseModel):
    """A host that keeps copies of a replica's shards."""

    host: str
    shards: str = Field(description="ranks whose shards these are, such as 0-3, 6")


class ReplicaView(BaseModel):
    """The present state of a replica."""

    replica: int
    state: State
    since: float | None
    step: int
    incarnation: str | None
    incarnations: int
    reason: str
    step_s: float | None
    busy_s: float | None
    straggler: bool
    drained: bool
    pause: str
    hosts: list[HostView]  # in rank order; empty: it has not said
    width: int = Field(description="ranks that it has, or goes on with while a host is missing")
    restored: RecoveryView | None
    copies: list[CopyView] = Field(description="which hosts keep copies of its shards; empty: none is to")
    copy_hosts: int = Field(description="how many hosts these are; `copies` names 64 at most")
    ranks: list[RankView]


class LaneView(BaseModel):
    """What a replica did when: from, to (null: still), state."""

    replica: int
    segments: list[tuple[float, float | None, State]]
    widths: list[tuple[float, int]] = Field(description="when it went on with how many ranks; empty: always all")


class EpochView(BaseModel):
    """A membership that was granted."""

    t: float
    epoch: int
    members: list[int]
    reason: str
    seq: int


class PhaseView(BaseModel):
    """A part of a recovery that is over."""

    name: Literal["detect", "quorum", "reconnect", "boot", "warm", "check_in", "fetch", "load", "first_step"]
    t0: float
    t1: float


class FailureView(BaseModel):
    """An incarnation that failed, its cost to the others, its return; ``said``: what became of it."""

    seq: int
    replica: int
    rank: int | None
    kind: str
    said: str
    t: float
    cause: str
    phases: list[PhaseView]
    stall_s: float
    rejoin_s: float | None
    done: bool


class SeriesView(BaseModel):
    """The curves: each list has as many values."""

    t: list[float]
    step: list[int]
    loss: list[float | None]
    step_s: list[float]
    gbps: list[float]
    healthy: list[int]
    lr_scale: list[float]
    units: list[int | None]
    effective: list[float | None]


class LoggedView(BaseModel):
    """The curve of a value that the training loop logs: each list has as many values."""

    t: list[float]
    step: list[int]
    value: list[float]


class OverviewView(BaseModel):
    """All that the page shows, except the log. Times are Unix seconds."""

    now: float
    seq: int
    job: JobView
    run: RunView
    lighthouse: LighthouseView
    head: Head
    effective: Effective
    replicas: list[ReplicaView]
    lanes: list[LaneView]
    epochs: list[EpochView]
    failures: list[FailureView]
    series: SeriesView
    logged: dict[str, LoggedView]


class Event(BaseModel):
    """A row of the log; ``said`` is one plain sentence about it, ``grave`` whether it is a failure."""

    seq: int
    t: float
    event: str
    source: str | None
    replica: int | None
    rank: int | None
    incarnation: str | None
    reason: str | None
    said: str
    grave: bool
    facts: dict[str, Any]


class Events(BaseModel):
    """A page of the log, in order, and the numbers of its first and last row (0 if it is empty)."""

    events: list[Event]
    first: int
    last: int
