"""The messages between a rank and the state agent of its host, on a Unix socket.

Both ends have proved that they know the job's token (`handshake`). A frame is a length and JSON. The rank sends
orders; each gets one answer. The header of a snapshot or slice, which is its encoded manifest, follows
`Staged` and `Taken` as a frame of its own. The file descriptor of a slot comes with the first byte of the
answer.

A rank has up to three connections, because some orders take long, and must not hold up its next snapshot: one for
its snapshots, one on which it waits for copies, and one for slices of block stores. The launcher calls now and
then while it waits for the ranks (`starter.visit`), and orders nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Literal

from pydantic import Field

from ft_hsdp import bounded, protocol
from ft_hsdp.core.replica_state import PROTOCOL_VERSION
from ft_hsdp.core.state_id import StateId
from ft_hsdp.memory.copies import MAX_COPIES
from ft_hsdp.state.transfer.shard_manifest import MAX_NBYTES, MAX_SLICES, ExpectedShard, SliceName

MAX_MESSAGE = 16 << 20  # bytes; an encoded manifest may be longer
MAX_RANKS = 1 << 20
MAX_REASON = 120  # characters
GENERATIONS = 4  # agents of one replica on one host, at most: all but the newest are frozen

ShardIndex = tuple[
    Annotated[int, Field(ge=0, lt=1 << 31)], Annotated[int, Field(ge=0, lt=MAX_RANKS)]
]  # replica, rank
SliceIndex = tuple[str, int]  # digest of the store, number of the slice
Line = Literal["snapshots", "copies", "visit", "blocks"]


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message on a connection of a rank. Answer: Welcome."""

    rank: Annotated[int, Field(ge=0, lt=MAX_RANKS)]
    ranks: Annotated[int, Field(gt=0, le=MAX_RANKS)]  # of the replica
    nbytes: Annotated[int, Field(ge=0, le=MAX_NBYTES)]  # of each snapshot
    line: Line = "snapshots"  # what the connection is for


@dataclass(frozen=True, slots=True)
class Welcome:
    """The agent accepts the rank."""

    address: Annotated[str, Field(max_length=300)]  # "host:port" at which the agent serves over HTTP


@dataclass(frozen=True, slots=True)
class CompleteSnapshot:
    state: StateId
    settled: bool  # all ranks of the replica have a snapshot of this state


@dataclass(frozen=True, slots=True)
class Damage:
    """A snapshot whose bytes are not those that were written. It is dropped already."""

    state: StateId
    reason: str  # what differs


@dataclass(frozen=True, slots=True)
class Stage:
    """Order: provide a slot to write into. Answer: SlotGranted, or OrderRefused: this snapshot is left out."""

    about: StateId | SliceName
    # Of a slice: bytes that the agent may use for slices and copies of other hosts' shards; None: no limit.
    budget: Annotated[int, Field(ge=0, le=MAX_NBYTES)] | None = None


@dataclass(frozen=True, slots=True)
class SlotGranted:
    number: int
    new: bool  # this connection has not had the slot yet: its file descriptor comes along
    slots: tuple[int, ...]  # all slots that the rank has; it unmaps the others


@dataclass(frozen=True, slots=True)
class Staged:
    """Order: it is complete in its slot. Its header follows. Answer: Done or OrderRefused."""

    about: StateId | SliceName


@dataclass(frozen=True, slots=True)
class Settle:
    """Order: mark ``state`` as settled. Answer: Done."""

    state: StateId
    # All ranks of the replica have staged it; False: some have not, and it is not settled; None: no commit settles
    # it, because only other states are copied.
    everywhere: bool | None


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
    """Order: let the rank read ``state`` until Unpin or the next Take. Answer: Taken, or Done: it is not here."""

    state: StateId


@dataclass(frozen=True, slots=True)
class Taken:
    """The snapshot can be read. Its file descriptor comes along, its header follows."""


@dataclass(frozen=True, slots=True)
class Forget:
    """Order: drop all snapshots of this rank. Answer: Done."""


@dataclass(frozen=True, slots=True)
class KeepCopy:
    """Order: keep a copy of what other hosts have. Answer: Done or OrderRefused; of a shard at once.

    The agent fetches it from their state servers and verifies it. A newer order for the same shard supersedes an
    older one that is not finished. The rank that orders is the keeper of a shard's copy: its `Settle` and `Forget`
    apply to the copy, too. The answer for a slice comes when it is here, or cannot be.
    """

    about: ExpectedShard | SliceName
    # "host:port" of the state servers that have it; of a shard: the owner's.
    addresses: Annotated[tuple[Annotated[str, Field(min_length=1, max_length=300)], ...], Field(max_length=64)]
    deadline_s: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]  # until the fetch is given up
    budget: Annotated[int, Field(ge=0, le=MAX_NBYTES)] | None = None  # as in Stage
    replica: Annotated[int, Field(ge=0, lt=1 << 31)] = 0  # the owner's, of a shard
    digest: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""  # of the manifest, of a slice


