"""The states of a group and the transitions between them (torchcomms calls CONFIGURING reconfiguring)."""

from __future__ import annotations

from enum import Enum


class GroupState(Enum):
    """The state of a group. FATAL and CLOSED are final; only a larger epoch leads out of BROKEN."""

    NEW = "no epoch yet"
    CONFIGURING = "forming the ring of an epoch"
    READY = "the ring stands, nothing to do"
    RUNNING = "an all-reduce is under way"
    ABORTING = "the ring is over, the others are being told"
    BROKEN = "the ring is over"
    FATAL = "this process must stop"
    CLOSED = "closed"


_END = {GroupState.FATAL, GroupState.CLOSED}
TRANSITIONS: dict[GroupState, frozenset[GroupState]] = {
    GroupState.NEW: frozenset({GroupState.CONFIGURING, GroupState.BROKEN, *_END}),
    GroupState.CONFIGURING: frozenset({GroupState.READY, GroupState.ABORTING, GroupState.CONFIGURING, *_END}),
    GroupState.READY: frozenset({GroupState.RUNNING, GroupState.ABORTING, GroupState.CONFIGURING, *_END}),
    GroupState.RUNNING: frozenset({GroupState.READY, GroupState.ABORTING, GroupState.CONFIGURING, *_END}),
    GroupState.ABORTING: frozenset({GroupState.BROKEN, GroupState.CONFIGURING, *_END}),
    GroupState.BROKEN: frozenset({GroupState.CONFIGURING, GroupState.BROKEN, *_END}),
    GroupState.FATAL: frozenset({GroupState.CLOSED}),
    GroupState.CLOSED: frozenset(),
}


def step(old: GroupState, new: GroupState) -> GroupState:
    """Return `new` if a group may change to it from `old`.

    Raises:
        ValueError: there is no such transition.
    """
    if new not in TRANSITIONS[old]:
        raise ValueError(f"a group cannot go from {old.name} to {new.name}")
    return new
