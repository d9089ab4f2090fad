"""What a rank tells of its collectives, so that others find out who keeps a job waiting (FT-HSDP §2.3). Pure.

A collective is known by its group and its number there: the n-th that a member begins is the n-th of all others.
Three kinds of group look alike here: torch's process groups inside a replica, FTAR's rings, and the group "commit"
of all ranks of an epoch. There a rank joins with its vote on a step, and is done with the commit of that step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

COMMIT = "commit"  # with which the name of its group begins
MARKED = 16


def epoch_of(group: str) -> int | None:
    """Return the epoch of a ring, or of commits; None: the group is one inside a replica."""
    _, _, epoch = group.rpartition(" of epoch ")
    return int(epoch) if epoch.isdecimal() and epoch != group else None


class RankId(NamedTuple):
    """A rank of a job."""

    replica: int
    rank: int  # within the replica

    def __str__(self) -> str:
        return f"{self.replica}/{self.rank}"


class Mark(NamedTuple):
    """When a rank began `MARKED` collectives in a row: the mean of these times."""

    number: int  # of the last one of them, a multiple of `MARKED`
    t: float  # Unix seconds, by the clock of the rank's host


@dataclass(frozen=True, slots=True)
class GroupTrace:
    """How far a rank is in the collectives of one group. Counts begin with the group, and only grow."""

    name: str  # the same on all members, and of no other group of the job
    joined: int  # collectives that this rank has begun
    done: int  # of these, how many have ended here
    op: str = ""  # what the newest one is, such as "all_gather" or "bucket 3"
    left: RankId | None = None  # of a ring: the member from which this one receives
    received: int = 0  # of a ring: chunks from there
    sent: int = 0  # of a ring: chunks that this rank has given to its connection to the right
    awaits: str = ""  # of a ring: "left" or "right", from which its engine waits for something; "": it works
    # Of a ring, in seconds of the last ones that the rank has told of, about ten:
    in_s: float = 0.0  # inside all-reduces
    blocked_s: float = 0.0  # of these, waited until the right took what was sent
    marks: tuple[Mark, ...] = ()  # the newest, oldest first


@dataclass(frozen=True, slots=True)
class RankTrace:
    """All that one rank tells at a time."""

    groups: tuple[GroupTrace, ...]
    doing: str = ""  # what its training loop does, in a few words
    stack: tuple[str, ...] = ()  # where its main thread is, innermost first: "file:line function"


@dataclass(frozen=True, slots=True)
class Heard:
    """What is known of one rank."""

    trace: RankTrace | None  # the newest; None: it has sent none
    age_s: float  # since it was heard; a rank that lives is heard about once a second
    # For how long, when heard, no count had changed and the main thread had got nothing done. 0: it gets on, and
    # its trace may be old.
    still_s: float = 0.0
