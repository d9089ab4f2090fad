"""Every message on a wire, once: JSON of the core's dataclasses, tagged with their names, and checked.

Four channels use it: replica to lighthouse (HTTP), leader to its own ranks, ranks to their store (both TCP, one
JSON document per frame) and neighbours in a ring (TCP). Bulk data never passes here. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from ft_hsdp import bounded
from ft_hsdp.core import commit, effects
from ft_hsdp.core.commit import Vote
from ft_hsdp.core.grant import CatchUp, Continue, Finish, Grant, Refused, Report
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import ProtocolViolation

MAX_MESSAGE = 1 << 20
LENGTH = struct.Struct("!I")


@dataclass(frozen=True, slots=True)
class QuorumRequest:
    """A replica asks for a step. ``ring`` and ``state`` are "host:port" of each rank's listeners.

    All replicas of a job share ``config_hash``, ``layout`` and ``numerics`` (what makes equal sums equal bits).
    ``rules`` is what ``config_hash`` is over, by dotted key, so that a difference can be named; a replica that has
    been granted leaves it out.
    """

    report: Report
    ring: tuple[str, ...]
    state: tuple[str, ...]
    config_hash: str
    layout: str
    numerics: str = ""
    rules: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Wait:
    """No answer yet: ask again with the same report; ``reason`` says what is waited for."""

    reason: str


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """A supervisor's full picture of its replicas: what runs (None: nothing), exited, given up.

    ``leases`` are the replicas that the supervisor ``owner`` wants to start alone, each with the number of the
    lease that it was given last (0: none). A rank that reports for itself is no owner ("").
    """

    running: dict[int, str | None]
    exited: tuple[str, ...] = ()
    lost: tuple[int, ...] = ()
    owner: str = ""
    leases: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Eviction:
    """An order to SIGKILL one incarnation."""

    replica: int
    incarnation: str
    reason: str


@dataclass(frozen=True, slots=True)
class SupervisorReply:
    """What a supervisor gets back. ``halted`` says why the job cannot go on, if it cannot.

    ``drained`` are the replicas that are to leave, and not to be started. ``leases`` are the replicas that the
    supervisor may start for ``lease_s`` seconds from its report on, each with the number of its lease; ``rivals``
    are those that it may not start, each with the supervisor that may.
    """

    evict: tuple[Eviction, ...]
    epoch: int
    step: int
    finished: bool
    halted: str = ""
    drained: tuple[int, ...] = ()
    leases: dict[int, int] = field(default_factory=dict)
    rivals: dict[int, str] = field(default_factory=dict)
    lease_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RankBeat:
    """A sign of life of one rank: where it runs, and how far its trainer has come (counts up while it works)."""

    rank: int
    pid: int
    host: str
    progress: int


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What a replica or a supervisor tells the lighthouse beside the protocol; nothing is decided from it.

    ``source`` is an incarnation, or "supervisor". ``events`` and ``commits`` are rows as they stand in the logs
    of a run; ``dropped`` is how many rows found no place in the sender's memory.
    """

    source: str
    events: tuple[dict[str, Any], ...] = ()
    commits: tuple[dict[str, Any], ...] = ()
    ranks: tuple[RankBeat, ...] = ()
    dropped: int = 0


# Between a leader and its own ranks; the leader's orders are the core's effects.


@dataclass(frozen=True, slots=True)
class RankHello:
    """A rank is here; ``ring`` and ``state`` are where it listens ("host:port"), once it does."""

    rank: int
    ring: str
    state: str


@dataclass(frozen=True, slots=True)
class RankAlive:
    """A sign of life between the leader and its other ranks, both ways."""

    rank: int


@dataclass(frozen=True, slots=True)
class RankBroken:
    """A rank's ring is over; ``suspect`` is the replica at the other end, if one is to blame.

    ``planned`` says that a member left on purpose, for a newer epoch or at its end: nothing failed. ``accuser`` is
    the neighbour of the suspect that blames it.
    """

    rank: int
    epoch: int
    cause: str
    suspect: int | None = None
    planned: bool = False
    accuser: int | None = None


@dataclass(frozen=True, slots=True)
class RankShown:
    """A neighbour showed a rank a grant that it did not know."""

    rank: int
    grant: Grant


