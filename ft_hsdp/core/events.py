"""Events: what happened to a replica, as its leader tells the core. Past tense."""

from __future__ import annotations

from dataclasses import dataclass

from ft_hsdp.core.commit import AttemptId, CommitRecord, CommitToken
from ft_hsdp.core.grant import Answer, Grant
from ft_hsdp.core.state_id import StateId


@dataclass(frozen=True, slots=True)
class Started:
    """The replica is warm and holds ``Replica.state``."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The lighthouse answered the newest ask."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class Unanswered:
    """The lighthouse gave no answer in time; the lease on the last grant still runs."""


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """The lighthouse gave no answer for so long that the last grant may not be repeated any more."""


@dataclass(frozen=True, slots=True)
class GrantShown:
    """A member showed a grant in HELLO or ABORT."""

    grant: Grant


@dataclass(frozen=True, slots=True)
class RingBroken:
    """The ring of ``epoch`` is of no more use; ``suspect`` is the replica that is held responsible, if one is.

    ``accuser`` is its neighbour that says so.
    """

    epoch: int
    suspect: int | None = None
    accuser: int | None = None


@dataclass(frozen=True, slots=True)
class Reduced:
    """All ranks of this replica hold the reduced gradient that ``record`` describes.

    ``digest`` is of the slice of the state before that is compared at this step; "" if that is not here.
    """

    fence: AttemptId
    record: CommitRecord
    digest: str = ""


@dataclass(frozen=True, slots=True)
class TokenArrived:
    """The commit token came from the left neighbour."""

    token: CommitToken


@dataclass(frozen=True, slots=True)
class Fetched:
    """All ranks of this replica fetched and verified their shards of ``base``."""

    base: StateId


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """No donor could serve ``base``; ``reason`` says what each one did."""

    base: StateId
    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    """All ranks of this replica wrote their shards of ``state``."""

    state: StateId


@dataclass(frozen=True, slots=True)
class CheckpointFailed:
    """Some rank of this replica could not write its shard of ``state``."""

    state: StateId
    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointOverdue:
    """`timeouts.checkpoint_again_s` have passed since this replica could not write a checkpoint."""


@dataclass(frozen=True, slots=True)
class LeaveRequested:
    """The replica shall leave at the next commit."""


@dataclass(frozen=True, slots=True)
class LeaveOverdue:
    """The others have not formed a ring without this replica, which leaves, in time."""


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
    | LeaveRequested
    | LeaveOverdue
)
