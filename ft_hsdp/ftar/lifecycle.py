"""Lifecycle: the states of a group and the ways between them (torchcomms calls the third one reconfiguring)."""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """Where a group is. FATAL and CLOSED are never left; BROKEN only for a larger epoch."""

    NEW = "no epoch yet"
    CONFIGURING = "forming the ring of an epoch"
    READY = "the ring stands, nothing to do"
    RUNNING = "an all-reduce is under way"
    ABORTING = "the ring is over, the others are being told"
    BROKEN = "the ring is over"
    FATAL = "this process must stop"
    CLOSED = "closed"


_END = {State.FATAL, State.CLOSED}
WAYS: dict[State, frozenset[State]] = {
    State.NEW: frozenset({State.CONFIGURING, State.BROKEN, *_END}),
    State.CONFIGURING: frozenset({State.READY, State.ABORTING, State.CONFIGURING, *_END}),
    State.READY: frozenset({State.RUNNING, State.ABORTING, State.CONFIGURING, *_END}),
    State.RUNNING: frozenset({State.READY, State.ABORTING, State.CONFIGURING, *_END}),
    State.ABORTING: frozenset({State.BROKEN, State.CONFIGURING, *_END}),
    State.BROKEN: frozenset({State.CONFIGURING, State.BROKEN, *_END}),
    State.FATAL: frozenset({State.CLOSED}),
    State.CLOSED: frozenset(),
}


def step(old: State, new: State) -> State:
    """``new``, if there is a way to it from ``old``.

    Raises:
        ValueError: there is none.
    """
    if new not in WAYS[old]:
        raise ValueError(f"a group cannot go from {old.name} to {new.name}")
    return new