@dataclass(frozen=True, slots=True)
class RankStopped:
    """A rank has left the ring of ``epoch`` and is ready for another."""

    rank: int
    epoch: int


@dataclass(frozen=True, slots=True)
class RankLeaves:
    """A rank was told from outside to end, so its replica is to leave the job at the next commit."""

    rank: int


@dataclass(frozen=True, slots=True)
class RankFetched:
    """A rank staged and verified its shard of ``base``; ``kept``: its host keeps it as a copy, too."""

    rank: int
    base: StateId
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Settled:
    """From a leader to its ranks: whether all of them have a copy of ``state`` (``everywhere``), or some have not.

    Older copies may go in the one case; in the other the newest that all have must stay.
    """

    state: StateId
    everywhere: bool


@dataclass(frozen=True, slots=True)
class RankFetchFailed:
    """No donor could serve a rank."""

    rank: int
    base: StateId
    reason: str


@dataclass(frozen=True, slots=True)
class RankCheckpointed:
    """A rank's shard of ``state`` is in durable storage."""

    rank: int
    state: StateId


@dataclass(frozen=True, slots=True)
class RankCheckpointFailed:
    """A rank could not write its shard of ``state``."""

    rank: int
    state: StateId
    reason: str


# Between the ranks of a replica and their store, which rank 0 has.


@dataclass(frozen=True, slots=True)
class StoreCall:
    """``rank`` has something done with keys; the answer has the call's ``number``.

    ``values`` are base64; ``amount`` is what ``add`` adds; ``wait_s`` is how long keys may take to come.
    """

    rank: int
    number: int
    what: Literal["set", "get", "add", "check", "wait", "compare_set", "delete", "count"]
    keys: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    amount: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    wait_s: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] = 0.0


@dataclass(frozen=True, slots=True)
class StoreAnswer:
    """Of the call ``number``: what there is to say in ``amount`` or ``value`` (base64); ``error``: why not."""

    number: int
    amount: int = 0
    value: str = ""
    error: str = ""


# Between neighbours in a ring.


@dataclass(frozen=True, slots=True)
class RingHello:
    """A member calls its right neighbour for ``grant``, on a new connection or on one that both have kept.

    ``host`` names the machine, ``offers`` are the transports that it can use, best first. ``kept`` is how many
    chunks it has sent on the data connection that it still has (-1: it has none).
    """

    grant: Grant
    replica: int
    rank: int
    layout: str
    host: str
    offers: tuple[str, ...]
    kept: int = -1


@dataclass(frozen=True, slots=True)
class RingWelcome:
    """The neighbour has the same grant. ``kept``: the data connection stays; otherwise one of ``transport`` is
    to be made at ``door``, with ``ticket``."""

    epoch: int
    kept: bool
    transport: str = ""
    door: str = ""
    ticket: str = ""


@dataclass(frozen=True, slots=True)
class RingData:
    """First message on a data connection: which one of the edge it is. ``probe`` is the address of the ticket in
    the caller's memory (0: none)."""

    ticket: str
    lane: int
    probe: int = 0


@dataclass(frozen=True, slots=True)
class RingReady:
    """The data connection is taken; ``direct``: the neighbour can read the caller's memory."""

    direct: bool = False


@dataclass(frozen=True, slots=True)
class RingBarrier:
    """Goes round twice before the first all-reduce: all are connected, and all know that."""

    epoch: int
    lap: int


@dataclass(frozen=True, slots=True)
class RingBeat:
    """A sign of life while the ring of ``epoch`` forms and stands.

    ``entered`` counts the all-reduces that the sender has begun in it, ``sent`` the chunks on its data connection,
    so that its right neighbour can tell who waits itself from who has not come yet, or whose chunks do not arrive.
    ``stall_ms`` is how much longer than usual the sender may be silent because its host is overloaded, ``pid`` its
    process.
    """

    epoch: int
    entered: int
    sent: int
    stall_ms: int = 0
    pid: int = 0


