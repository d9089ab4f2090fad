"""Rules: what the operator chose for all replicas of a job alike.

Standing: what the leader of one replica knows of it, and where it is in a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from ft_hsdp.core import state_id
from ft_hsdp.core.commit import AttemptId, CommitRecord, CommitToken
from ft_hsdp.core.effects import Effect
from ft_hsdp.core.grant import Grant, Role
from ft_hsdp.core.state_id import StateId

Poison = Literal["exclude_contributor", "skip_step"]


@dataclass(frozen=True, slots=True)
class ReplicaPolicy:
    """``checkpoint_every`` steps there is a durable checkpoint (0: never). A replica that is behind keeps at most
    ``catchup_log_steps`` committed gradients until its base is there. ``poison`` says what becomes of a step in
    which some gradient is not finite: it is tried again without it, or committed without changing any weight.
    A batch that was left out of ``poison_retries`` steps is given up.
    ``keep_last``: when all that hold the state leave on request, one of them writes a checkpoint of it first.
    """

    checkpoint_every: int = 0
    catchup_log_steps: int = 64
    poison: Poison = "exclude_contributor"
    keep_last: bool = False
    poison_retries: int = 3


DEFAULT = ReplicaPolicy()


def difference(theirs: Mapping[str, str], agreed: Mapping[str, str]) -> tuple[str, str, str] | None:
    """The first dotted key in which two configurations differ, with both values; None: in no key.

    A value is the text that `config.agreed` gives; "nothing" stands for a key that one side does not know.
    """
    for key in sorted(theirs.keys() | agreed.keys()):
        mine, other = theirs.get(key, "nothing"), agreed.get(key, "nothing")
        if mine != other:
            return key, mine, other
    return None


class Phase(Enum):
    """Where a replica is in a step."""

    ASKING = "asking"
    REDUCING = "reducing"
    VOTED = "voted"
    LEAVING = "leaving"
    FETCHING = "fetching"  # without a ring
    FINAL = "final"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Replica:
    """The leader's view of its replica.

    ``state`` is what all ranks hold. ``head`` is the state that the ring builds on: it is above ``state``
    while a fetch of ``fetching`` is under way and ``log`` holds the committed records that are still to be
    applied. ``record`` is there once all ranks hold the reduced gradient, ``forwarded`` once a yes was passed
    on. ``digest`` is of the slice of the state that the attempt builds on. ``fed`` is the state that the newest
    batch is fed to. ``suspects`` were found to hold another state than the majority, ``diverged`` are those that
    differ with no majority. ``silent`` is who was seen to die or fall silent in the ring of ``grant``,
    ``edge`` who blamed whom for its end.
    ``spoiled`` are the batches (data shard, index) that the attempt goes without: no finite gradients.
    ``failing``: this replica could not write its last checkpoint. ``writing`` is the state whose checkpoint it
    writes. ``writers`` are the replicas, each with its incarnation, that are known to write one. ``missing``: none
    that was ordered is known to be durable since; ``again`` is how many attempts were made in its place. ``skips``
    is how many of the newest steps in a row changed no weight. ``departing``: it was asked to leave;
    ``dismissed``: the lighthouse wants it to, when it can be spared. ``wanted`` is the newest demand for a
    checkpoint that was heard of, ``saved`` the step of the newest state that was written on demand.
    ``number`` is the lighthouse's number of this incarnation, told by its newest grant.
    """

    me: int
    incarnation: str
    steps: int
    state: StateId
    head: StateId
    rules: ReplicaPolicy = DEFAULT
    phase: Phase = Phase.ASKING
    grant: Grant | None = None
    seen: tuple[int, int] = (0, 0)
    intact: bool = False
    attempt: int = 0
    excluded: tuple[int, ...] = ()
    spoiled: tuple[tuple[int, int], ...] = ()
    record: CommitRecord | None = None
    forwarded: bool = False
    digest: str = ""
    token: CommitToken | None = None
    fed: StateId | None = None
    fetching: StateId | None = None
    log: tuple[CommitRecord, ...] = ()
    void: AttemptId | None = None
    equal: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()
    lagging: tuple[int, ...] = ()
    unwritable: tuple[int, ...] = ()
    suspects: tuple[int, ...] = ()
    diverged: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()
    edge: tuple[int, int] | None = None
    departing: bool = False
    dismissed: bool = False
    failing: bool = False
    skips: int = 0
    wanted: int = 0
    saved: int = 0
    writing: StateId | None = None
    writers: tuple[tuple[int, str], ...] = ()
    missing: bool = False
    again: int = 0
    number: int = 0

    @property
    def verified(self) -> bool:
        """Whether this replica holds the state that the ring builds on."""
        return state_id.same(self.state, self.head)

    @property
    def prepared(self) -> CommitRecord | None:
        """The record that this replica could apply if it turns out to be committed."""
        record = self.record if self.forwarded else None
        return record if record is not None and record.prev == self.state.lineage else None

    @property
    def lags(self) -> bool:
        """Whether this replica needs a newer base: it has dropped its log, which was full."""
        return not self.verified and self.fetching is None

    @property
    def doubt(self) -> StateId | None:
        """The highest state that may be committed although this replica cannot apply it yet."""
        if self.verified:
            return None
        voted = self.record.state_id if self.record is not None and self.forwarded else None
        return voted if voted is not None and state_id.newer(voted, self.head) else self.head

    @property
    def fence(self) -> AttemptId:
        """The attempt that is under way."""
        return AttemptId(self.grant.epoch if self.grant else 0, self.head.step + 1, self.attempt)

    @property
    def role(self) -> Role:
        """Contribute only if granted, not poisoned in an earlier attempt, and in possession of the base."""
        mine = self.grant.member(self.me, self.incarnation) if self.grant else None
        granted = mine is not None and mine.role == "contribute" and self.me not in self.excluded
        return "contribute" if granted and self.verified else "behind"


Step = tuple[Replica, tuple[Effect, ...]]
"""What a rule gives: the replica as it is then, and what its leader is told to do."""
