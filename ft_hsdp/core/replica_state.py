"""What the leader of one replica knows (`Replica`), in which phase of a step it is, and what the operator chose.

`Replica` is frozen: `replica.transition` returns a changed copy. Nothing of it travels or is written down as a
whole; `voting.ask` copies what the lighthouse needs into a `Report`.
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
from ft_hsdp.core.ledger import Run
from ft_hsdp.core.state_id import StateId
from ft_hsdp.core.units import Places

Poison = Literal["exclude_contributor", "skip_step"]


@dataclass(frozen=True, slots=True)
class ReplicaPolicy:
    """What the operator chose; equal for all replicas of a job."""

    checkpoint_every: int = 0  # a durable checkpoint after each so many steps; 0: none
    catchup_log_steps: int = 64  # committed gradients that a replica buffers while it fetches its base
    # A gradient is not finite: try the step again without it, or commit the step without changing a weight.
    poison: Poison = "exclude_contributor"
    keep_last: bool = False  # the state with which all replicas leave, or training ends, is written
    poison_retries: int = 3  # a unit that was left out of so many steps is given up


DEFAULT = ReplicaPolicy()


# Of the messages and of the rules behind them. Raise it when replicas, agents or a lighthouse of the version
# before cannot take part any more. 1, which stood nowhere, counted batches; 2 counts units; 3 names hosts in a
# grant; 4 says to an agent what a connection is for; 6 tells the ring the norms of gradients.
PROTOCOL_VERSION = 6
PROTOCOL = "protocol"  # the key, among those that replicas must have in common, of the version of the messages
ENTRY = "entry"  # the key of the name and the digest of what the ranks run


def difference(theirs: Mapping[str, str], agreed: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Return the first dotted key, in sorted order but `PROTOCOL` first, in which two configurations differ.

    With it come its values in `theirs` and in `agreed`, which `config.agreed` writes; "nothing" stands for a key
    that one side does not have. None if the two are equal.
    """
    for key in sorted(theirs.keys() | agreed.keys(), key=lambda key: (key != PROTOCOL, key)):
        mine, other = theirs.get(key, "nothing"), agreed.get(key, "nothing")
        if mine != other:
            return key, mine, other
    return None


RANDOM, UNKNOWN = "random", "unknown"  # values of facts about the data that cannot be compared
REPLICA_BATCH = "samples of a replica in a step"  # what stays the same if its ranks share them out otherwise
TOGETHER = "samples together"  # what `collate_fn` makes of samples
# Facts of how the data are cut into batches; the others are of the data themselves.
CUTS = frozenset({"batch_size", REPLICA_BATCH, TOGETHER, "drop_last", "shuffle", "seed", "seq_len"})


