"""All that the conformance suite runs on: each transport, and each way in which it may carry a payload."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Flavour:
    """A transport by its name in `choose.GOAL_KINDS`, or "sim".

    ``registered``: tensors are in segments that a neighbour can map. ``readable``: the kernel lets a neighbour
    read our memory. ``receivers``: connections have threads of their own.
    """

    name: str
    transport: str
    registered: bool = False
    readable: bool = True
    connections: int = 1
    receivers: bool = True


FLAVOURS = (
    Flavour("tcp", "tcp"),
    Flavour("tcp-3", "tcp", connections=3),
    Flavour("tcp-inline", "tcp", receivers=False),
    Flavour("shm-registered", "shm", registered=True),
    Flavour("shm-remote", "shm"),
    Flavour("shm-inline", "shm", readable=False),
    Flavour("c10d", "c10d"),
    Flavour("sim", "sim"),
    Flavour("sim-references", "sim", registered=True),
)
