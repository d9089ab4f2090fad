"""Messages: what a rank and the state agent of its host say to each other, on a Unix socket.

Both have proved the job's token before (`handshake`). A frame is a length and JSON. An order gets one answer. The
header of a snapshot (bytes that the agent keeps with it) is a frame of its own behind Staged and Taken; a slot's
descriptor comes with the first byte of the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from ft_hsdp import bounded, protocol
from ft_hsdp.core.state_id import StateId
from ft_hsdp.state.agent.slots import CompleteSnapshot

MAX_MESSAGE = 1 << 16
MAX_HEADER = 16 << 20
MAX_RANKS = 1 << 20
MAX_NBYTES = 1 << 50
GENERATIONS = 4


@dataclass(frozen=True, slots=True)
class Hello:
    """A rank of ``ranks``; its snapshots have ``nbytes`` bytes."""

    rank: Annotated[int, Field(ge=0, lt=MAX_RANKS)]
    ranks: Annotated[int, Field(gt=0, le=MAX_RANKS)]
    nbytes: Annotated[int, Field(ge=0, le=MAX_NBYTES)]


@dataclass(frozen=True, slots=True)
class Welcome:
    """The rank is let in; ``address`` ("host:port") is where the agent serves snapshots over HTTP."""

    address: Annotated[str, Field(max_length=300)]


@dataclass(frozen=True, slots=True)
class Damage:
    """A copy of ``state`` whose bytes are not those that were written; it is dropped. ``reason``: what differs."""

    state: StateId
    reason: str


@dataclass(frozen=True, slots=True)
class Stage:
    """Where may ``state`` be written? Answer: Slot or Busy."""

    state: StateId


@dataclass(frozen=True, slots=True)
class SlotGranted:
    """Write here. ``new``: its descriptor comes along. ``slots``: all that the rank still has."""

    number: int
    new: bool
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Busy:
    """No slot: this snapshot is left out."""

    reason: str


@dataclass(frozen=True, slots=True)
class Staged:
    """``state`` is complete in its slot. Its header follows. Answer: Done."""

    state: StateId


@dataclass(frozen=True, slots=True)
class Settle:
    """All ranks of the replica have staged ``state``, or (not ``everywhere``) some have not. Answer: Done."""

    state: StateId
    everywhere: bool


@dataclass(frozen=True, slots=True)
class Pin:
    """Keep ``state`` for ``seconds``, from whenever it is here. Answer: Done."""

    state: StateId
    seconds: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Unpin:
    """Keep nothing, pinned or taken. Answer: Done."""


@dataclass(frozen=True, slots=True)
class Recall:
    """What is complete? Answer: Recalled."""


@dataclass(frozen=True, slots=True)
class Recalled:
    """What is complete, newest first."""

    held: tuple[CompleteSnapshot, ...]


@dataclass(frozen=True, slots=True)
class Take:
    """Give ``state`` to read, until Unpin or the next Take. Answer: Taken or Absent."""

    state: StateId


@dataclass(frozen=True, slots=True)
class Taken:
    """Its descriptor comes along, its header follows."""


@dataclass(frozen=True, slots=True)
class Absent:
    """That state is not complete here; ``damaged``: see Done."""

    damaged: tuple[Damage, ...] = ()


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop all that this rank has. Answer: Done."""


@dataclass(frozen=True, slots=True)
class Done:
    """It is so. ``damaged``: this rank's copies that were found damaged, and dropped, since the last answer."""

    damaged: tuple[Damage, ...] = ()


@dataclass(frozen=True, slots=True)
class OrderRefused:
    """That order does not fit what came before it."""

    reason: str


ORDERS = (Stage, Staged, Settle, Pin, Unpin, Recall, Take, Forget)

# The tag of each message on the socket: an agent may be older than the ranks that call it.
_TYPES: dict[str, type] = {
    "Stage": Stage,
    "Staged": Staged,
    "Settle": Settle,
    "Pin": Pin,
    "Unpin": Unpin,
    "Recall": Recall,
    "Take": Take,
    "Forget": Forget,
    "Hello": Hello,
    "Welcome": Welcome,
    "Slot": SlotGranted,
    "Busy": Busy,
    "Recalled": Recalled,
    "Taken": Taken,
    "Absent": Absent,
    "Done": Done,
    "Refused": OrderRefused,
}
_CODEC = bounded.MessageCodec(_TYPES, MAX_MESSAGE)
decode = _CODEC.decode


def frame(message: object) -> bytes:
    """Return a message with its length in front."""
    return protocol.framed(_CODEC.encode(message))


def agent_name(token: str, replica: int, generation: int = 0) -> str:
    """Where an agent of a replica on this host listens; only who knows the token can tell it before.

    ``generation``: below GENERATIONS; one that is above 0 stands in for an agent that neither answers nor dies.
    """
    return "\0ft_hsdp/state/" + protocol.mac(token, "state-agent-name", replica, generation)[:32]
