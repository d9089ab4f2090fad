"""The messages between a rank and the state agent of its host, on a Unix socket.

Both ends have proved that they know the job's token (`handshake`). A frame is a length and JSON. The rank sends
orders; each gets one answer. The header of a snapshot, which is its encoded manifest, follows `Staged` and `Taken`
as a frame of its own. The file descriptor of a slot comes with the first byte of the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from ft_hsdp import bounded, protocol
from ft_hsdp.core.state_id import StateId

MAX_MESSAGE = 1 << 16  # bytes
MAX_HEADER = 16 << 20  # bytes
MAX_RANKS = 1 << 20
MAX_NBYTES = 1 << 50
GENERATIONS = 4  # agents of one replica on one host, at most: all but the newest are frozen


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a rank. Answer: Welcome."""

    rank: Annotated[int, Field(ge=0, lt=MAX_RANKS)]
    ranks: Annotated[int, Field(gt=0, le=MAX_RANKS)]  # of the replica
    nbytes: Annotated[int, Field(ge=0, le=MAX_NBYTES)]  # of each snapshot


@dataclass(frozen=True, slots=True)
class Welcome:
    """The agent accepts the rank."""

    address: Annotated[str, Field(max_length=300)]  # "host:port" at which the agent serves snapshots over HTTP


@dataclass(frozen=True, slots=True)
class CompleteSnapshot:
    """A complete snapshot of one rank."""

    state: StateId
    settled: bool  # all ranks of the replica have a snapshot of this state


@dataclass(frozen=True, slots=True)
class Damage:
    """A snapshot whose bytes are not those that were written. It is dropped already."""

    state: StateId
    reason: str  # what differs


@dataclass(frozen=True, slots=True)
class Stage:
    """Order: provide a slot for ``state``. Answer: SlotGranted or Busy."""

    state: StateId


@dataclass(frozen=True, slots=True)
class SlotGranted:
    """The slot to write into."""

    number: int
    new: bool  # this connection has not had the slot yet: its file descriptor comes along
    slots: tuple[int, ...]  # all slots that the rank has; it unmaps the others


@dataclass(frozen=True, slots=True)
class Busy:
    """There is no slot: this snapshot is left out."""

    reason: str


@dataclass(frozen=True, slots=True)
class Staged:
    """Order: ``state`` is complete in its slot. Its header follows. Answer: Done or OrderRefused."""

    state: StateId


@dataclass(frozen=True, slots=True)
class Settle:
    """Order: mark ``state`` as settled. Answer: Done."""

    state: StateId
    everywhere: bool  # all ranks of the replica have staged it; False: some have not, and it is not settled


@dataclass(frozen=True, slots=True)
class Pin:
    """Order: keep ``state`` for ``seconds``, now or once it is complete. Answer: Done."""

    state: StateId
    seconds: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Unpin:
    """Order: remove the pin, and release what was acquired by Take. Answer: Done."""


@dataclass(frozen=True, slots=True)
class Recall:
    """Order: list the complete snapshots. Answer: Recalled."""


@dataclass(frozen=True, slots=True)
class Recalled:
    """The complete snapshots of the rank."""

    held: tuple[CompleteSnapshot, ...]  # newest first


@dataclass(frozen=True, slots=True)
class Take:
    """Order: let the rank read ``state`` until Unpin or the next Take. Answer: Taken or Absent."""

    state: StateId


@dataclass(frozen=True, slots=True)
class Taken:
    """The snapshot can be read. Its file descriptor comes along, its header follows."""


@dataclass(frozen=True, slots=True)
class Absent:
    """There is no complete snapshot of that state."""

    damaged: tuple[Damage, ...] = ()  # as in Done


@dataclass(frozen=True, slots=True)
class Forget:
    """Order: drop all snapshots of this rank. Answer: Done."""


@dataclass(frozen=True, slots=True)
class Done:
    """The order was carried out."""

    damaged: tuple[Damage, ...] = ()  # this rank's snapshots that were found damaged since the last answer


@dataclass(frozen=True, slots=True)
class OrderRefused:
    """The order does not fit the ones before it."""

    reason: str


ORDERS = (Stage, Staged, Settle, Pin, Unpin, Recall, Take, Forget)

# The tag of each message on the socket. Tags never change: an agent may be older than the ranks that call it.
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


def agent_name(token: str, replica: int, generation: int = 0, host: str = "") -> str:
    """Return the name of the abstract Unix socket of a replica's agent on this host.

    It cannot be computed without the token, so no other user can take it first.

    Args:
        token: The job's token.
        replica: The replica id.
        generation: 0 to GENERATIONS - 1. An agent above 0 replaces one that neither answers nor dies.
        host: The host's name, if the machine has several hosts; "": the machine is one.
    """
    parts = (replica, generation, host) if host else (replica, generation)
    return "\0ft_hsdp/state/" + protocol.mac(token, "state-agent-name", *parts)[:32]
