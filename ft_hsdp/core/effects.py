"""Effects: what the core tells a replica's leader to do. Imperative; most are orders to all ranks of the replica.

`ft_hsdp.control.leader` carries them out in the order in which `transition` returned them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ft_hsdp.core.commit import AttemptId, CommitRecord, CommitToken
from ft_hsdp.core.grant import Grant, Member, Report, Role
from ft_hsdp.core.state_id import StateId
from ft_hsdp.core.units import Places


@dataclass(frozen=True, slots=True)
class RequestGrant:
    """Ask the lighthouse for a step. A newer request makes the answers to older ones void."""

    report: Report  # what the lighthouse is told
    pause: bool = False  # the answer to the request before did not fit, so wait a moment before this one is sent


@dataclass(frozen=True, slots=True)
class Configure:
    """Every rank forms the ring of this grant."""

    grant: Grant


@dataclass(frozen=True, slots=True)
class StopRing:
    """Every rank leaves the ring of `epoch`."""

    epoch: int
    reason: str  # what peers that still want the ring are told


@dataclass(frozen=True, slots=True)
class Reduce:
    """Every rank reduces the buckets of one attempt."""

    fence: AttemptId  # the attempt
    role: Role  # other than "contribute": relay only, add nothing
    prev: str  # lineage of the state that the attempt builds on
    places: Places = ()  # what this replica trains; units that it has trained beyond them count, too


@dataclass(frozen=True, slots=True)
class SendToken:
    """Pass the commit token to the right neighbour."""

    token: CommitToken


@dataclass(frozen=True, slots=True)
class Commit:
    """Every rank applies `record` from the reduced gradient that it holds.

    A failure from here on ends the replica. If the record is skipped, only the ledger and the name of the state
    change.
    """

    record: CommitRecord


@dataclass(frozen=True, slots=True)
class BufferUpdate:
    """Every rank keeps the reduced gradient of `record` until its base is there."""

    record: CommitRecord


@dataclass(frozen=True, slots=True)
class DropGradient:
    """Every rank drops the local gradient of the step: this replica was left behind, for `reason`."""

    reason: str


@dataclass(frozen=True, slots=True)
class InstallSnapshot:
    """Every rank replaces its state by the fetched and verified shard of `base`."""

    base: StateId


@dataclass(frozen=True, slots=True)
class RunBatch:
    """Every rank runs forward and backward for `step`.

    All ranks get this order at the same place among their orders, so that their collectives match.
    """

    step: int
    # What is trained if the membership stays as it is. The order to reduce the step says what counts.
    places: Places = ()
    following: int = 0  # first place of the next step, counted like these, if the membership stays as it is


@dataclass(frozen=True, slots=True)
class Fetch:
    """Every rank fetches its shard of `base` from the donors. An earlier fetch is cancelled."""

    base: StateId
    donors: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Keep:
    """Every rank keeps a copy of its shard of `state`, for replicas that fetch it without a ring."""

    state: StateId


@dataclass(frozen=True, slots=True)
class WriteCheckpoint:
    """Every rank writes its shard of `state`, which it has just reached, to durable storage."""

    state: StateId


@dataclass(frozen=True, slots=True)
class DropSnapshots:
    """Every rank has its snapshots dropped: the state in them was found to be corrupt."""


@dataclass(frozen=True, slots=True)
class DropCopies:
    """Every rank has the copies dropped that its host keeps for `replicas`: their state is corrupt."""

    replicas: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Exit:
    """All processes of the replica end."""

    code: int  # exit code of its processes (`ft_hsdp.errors`)
    reason: str  # one line for the journal
    done: bool = False  # its script has ended its part: the state that the ranks hold is the last one
    for_all: bool = False  # `Job.stop` has ended the job: the same is true of the other replicas


Effect = (
    RequestGrant
    | Configure
    | StopRing
    | Reduce
    | SendToken
    | Commit
    | BufferUpdate
    | DropGradient
    | InstallSnapshot
    | RunBatch
    | Fetch
    | Keep
    | WriteCheckpoint
    | DropSnapshots
    | DropCopies
    | Exit
)
