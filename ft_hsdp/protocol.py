"""Every message that travels, defined once: JSON of dataclasses, tagged with a name, and checked on arrival.

Four channels use it: a replica and the lighthouse (HTTP), a leader and its ranks, ranks and their store (both TCP,
one JSON document per frame), and neighbours in a ring (TCP). Gradients and states never pass here. Nothing is
unpickled.

Field names and tags are the wire format. `MESSAGES` maps each tag to its class.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import struct
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from ft_hsdp import bounded
from ft_hsdp.core import commit, effects
from ft_hsdp.core.commit import AttemptId, Vote
from ft_hsdp.core.events import Leaving
from ft_hsdp.core.grant import CatchUp, Continue, Finish, Grant, Hosts, Refused, Report
from ft_hsdp.core.host_report import AssignedRanks, HostReport, MachineRanks
from ft_hsdp.core.state_id import StateId
from ft_hsdp.core.traces import RankTrace
from ft_hsdp.errors import ProtocolViolation

MAX_MESSAGE = 1 << 20
LENGTH = struct.Struct("!I")
MAX_COUNT = 2**53  # of a pid, a step, an epoch or an amount that only a page shows
MAX_TEXT = 256  # characters of a hash, or of a key or a value of rules and facts
MAX_RULES = 64

Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Text = Annotated[str, Field(max_length=MAX_TEXT)]
Facts = Annotated[dict[Text, Text], Field(max_length=MAX_RULES)]
Load = Annotated[dict[Text, Annotated[float, Field(ge=0, le=MAX_COUNT)]], Field(max_length=MAX_RULES)]


@dataclass(frozen=True, slots=True)
class QuorumRequest:
    """A replica asks the lighthouse for a step. Wire tag "Ask"."""

    report: Report  # what the replica says about itself
    ring: tuple[str, ...]  # "host:port" of each rank's ring listener
    state: tuple[str, ...]  # "host:port" of each rank's state listener
    config_hash: Text  # hash of the rules on which all replicas of a job agree
    layout: Text  # hash of the layouts of all ranks' shards: names, shapes and order of the tensors
    # What the bits of a sum depend on besides its operands: build, instruction set or GPU, threads.
    numerics: Text = ""
    # What `config_hash` is over, by dotted key, to name a difference; empty after the first grant.
    rules: Facts = field(default_factory=dict)
    frozen: Text = ""  # digest of the weights and buffers that are not part of the state; "": there are none
    hosts: Hosts = ()  # of its ranks
    data: Facts = field(default_factory=dict)  # facts about its data; empty after the first grant


@dataclass(frozen=True, slots=True)
class Wait:
    """Answer: not decided yet. Ask again with the same report."""

    reason: str  # what the lighthouse waits for


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """What a rank, its `control.exit_watch` or the agent of a host reports of processes. Wire tag "Processes"."""

    begun: str = ""  # an incarnation that runs: those of its run before it have exited; "": none is named
    machine: MachineRanks | None = None
    host: HostReport | None = None  # nothing else is in the report then
    # With `host`, until the first answer: as `QuorumRequest.rules`.
    rules: Facts = field(default_factory=dict)
    unfit: Text = ""  # what `hosts.check` has found: the host is refused


@dataclass(frozen=True, slots=True)
class SupervisorReply:
    """The lighthouse's answer to a `ProcessReport`. Wire tag "Overview"."""

    step: int  # newest step that is known to be committed; 0: none
    finished: bool  # whether every replica has the final state
    halted: str = ""  # why the job cannot go on; "": it can
    drained: tuple[int, ...] = ()  # replicas that are to leave, and must not be started
    exited: bool = False  # the incarnation of the report's `machine`, or nobody waits to hear that it has
    assigned: tuple[AssignedRanks, ...] = ()  # all that a host is to run; what it has besides ends (SIGKILL)
    seen: str = ""  # the digest of `assigned`, for the next `HostReport`
    refused: str = ""  # why the agent of the host has to end; "": it goes on
    wrong: bool = False  # it is `halted` because of its configuration or its script
    lost: tuple[int, ...] = ()  # replicas that were given up, and at the end of a halted job all that are not done
    cordoned: tuple[str, ...] = ()  # hosts that get no ranks any more
    placed: tuple[int, ...] = ()  # replicas that have a place on the host, also while they wait for other hosts


