"""A row of the journal, and what does not change about the job that it tells of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Kind = Literal["event", "commit"]
Row = dict[str, Any]


class JournalEntry(NamedTuple):
    """A row and its number; an event has "t" (Unix seconds) and "event", a commit "t" and "step"."""

    seq: int
    kind: Kind
    row: Row


@dataclass(frozen=True, slots=True)
class JobInfo:
    """What does not change about a job: its name, ranks of each replica, steps to go, and whether it runs.

    Ids of replicas are below ``slots``; it begins with ``replicas`` of them (None: all).
    """

    name: str
    slots: int
    ranks: int
    steps: int
    live: bool = True
    replicas: int | None = None
