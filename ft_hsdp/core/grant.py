"""Grant: what the lighthouse lets a set of replicas do, and what it means for one of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ft_hsdp.core.commit import AttemptId, CommitRecord
from ft_hsdp.core.state_id import StateId

Role = Literal["contribute", "behind"]


@dataclass(frozen=True, slots=True)
class Member:
    """A replica in a grant; addresses are "host:port", one for each rank.

    ``number`` is the one that the lighthouse gave to this incarnation when it first admitted it.
    """

    replica: int
    incarnation: str
    role: Role
    ring: tuple[str, ...] = ()
    state: tuple[str, ...] = ()
    number: int = 0


@dataclass(frozen=True, slots=True)
class Grant:
    """A membership: who is in the ring of ``epoch``, in which order, on which state, in which role.

    ``void`` are attempts that are known never to commit, so a record of them may be dropped. ``mac``
    authenticates the grant when one member shows it to another.
    """

    term: int
    epoch: int
    base: StateId
    members: tuple[Member, ...]
    total: int
    reason: str = field(compare=False)
    void: tuple[AttemptId, ...] = ()
    mac: str = ""

    @property
    def ring(self) -> tuple[int, ...]:
        """Replica ids in ring order."""
        return tuple(m.replica for m in self.members)

    def member(self, replica: int, incarnation: str) -> Member | None:
        """The entry of this incarnation of ``replica``, if the grant names it."""
        return next((m for m in self.members if m.replica == replica and m.incarnation == incarnation), None)

    @property
    def donors(self) -> tuple[Member, ...]:
        """Members that hold the base state and can serve it."""
        return tuple(m for m in self.members if m.role == "contribute")


@dataclass(frozen=True, slots=True)
class Report:
    """What a replica tells the lighthouse about itself when it asks for a step.

    ``state`` is what all its ranks hold. ``prepared`` is a record that it holds without knowing the verdict.
    ``step`` is the step that it asks for. ``epoch`` is the one that it is in, and ``after`` an epoch that is
    of no more use to it (0: none), so that only a larger one will do. ``equal`` are the replicas that the
    last token knew to hold ``state``; ``void`` is an attempt that it will never vote for. ``doubt`` is a
    state that it knows to be, or has voted to be, committed, but whose base it does not hold. ``lagging`` are the
    replicas that need a newer base than their grant's. ``diverged`` are replicas that were found to hold different
    states under one name, with no majority to tell who is wrong. ``suspects`` are the replicas that its ranks saw
    die or fall silent in the ring of ``after``; ``edge`` is who blamed whom there. ``saved`` is the step of the
    newest state written on demand. ``departs``: it was asked to leave, and wants to become no member any more.
    ``number`` is the one that its newest grant gave to this incarnation (0: none yet). ``writing``: it writes a
    checkpoint, which the end of the job waits for.
    """

    replica: int
    incarnation: str
    state: StateId
    step: int
    epoch: int = 0
    after: int = 0
    max_term: int = 0
    prepared: CommitRecord | None = None
    void: AttemptId | None = None
    doubt: StateId | None = None
    equal: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()
    lagging: tuple[int, ...] = ()
    diverged: tuple[int, ...] = ()
    suspects: tuple[int, ...] = ()
    edge: tuple[int, int] | None = None
    saved: int = 0
    departs: bool = False
    number: int = 0
    writing: bool = False


@dataclass(frozen=True, slots=True)
class Continue:
    """Answer: the membership of ``epoch`` stands for ``step``.

    With ``leave`` the replica is to go at the next commit, if others hold its state then. ``checkpoint`` demands
    that a state of that many steps or more be written (0: none is demanded).
    """

    epoch: int
    step: int
    leave: bool = False
    checkpoint: int = 0


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Answer: no ring for now; whoever is behind takes ``base`` from the donors, and they keep it for that.

    Training is over, or too few replicas hold ``base`` to go on; ``reason`` says which. Each asks again when it
    holds ``base``.
    """

    base: StateId
    donors: tuple[Member, ...] = field(default=())
    reason: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Finish:
    """Answer: every replica has the final state; end."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Answer: this incarnation may not take part, ``reason`` says why; it ends with ``exit_code``.

    ``forget``: its snapshots are of no use to anybody, so it has them dropped first.
    """

    reason: str
    exit_code: int
    forget: bool = False


Answer = Grant | Continue | CatchUp | Finish | Refused