@dataclass(frozen=True, slots=True)
class RankBeat:
    """A sign of life of one rank."""

    rank: Count  # rank within the replica
    pid: Count  # its process
    host: str  # machine on which it runs
    progress: Count  # counts up while the trainer works
    pause: str = ""  # what its training loop does instead (`Job.pause`); "": it trains
    still_s: float = 0.0  # as in `core.traces.Heard`
    # Of its collectives, if nothing moves, and now and then; None: there is nothing new, or a message had no room.
    trace: RankTrace | None = None
    t: float = 0.0  # when it was made, and later by what it waited on its way: Unix seconds, by its host's clock
    # What the rank uses and its machine has left, by name (`lighthouse.overview.machines`); {}: nothing new.
    load: Load = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What a replica or a supervisor tells the lighthouse for display. Only `quorum.on_culprit` decides by it."""

    source: str  # an incarnation, or "supervisor"
    events: tuple[dict[str, Any], ...] = ()  # rows as they stand in events.jsonl
    commits: tuple[dict[str, Any], ...] = ()  # rows as they stand in the log of commits
    ranks: tuple[RankBeat, ...] = ()  # signs of life
    dropped: int = 0  # rows that were lost because the sender's buffer was full
    logged: tuple[dict[str, Any], ...] = ()  # values that training loops log (`Job.log`)


# Between a leader and its ranks. The leader's orders are the core's effects.


@dataclass(frozen=True, slots=True)
class RankHello:
    """A rank has connected to its leader."""

    rank: int
    ring: str  # "host:port" of its ring listener; "": it does not listen yet
    state: str  # "host:port" of its state listener
    host: str = ""  # its host: "zone/rack/host", "rack/host" or "host"; "": it does not say


@dataclass(frozen=True, slots=True)
class RankAlive:
    """A sign of life between the leader and its other ranks, in both directions."""

    rank: int
    pause_ms: Count = 0  # as in `RingBeat`, of this rank; from the leader: the longest of the replica


@dataclass(frozen=True, slots=True)
class RankBroken:
    """The ring of one rank broke."""

    rank: int
    epoch: int
    cause: str  # one line for the journal
    suspect: int | None = None  # the replica at the other end, if it is to blame
    planned: bool = False  # a member left on purpose, for a newer epoch or at its end: nothing failed
    accuser: int | None = None  # the neighbour of the suspect that blames it


@dataclass(frozen=True, slots=True)
class RankShown:
    """A neighbour showed a rank a grant that the rank did not know."""

    rank: int
    grant: Grant


@dataclass(frozen=True, slots=True)
class RankStopped:
    """A rank has left the ring of `epoch` and is ready for another."""

    rank: int
    epoch: int


@dataclass(frozen=True, slots=True)
class RankLeaves:
    """A rank was told from outside to end, or by its script, so its replica is to leave the job."""

    rank: int
    how: Leaving = "told"


@dataclass(frozen=True, slots=True)
class RankFetched:
    """A rank has fetched and verified its shard of `base`."""

    rank: int
    base: StateId
    kept: bool = False  # whether its host keeps the shard as a snapshot too


@dataclass(frozen=True, slots=True)
class Settled:
    """From a leader to its ranks: which snapshots may be dropped."""

    state: StateId  # the base of the step that was voted on, or what was fetched
    # It is complete in all promised places, so older copies may go; otherwise the newest one that is must stay.
    everywhere: bool
    waited_s: float = 0.0  # by the vote that waited longest for copies
    copied: int = 0  # bytes of copies of this state that the replica's hosts made
    step_s: float = 0.0  # since the replica's votes before; 0: it has not voted before
    # Copies that their holders refuse: the rank whose shard it is, and the rank that has said so in its vote.
    refused: tuple[tuple[int, int], ...] = ()
    late: bool = False  # copies of this state were still under way when the wait of a vote ran out


@dataclass(frozen=True, slots=True)
class ShardLeftOut:
    """From a leader to its ranks: a shard cannot be copied, so no vote on this attempt waits for copies."""

    fence: AttemptId


@dataclass(frozen=True, slots=True)
class RankFetchFailed:
    """No donor could serve a rank."""

    rank: int
    base: StateId
    reason: str


@dataclass(frozen=True, slots=True)
class RankCheckpointed:
    """A rank's shard of `state` is in durable storage."""

    rank: int
    state: StateId


@dataclass(frozen=True, slots=True)
class RankCheckpointFailed:
    """A rank could not write its shard of `state`."""

    rank: int
    state: StateId
    reason: str


# Between the ranks of a replica and their store, which is in rank 0.


@dataclass(frozen=True, slots=True)
class StoreCall:
    """A rank calls the key table of rank 0."""

    rank: int
    number: int  # of the call; the answer repeats it
    what: Literal["set", "get", "add", "check", "wait", "compare_set", "delete", "count"]
    keys: tuple[str, ...] = ()
    values: tuple[str, ...] = ()  # base64
    amount: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0  # what "add" adds
    # How long keys may take to appear, in seconds.
    wait_s: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] = 0.0


@dataclass(frozen=True, slots=True)
class StoreAnswer:
    """The answer to one `StoreCall`."""

    number: int  # of the call
    amount: int = 0  # a number or a truth value
    value: str = ""  # base64
    error: str = ""  # why the call failed; "": it did not


# Between neighbours in a ring.


@dataclass(frozen=True, slots=True)
class RingHello:
    """A member calls its right neighbour for `grant`, on a new connection or on one that both have kept."""

    grant: Grant
    replica: int
    rank: int
    layout: str  # hash of the layouts of all ranks' shards
    host: str  # names the machine
    offers: tuple[str, ...]  # transports that the caller can use, best first
    kept: int = -1  # chunks it has sent on the data connection that it still has; -1: it has none


