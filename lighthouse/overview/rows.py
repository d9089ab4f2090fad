"""A row of the journal, and the fixed facts of its job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Kind = Literal["event", "commit"]
Row = dict[str, Any]


class JournalEntry(NamedTuple):
    """A row and its number. An event has "t" (Unix seconds) and "event", a commit has "t" and "step"."""

    seq: int
    kind: Kind
    row: Row


@dataclass(frozen=True, slots=True)
class JobInfo:
    """What does not change about a job."""

    name: str
    slots: int  # ids of replicas are below it
    ranks: int  # of each replica
    steps: int  # to train
    live: bool = True  # False: a finished run is shown
    replicas: int | None = None  # with which the job begins; None: all slots
    config: Mapping[str, object] = field(default_factory=dict, hash=False)  # what the page shows, by dotted key