def other_data(theirs: Mapping[str, str], agreed: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Return the first fact about the data, those of the data themselves first, in which two sides differ.

    With it come its values in `theirs` and in `agreed`, as `ft_hsdp.train.data.facts` makes them; None if
    nothing differs. A fact that one side does not know, or that is random, is not compared.
    """
    for name in sorted(theirs.keys() & agreed.keys(), key=lambda name: (name in CUTS, name)):
        mine, other = theirs[name], agreed[name]
        if mine != other and not {mine, other} & {RANDOM, UNKNOWN}:
            return name, mine, other
    return None


class Phase(Enum):
    """Where a replica is in a step.

    The usual way is ASKING, REDUCING, VOTED and, at the commit, ASKING again. After the last commit it is FINAL.
    A ring that breaks leads from REDUCING or VOTED back to ASKING. DONE has no way out.
    """

    ASKING = "asking"  # a request for the next step is open at the lighthouse
    REDUCING = "reducing"  # the ranks compute and reduce the gradient of the step
    VOTED = "voted"  # all ranks hold the sum; the verdict of the commit token is not known yet
    LEAVING = "leaving"  # committed its last step; stays in the ring until the others have left it
    FETCHING = "fetching"  # fetches a state without a ring, told to by a `CatchUp`
    FINAL = "final"  # all steps are committed; waits until every replica has the final state
    DONE = "done"  # the process ends; no event counts any more


@dataclass(frozen=True, slots=True)
class Replica:
    """The leader's view of its replica: the argument and the result of `replica.transition`.

    `state` is what all ranks hold, `ring_state` is what the next reduction builds on. They are equal except
    while the replica is behind: then a fetch of `fetching` is under way (or is to be ordered), the replica only
    relays in the ring, and `log` holds the records that were committed meanwhile.
    """

    # Identity.
    me: int  # replica id
    incarnation: str  # this life of the replica
    steps: int  # steps of the job; the state after the last one is final

    # Its states.
    state: StateId  # what all ranks hold
    ring_state: StateId  # what the ring builds on; newer than `state` while the replica is behind
    policy: ReplicaPolicy = DEFAULT

    # Its place in the protocol.
    phase: Phase = Phase.ASKING
    grant: Grant | None = None  # the newest one that was adopted
    seen: tuple[int, int] = (0, 0)  # (term, epoch) of the newest grant heard of, adopted or not
    intact: bool = False  # whether the ring of `grant` stands
    attempt: int = 0  # number of the attempt at the step, from 0; a new grant starts at 0
    # Replicas that only relay in this attempt: they were poisoned or doubled in an earlier one.
    excluded: tuple[int, ...] = ()
    spoiled: tuple[Run, ...] = ()  # units that this attempt goes without: their gradients were not finite

    # The vote on this attempt.
    record: CommitRecord | None = None  # set once all ranks hold the reduced gradient
    forwarded: bool = False  # whether a yes was passed on, so that others may have committed `record`
    digest: str = ""  # hash of the compared slice of the state that the attempt builds on; "": not held
    token: CommitToken | None = None  # a token that arrived before the own sum was complete

    # What its ranks are busy with.
    fed_state: StateId | None = None  # the state on which the newest batch was started
    fed_places: Places = ()  # what was to be trained of it
    fetching: StateId | None = None  # the base that the ranks fetch
    # Committed records, to be applied on top of `fetching`; `catchup_log_steps` at most.
    log: tuple[CommitRecord, ...] = ()
    # An attempt for which this replica never votes yes: its ring broke before the vote.
    void: AttemptId | None = None

    # What the last commit token said: sorted replica ids. A new grant clears all but `unwritable`.
    up_to_date: tuple[int, ...] = ()  # hold the state that the step led to
    leaving: tuple[int, ...] = ()  # leave the ring after that step
    lagging: tuple[int, ...] = ()  # dropped their log and need a newer base
    unwritable: tuple[int, ...] = ()  # could not write their last checkpoint
    minority: tuple[int, ...] = ()  # hold another state than the majority
    diverged: tuple[int, ...] = ()  # hold different states, and no majority can tell which is right

    # Why the ring of `grant` broke.
    ring_suspects: tuple[int, ...] = ()  # replicas that were seen to die or fall silent
    edge: tuple[int, int] | None = None  # (accuser, suspect): which neighbour blamed which

    # Departure.
    departing: bool = False  # told to leave by its own process
    quits: bool = False  # by its script, or by that of another replica, for good
    stops: bool = False  # its script, or that of another replica, has stopped the job
    ended: bool = False  # its script trains no further step
    dismissed: bool = False  # the lighthouse wants it to leave when the others can spare it

    # Checkpoints; core/checkpoint.py decides with them.
    checkpoint_failed: bool = False  # this replica could not write its last checkpoint
    requested_checkpoint: int = 0  # newest demand heard of: write a state of that step or a later one; 0: none
    saved: int = 0  # step of the newest state that was written on demand
    writing: StateId | None = None  # the state whose checkpoint this replica writes
    writers: tuple[tuple[int, str], ...] = ()  # (replica, incarnation) known to write a checkpoint now
    checkpoint_missing: bool = False  # one was ordered, and none is known to be durable since
    checkpoint_retries: int = 0  # attempts made in place of a lost or failed one

    skips_in_a_row: int = 0  # how many of the newest steps changed no weight
    number: int = 0  # what the lighthouse numbered this incarnation with; 0: no grant yet
    committed: CommitRecord | None = None  # the record that led to `state`; None: `state` was fetched or found

    @property
    def verified(self) -> bool:
        """Whether this replica holds the state that the ring builds on."""
        return state_id.same(self.state, self.ring_state)

    @property
    def prepared(self) -> CommitRecord | None:
        """The record that this replica can apply if it turns out to be committed; None if there is none."""
        record = self.record if self.forwarded else None
        return record if record is not None and record.prev == self.state.lineage else None

    @property
    def lags(self) -> bool:
        """Whether this replica needs a newer base than the one it fetched: its log was full, and is dropped."""
        return not self.verified and self.fetching is None

    @property
    def in_doubt(self) -> StateId | None:
        """The newest state that may be committed although this replica cannot apply it yet; None if up to date."""
        if self.verified:
            return None
        voted = self.record.state_id if self.record is not None and self.forwarded else None
        return voted if voted is not None and state_id.newer(voted, self.ring_state) else self.ring_state

    @property
    def fence(self) -> AttemptId:
        """The attempt that is under way."""
        return AttemptId(self.grant.epoch if self.grant else 0, self.ring_state.step + 1, self.attempt)

    @property
    def role(self) -> Role:
        """This replica's role in the attempt.

        It contributes only if the grant says so, it holds the base, and no earlier attempt excluded it.
        """
        mine = self.grant.member(self.me, self.incarnation) if self.grant else None
        if mine is None or not self.verified or mine.role == "behind":
            return "behind"
        return "standby" if self.me in self.excluded else mine.role

    @property
    def places(self) -> Places:
        """What this replica trains in this step, as places among the untrained units of the ring's state.

        Of a replica that was behind and is not any more: what it will probably train.
        """
        if self.grant is None or not self.verified:
            return ()
        return self.grant.places(self.ring_state.step + 1).get(self.me, ())


Step = tuple[Replica, tuple[Effect, ...]]
"""The result of a rule: the replica after it, and what its leader has to do, in this order."""