@dataclass(frozen=True, slots=True)
class RingWelcome:
    """The neighbour has the same grant."""

    epoch: int
    kept: bool  # the data connection stays; otherwise a new one is made
    transport: str = ""  # of the new data connection
    door: str = ""  # where the caller connects for it
    ticket: str = ""  # what the caller shows there


@dataclass(frozen=True, slots=True)
class RingData:
    """First message on a data connection."""

    ticket: str  # of the `RingWelcome`
    lane: int  # number of the connection, of the several of one edge
    probe: int = 0  # address of the ticket in the caller's memory; 0: none


@dataclass(frozen=True, slots=True)
class RingReady:
    """The data connection is accepted."""

    direct: bool = False  # whether the neighbour can read the caller's memory


@dataclass(frozen=True, slots=True)
class RingBarrier:
    """Goes round twice before the first all-reduce: first all are connected, then all know that."""

    epoch: int
    lap: int


@dataclass(frozen=True, slots=True)
class RingBeat:
    """A sign of life while the ring of `epoch` forms and stands.

    The counters let the right neighbour tell a member that waits itself from one that has not come yet, and from
    one whose chunks do not arrive.
    """

    epoch: int
    entered: int  # all-reduces that the sender has begun in this ring
    sent: int  # chunks that it has sent on its data connection
    stall_ms: int = 0  # how much longer than usual it may be silent, because its host is overloaded
    pid: int = 0  # its process
    # For how long a training loop of its replica may go on with something else (`Job.pause`); 0: all train.
    pause_ms: int = 0


@dataclass(frozen=True, slots=True)
class RingAbort:
    """The ring of `epoch` broke. Travels in both directions."""

    epoch: int
    cause: str  # one line for the journal
    suspect: int | None = None  # the replica that is held responsible, if there is one
    grant: Grant | None = None  # a newer one, if the sender knows one
    planned: bool = False  # a member left on purpose: nothing failed
    stuck: bool = False  # the suspect lives, but does not enter the all-reduce in which others wait
    accuser: int | None = None  # the member that blames the suspect: the other end of the edge


# The tag of each message on the wire. A class may get another name; a tag may not: peers and stored files use it.
MESSAGES: dict[str, type] = {
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
    "ShardLeftOut": ShardLeftOut,
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
    "DropCopies": effects.DropCopies,
    "Exit": effects.Exit,
}
_CODEC = bounded.MessageCodec(MESSAGES, MAX_MESSAGE)
tag_of, prepare, encode, decode = _CODEC.tag_of, _CODEC.prepare, _CODEC.encode, _CODEC.decode


def frame(message: object) -> bytes:
    """Return a message with its length in front (4 bytes, big-endian), for a stream."""
    return framed(encode(message))


def framed(data: bytes) -> bytes:
    """Return `data` with its length in front (4 bytes, big-endian), for a stream."""
    return LENGTH.pack(len(data)) + data


_BEAT = '{"type":"RingBeat","body":{' + ",".join(f'"{each.name}":%d' for each in fields(RingBeat)) + "}}"
_BEATS = re.compile(re.escape(_BEAT).replace("%d", r"(\d{1,18})").encode())


def beat_frame(*numbers: int) -> bytes:
    """Return the `frame` of the `RingBeat` with these fields; a fifth of its time, for what is sent often."""
    return framed((_BEAT % numbers).encode())


def beat_in(data: bytes) -> RingBeat | None:
    """Return the heartbeat that `beat_frame` has encoded in `data`, in half the time of `decode`; else None."""
    found = _BEATS.fullmatch(data)
    return RingBeat(*map(int, found.groups())) if found is not None else None


def frame_length(prefix: bytes, max_bytes: int = MAX_MESSAGE) -> int:
    """Return the length of the next frame on a stream from its `prefix`, the `LENGTH.size` bytes in front of it.

    Raises:
        ProtocolViolation: the frame is longer than `max_bytes`.
    """
    (size,) = LENGTH.unpack(prefix)
    if size > max_bytes:
        raise ProtocolViolation(f"frame of {size} bytes; allowed: {max_bytes}")
    return int(size)


def mac(token: str, *parts: object) -> str:
    """Return the HMAC-SHA256 of canonical JSON of `parts` with the key `token`: 64 hex digits."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=str)
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()


def genuine(token: str, claimed: str, *parts: object) -> bool:
    """Return whether `claimed`, any text, is the MAC of `parts` under `token`; compared in constant time."""
    return hmac.compare_digest(mac(token, *parts).encode(), claimed.encode(errors="replace"))


def _grant_body(grant: Grant) -> Any:
    return _CODEC.body(replace(grant, mac=""))


def sign(token: str, grant: Grant) -> Grant:
    """Return the `grant` with its MAC under `token` over all other fields: a member can show it to another."""
    return replace(grant, mac=mac(token, "grant", _grant_body(grant)))


def verify(token: str, grant: Grant) -> None:
    """Check that a `grant`, perhaps from another member, is of the lighthouse that knows the `token`.

    Raises:
        ProtocolViolation: its MAC is wrong.
    """
    if not genuine(token, grant.mac, "grant", _grant_body(grant)):
        raise ProtocolViolation(f"grant of epoch {grant.epoch} has a wrong MAC")