@dataclass(frozen=True, slots=True)
class RingAbort:
    """The ring of ``epoch`` is over. Travels both ways; ``grant`` is a newer one, if known.

    ``stuck``: the suspect lives, but others wait in an all-reduce that it does not enter. ``accuser`` is the
    member that blames the suspect: the two ends of one edge.
    """

    epoch: int
    cause: str
    suspect: int | None = None
    grant: Grant | None = None
    planned: bool = False
    stuck: bool = False
    accuser: int | None = None


# The tag of each message on the wire. A class may get another name; a tag may not: peers and stored files use it.
_MESSAGES: dict[str, type] = {
    "Ask": QuorumRequest,
    "Wait": Wait,
    "Processes": ProcessReport,
    "Overview": SupervisorReply,
    "Telemetry": Telemetry,
    "RankHello": RankHello,
    "RankAlive": RankAlive,
    "RankBroken": RankBroken,
    "RankShown": RankShown,
    "RankStopped": RankStopped,
    "RankFetched": RankFetched,
    "RankFetchFailed": RankFetchFailed,
    "RankLeaves": RankLeaves,
    "RankCheckpointed": RankCheckpointed,
    "RankCheckpointFailed": RankCheckpointFailed,
    "Settled": Settled,
    "StoreCall": StoreCall,
    "StoreAnswer": StoreAnswer,
    "RingHello": RingHello,
    "RingWelcome": RingWelcome,
    "RingData": RingData,
    "RingReady": RingReady,
    "RingBarrier": RingBarrier,
    "RingBeat": RingBeat,
    "RingAbort": RingAbort,
    "Vote": Vote,
    "Token": commit.CommitToken,
    "Grant": Grant,
    "Continue": Continue,
    "CatchUp": CatchUp,
    "Finish": Finish,
    "Refused": Refused,
    "Configure": effects.Configure,
    "StopRing": effects.StopRing,
    "Reduce": effects.Reduce,
    "Commit": effects.Commit,
    "Log": effects.BufferUpdate,
    "Discard": effects.DropGradient,
    "Install": effects.InstallSnapshot,
    "Feed": effects.RunBatch,
    "Fetch": effects.Fetch,
    "Keep": effects.Keep,
    "Checkpoint": effects.WriteCheckpoint,
    "Forget": effects.DropSnapshots,
    "Exit": effects.Exit,
}
_CODEC = bounded.MessageCodec(_MESSAGES, MAX_MESSAGE)
tag_of, prepare, encode, decode = _CODEC.tag_of, _CODEC.prepare, _CODEC.encode, _CODEC.decode


def frame(message: object) -> bytes:
    """Return a message with its length in front, for a stream."""
    return framed(encode(message))


def framed(data: bytes) -> bytes:
    """Return ``data`` with its length in front, for a stream."""
    return LENGTH.pack(len(data)) + data


def frame_length(prefix: bytes, max_bytes: int = MAX_MESSAGE) -> int:
    """Return the number of bytes in a frame, from the LENGTH.size bytes in front of it.

    Raises:
        ProtocolViolation: the frame is longer than ``max_bytes``.
    """
    (size,) = LENGTH.unpack(prefix)
    if size > max_bytes:
        raise ProtocolViolation(f"frame of {size} bytes; allowed: {max_bytes}")
    return int(size)


def mac(token: str, *parts: object) -> str:
    """HMAC-SHA256 of canonical JSON of ``parts`` under the job's token; 64 hex digits."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=str)
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()


def genuine(token: str, claimed: str, *parts: object) -> bool:
    """Whether ``claimed`` is the MAC of ``parts``, compared in constant time."""
    return hmac.compare_digest(mac(token, *parts).encode(), claimed.encode(errors="replace"))


def _grant_body(grant: Grant) -> Any:
    return _CODEC.body(replace(grant, mac=""))


def sign(token: str, grant: Grant) -> Grant:
    """The grant with its MAC, so that a member can show it to another."""
    return replace(grant, mac=mac(token, "grant", _grant_body(grant)))


def verify(token: str, grant: Grant) -> None:
    """Check a grant that came from anywhere.

    Raises:
        ProtocolViolation: it was not made by this job's lighthouse.
    """
    if not genuine(token, grant.mac, "grant", _grant_body(grant)):
        raise ProtocolViolation(f"grant of epoch {grant.epoch} has a wrong MAC")
