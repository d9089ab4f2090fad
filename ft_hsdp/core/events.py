"""Events: what happened to a replica, as its leader tells the core. Past tense.

Each is the second argument of `replica.transition`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ft_hsdp.core.commit import AttemptId, CommitRecord, CommitToken
from ft_hsdp.core.grant import Answer, Grant
from ft_hsdp.core.state_id import StateId

Leaving = Literal["told", "leaves", "stops", "ended"]
"""Why a replica leaves: it was told to from outside; or its script has called `Job.leave`, or `Job.stop`, which
ends the job of all replicas; or its script has ended, so that it trains no further step. After the last three the
replica is done: it is not started again."""


@dataclass(frozen=True, slots=True)
class Started:
    """The ranks are warm and hold `Replica.state`."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The lighthouse answered the newest request."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class Unanswered:
    """The lighthouse did not answer in time; the lease on the last grant still runs."""


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """The lighthouse did not answer for so long that the lease is over.

    The last grant may not be repeated any more.
    """


@dataclass(frozen=True, slots=True)
class GrantShown:
    """Another member showed a grant in its HELLO or ABORT."""

    grant: Grant


@dataclass(frozen=True, slots=True)
class RingBroken:
    """The ring of `epoch` broke."""

    epoch: int
    suspect: int | None = None  # the replica that is held responsible, if there is one
    accuser: int | None = None  # the neighbour of the suspect that blames it


@dataclass(frozen=True, slots=True)
class Reduced:
    """All ranks of this replica hold the reduced gradient that `record` describes."""

    fence: AttemptId  # the attempt that was reduced
    record: CommitRecord
    digest: str = ""  # hash of the slice of the base state that is compared at this step; "": not held


@dataclass(frozen=True, slots=True)
class TokenArrived:
    """The commit token came from the left neighbour."""

    token: CommitToken


@dataclass(frozen=True, slots=True)
class Fetched:
    """All ranks of this replica fetched and verified their shards of `base`."""

    base: StateId


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """No donor could serve `base`."""

    base: StateId
    reason: str  # what happened with each donor


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    """All ranks of this replica wrote their shards of `state`."""

    state: StateId


@dataclass(frozen=True, slots=True)
class CheckpointFailed:
    """A rank of this replica could not write its shard of `state`."""

    state: StateId
    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointOverdue:
    """`timeouts.checkpoint_again_s` have passed since this replica could not write a checkpoint."""


@dataclass(frozen=True, slots=True)
class CheckpointDue:
    """`checkpoint.every_s` have passed since the newest checkpoint was ordered."""


@dataclass(frozen=True, slots=True)
class LeaveRequested:
    """The replica is to leave; it does so at the next commit, or at once if its loop has ended."""

    how: Leaving = "told"


@dataclass(frozen=True, slots=True)
class LeaveOverdue:
    """This replica leaves, and no ring was formed in time: of the others without it, or one that it can leave."""


Event = (
    Started
    | Answered
    | Unanswered
    | LeaseEnded
    | GrantShown
    | RingBroken
    | Reduced
    | TokenArrived
    | Fetched
    | FetchFailed
    | CheckpointWritten
    | CheckpointFailed
    | CheckpointOverdue
    | CheckpointDue
    | LeaveRequested
    | LeaveOverdue
)