@dataclass(frozen=True, slots=True)
class OweCopies:
    """Order: the shards that this keeper has to keep from now on. Answer: Done. A new process says so first.

    Its copies of other shards, also those that an earlier process has ordered, are freed once ``since`` or a newer
    state is settled everywhere, because until then the new holders may not have theirs.
    """

    shards: Annotated[tuple[ShardIndex, ...], Field(max_length=MAX_COPIES)]
    since: StateId  # the state that the new plan begins with


@dataclass(frozen=True, slots=True)
class FreeCopies:
    """Order: free what this keeper has ordered of the shards of ``replicas``, which are wrong. Answer: Done."""

    replicas: Annotated[tuple[Annotated[int, Field(ge=0, lt=1 << 31)], ...], Field(max_length=MAX_COPIES)]


@dataclass(frozen=True, slots=True)
class AwaitCopies:
    """Order: say which copies of ``state`` are here. Answer: KeptCopies.

    It comes when no fetch of ``state`` for this keeper is under way, and after ``wait_s`` at the latest.
    """

    state: StateId
    wait_s: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class CopyFailure:
    """A copy that a keeper has ordered and that is not here."""

    replica: int
    rank: int
    reason: str
    state: StateId


@dataclass(frozen=True, slots=True)
class KeptCopies:
    """The copies of one keeper. What is neither complete nor failed is still being fetched."""

    complete: tuple[ShardIndex, ...]  # of the state that was asked for, verified when they arrived
    failed: tuple[CopyFailure, ...]  # of that state: could not be fetched, or is damaged
    damaged: tuple[CopyFailure, ...] = ()  # of any state: found damaged and dropped since the last answer


@dataclass(frozen=True, slots=True)
class OpenGate:
    """Order: copies of this rank's shard wait while the rank communicates. Answer: GateOpened or OrderRefused."""


@dataclass(frozen=True, slots=True)
class GateOpened:
    """The file descriptor of the rank's gate (`pacing`) comes along."""


@dataclass(frozen=True, slots=True)
class CloseGate:
    """Order: forget the gate. Answer: Done."""


_Store = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
_SliceNumber = Annotated[int, Field(ge=0, lt=MAX_SLICES)]


@dataclass(frozen=True, slots=True)
class ListSlices:
    """Order: list complete slices of a store, and drop older stores of that name. Answer: SlicesHeld."""

    store: _Store
    name: Annotated[str, Field(max_length=64)]


@dataclass(frozen=True, slots=True)
class HeldSlice:
    """A complete slice, whose checksums were compared."""

    slice: int
    slices: int  # of the store
    parts: int  # slices of a share
    digest: str  # of its manifest


@dataclass(frozen=True, slots=True)
class SlicesHeld:
    held: tuple[HeldSlice, ...]  # complete ones of a store on this host, by number


@dataclass(frozen=True, slots=True)
class DropSlices:
    """Order: free slices. Answer: Done."""

    store: _Store
    slices: Annotated[tuple[_SliceNumber, ...], Field(max_length=MAX_SLICES)]


@dataclass(frozen=True, slots=True)
class Done:
    damaged: tuple[Damage, ...] = ()  # this rank's snapshots that were found damaged since the last answer


@dataclass(frozen=True, slots=True)
class OrderRefused:
    """The order does not fit the ones before it, or there is no room."""

    reason: str


# Which orders come on a connection, by what it is for.
ORDERS: dict[Line, tuple[type, ...]] = {
    "snapshots": (
        *(Stage, Staged, Settle, Pin, Unpin, Recall, Take, Forget),
        *(KeepCopy, OweCopies, FreeCopies, OpenGate, CloseGate),
    ),
    "copies": (AwaitCopies,),
    "blocks": (ListSlices, Stage, Staged, KeepCopy, DropSlices),
    "visit": (),
}
SLOW = (Stage, Take, AwaitCopies)  # orders that may take long; those for blocks all may

_ANSWERS = (Welcome, Recalled, Taken, KeptCopies, GateOpened, SlicesHeld, Done)
# The tag of each message on the socket.
MESSAGES: dict[str, type] = {kind.__name__: kind for kind in (Hello, *chain(*ORDERS.values()), *_ANSWERS)}
MESSAGES |= {"Slot": SlotGranted, "Refused": OrderRefused}
_CODEC = bounded.MessageCodec(MESSAGES, MAX_MESSAGE)
prepare, decode = _CODEC.prepare, _CODEC.decode


def frame(message: object) -> bytes:
    return protocol.framed(_CODEC.encode(message))


def agent_name(token: str, replica: int, generation: int = 0, host: str = "") -> str:
    """Return the name of the abstract Unix socket of a replica's agent on this host.

    It cannot be computed without the token, so no other user can take it first. Ranks and agents of different
    versions of the protocol do not find each other.

    Args:
        generation: 0 to GENERATIONS - 1. An agent above 0 replaces one that neither answers nor dies.
        host: The host's name, if the machine has several hosts; "": the machine is one.
    """
    parts = (PROTOCOL_VERSION, replica, generation, *((host,) if host else ()))
    return "\0ft_hsdp/state/" + protocol.mac(token, "state-agent-name", *parts)[:32]
