"""Effects: what a replica's leader is told to do by the core. Imperative; most go to all of its ranks."""

from __future__ import annotations

from dataclasses import dataclass

from ft_hsdp.core.commit import AttemptId, CommitRecord, CommitToken
from ft_hsdp.core.grant import Grant, Member, Report, Role
from ft_hsdp.core.state_id import StateId


@dataclass(frozen=True, slots=True)
class RequestGrant:
    """Ask the lighthouse for a step; a newer ask makes older answers void.

    ``pause``: the answer to the ask before did not fit, so a moment is to pass first.
    """

    report: Report
    pause: bool = False


@dataclass(frozen=True, slots=True)
class Configure:
    """Every rank forms the ring of this grant."""

    grant: Grant


@dataclass(frozen=True, slots=True)
class StopRing:
    """Every rank leaves the ring of ``epoch``; peers that still want it are told ``reason``."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Reduce:
    """Every rank reduces its buckets for ``fence`` in ``role`` on top of the lineage ``prev``."""

    fence: AttemptId
    role: Role
    prev: str


@dataclass(frozen=True, slots=True)
class SendToken:
    """Pass the token to the right neighbour."""

    token: CommitToken


@dataclass(frozen=True, slots=True)
class Commit:
    """Every rank applies ``record`` from the reduced gradient that it holds; nothing may fail now.

    Of a record that is skipped only the ledger and the name of the state are applied.
    """

    record: CommitRecord


@dataclass(frozen=True, slots=True)
class BufferUpdate:
    """Every rank keeps the reduced gradient of ``record`` until its base is there."""

    record: CommitRecord


@dataclass(frozen=True, slots=True)
class DropGradient:
    """The local gradient of the step is of no use: this replica was left behind, ``reason`` says why."""

    reason: str


@dataclass(frozen=True, slots=True)
class InstallSnapshot:
    """Every rank swaps its staged and verified shard of ``base`` in."""

    base: StateId


@dataclass(frozen=True, slots=True)
class RunBatch:
    """Every rank runs forward and backward of its next batch for ``step``.

    All ranks get this order at one place among the others, so that their collectives match.
    """

    step: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Every rank fetches its shard of ``base`` from the donors; an earlier fetch is cancelled."""

    base: StateId
    donors: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Keep:
    """Every rank has a copy of its shard of ``state`` ready, for those that fetch it without a ring."""

    state: StateId


@dataclass(frozen=True, slots=True)
class WriteCheckpoint:
    """Every rank writes its shard of ``state``, which it has just reached, to durable storage."""

    state: StateId


@dataclass(frozen=True, slots=True)
class DropSnapshots:
    """Every rank has its snapshots dropped: the state that they hold was found to be corrupt."""


@dataclass(frozen=True, slots=True)
class Exit:
    """The replica ends with ``code``."""

    code: int
    reason: str


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
    | Exit
)
